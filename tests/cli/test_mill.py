"""The command from outside: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import millstream
from broker_process import MILL, PATIENCE_SECONDS, plain_environment
from millstream.cli.main import NOUNS
from millstream.config import TABLE
from millstream.config_docs import settings_page


def mill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILL, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment({"COLUMNS": "200", "NO_COLOR": "1"} | environment),
        check=False,
    )


def test_the_version() -> None:
    done = mill("--version")
    assert (done.returncode, done.stdout) == (0, f"mill {millstream.__version__}\n")


def test_help_lists_every_noun() -> None:
    done = mill("--help")
    assert done.returncode == 0
    assert all(text in done.stdout for _, text in NOUNS.values())


def test_help_imports_no_noun_and_nothing_of_the_server() -> None:
    program = (
        "import sys\nfrom millstream.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'fastapi', 'uvicorn', 'uvloop', 'structlog', 'pyarrow',"
        " 'millstream.cli.serve', 'millstream.server'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_every_noun_explains_itself() -> None:
    for noun in NOUNS:
        done = mill(noun, "--help")
        assert done.returncode == 0, done.stderr
        assert f"Usage: mill {noun}" in done.stdout


def test_every_setting_is_a_flag_of_serve() -> None:
    done = mill("serve", "--help")
    assert [setting.flag for setting in TABLE if setting.flag not in done.stdout] == []


def test_an_unknown_command_is_a_usage_error_with_a_guess() -> None:
    done = mill("confg")
    assert done.returncode == 2
    assert "Did you mean 'config'?" in done.stderr


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "mill.toml"
    file.write_text('retention_age = "30d"\n')
    done = mill(
        "config", "show", "--config", str(file), "--http", "off", MILLSTREAM_FSYNC="interval"
    )
    assert done.returncode == 0
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.stdout.splitlines()}
    assert rows["http"] == ["off", "flag --http"]
    assert rows["fsync"] == ["interval", "environment MILLSTREAM_FSYNC"]
    assert rows["retention_age"] == ["30d", f"file {file}"]
    assert rows["segment_bytes"] == ["64M", "default"]
    assert set(rows) == {setting.name for setting in TABLE}


def test_config_show_as_json() -> None:
    done = mill("config", "show", "--json", "--node-id", "5")
    page = json.loads(done.stdout)
    assert page["node_id"] == {"value": "5", "from": "flag --node-id"}
    assert list(page) == [setting.name for setting in TABLE]


def test_config_show_reports_what_is_wrong_in_one_message() -> None:
    done = mill("config", "show", "--node-id", "five", MILLSTREAM_HTTP="8080")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mill: setting_invalid: 2 settings cannot be used:\n")


def test_config_show_warns_of_unknown_variables() -> None:
    done = mill("config", "show", MILLSTREAM_HTP="8080")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: the environment variable MILLSTREAM_HTP is not a setting; "
        "did you mean MILLSTREAM_HTTP?\n"
    )


def test_config_docs_prints_the_page() -> None:
    assert mill("config", "docs").stdout == settings_page()


def test_without_the_servers_packages_serve_says_what_to_install() -> None:
    program = (
        "import sys\nsys.modules['uvicorn'] = None\n"
        "from millstream.cli.main import main\nmain(['serve'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("pip install 'millstream[server]'\n")
    assert "Traceback" not in done.stderr
