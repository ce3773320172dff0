"""Runs the tests of other people's clients against brokers of ours: `make test-clients`.

Their tests are fetched with the source package of the version that is installed here, and thrown
away afterwards. A test that fails must have an excuse below, and an excuse must be needed: one
whose test passes is to be taken away.

kafka-python's are in its source package. aiokafka's are not: what it puts on PyPI has had no tests
since 0.1.0. They are run when a package has them again, or when `AIOKAFKA_SOURCE` names a folder
with its source and tests; `test_kafka_aio.py` is ours in their place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from broker_process import BrokerProcess

TRANSACTIONS = "needs transactions"
ACCESS = "needs access control"
SECONDS_MAX = 60
# By which the plugins below find the broker.
ADDRESS = "MILLSTREAM_SUITE_BROKER"


class Suite(NamedTuple):
    package: str
    # Where its tests are in its source, and the plugin that gives them a broker.
    tests: str
    plugin: str
    # What its tests expect of a broker.
    flags: tuple[str, ...]
    # Why a test may fail, by the end of its name, without its parameters.
    excused: Mapping[str, str]
    # Of a package that may come without tests: where else they may be.
    elsewhere: str = ""


KAFKA_PYTHON = Suite(
    "kafka-python",
    "test/integration",
    "clients.kafka_python_plugin",
    ("--node-id", "0", "--topic-partitions", "4"),
    {
        "test_create_describe_delete_acls": ACCESS,
        "test_transactional_producer_messages": TRANSACTIONS,
        "test_transactional_producer_offsets": TRANSACTIONS,
    },
)
AIOKAFKA = Suite(
    "aiokafka",
    "tests",
    "clients.aiokafka_plugin",
    ("--topic-partitions", "2"),
    {},
    elsewhere="AIOKAFKA_SOURCE",
)


def main() -> int:
    return max([run(suite) for suite in (KAFKA_PYTHON, AIOKAFKA)])


def run(suite: Suite) -> int:
    with tempfile.TemporaryDirectory() as directory:
        source = fetch(suite, Path(directory))
        if not (source / suite.tests).is_dir():
            print(f"{suite.package}: there are no tests in the source package {source.name}")
            print(f"{suite.package}: set {suite.elsewhere} to a folder with its source to run them")
            return 0
        report = Path(directory) / "report.xml"
        with BrokerProcess(directory, "--kafka", "127.0.0.1:0", *suite.flags) as broker:
            broker.wait_until_ready()
            test(suite, source, broker.kafka, report)
        return judge(suite, report)


def fetch(suite: Suite, directory: Path) -> Path:
    """Their source."""
    own = os.environ.get(suite.elsewhere) if suite.elsewhere else None
    if own:
        return Path(shutil.copytree(own, directory / suite.package))
    wanted = f"{suite.package}=={version(suite.package)}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", suite.package, "--dest", str(directory), wanted]
    subprocess.run(pip, check=True)
    (package,) = directory.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(directory, filter="data")
    return package.with_name(package.name.removesuffix(".tar.gz"))


def test(suite: Suite, source: Path, address: str, report: Path) -> None:
    own = Path(__file__).parent.parent
    path = [str(own), str(own.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {ADDRESS: address, "PYTHONPATH": os.pathsep.join(path)}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb", "short"]
    program += ["-p", suite.plugin, "--rootdir", str(source), "-c", os.devnull]
    program += ["--show-capture", "no", "--timeout", str(SECONDS_MAX)]
    program += [f"--junitxml={report}", suite.tests]
    subprocess.run(program, cwd=source, env=environment, check=False)


def judge(suite: Suite, report: Path) -> int:
    """0 when nothing failed without an excuse, and every excuse was needed."""
    outcomes = dict(results(report))
    failed = {name for name, has_failed in outcomes.items() if has_failed}
    passed = outcomes.keys() - failed
    wrong = sorted(failed - suite.excused.keys())
    idle = sorted(name for name in suite.excused if name in passed or name not in outcomes)
    for name in sorted(failed & suite.excused.keys()):
        print(f"excused: {name}: {suite.excused[name]}")
    for name in wrong:
        print(f"failed: {name}")
    for name in idle:
        print(f"needs no excuse any more: {name}")
    counts = f"{len(passed)} passed, {len(failed)} failed, {len(wrong)} of them without an excuse"
    print(f"{suite.package} {version(suite.package)}: {counts}")
    return 1 if wrong or idle or not passed else 0


def results(report: Path) -> Iterator[tuple[str, bool]]:
    """Of each test that was run, whether it failed; of one with parameters, whether it ever did."""
    failed: dict[str, bool] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = case.attrib["name"].partition("[")[0]
        has_failed = case.find("failure") is not None or case.find("error") is not None
        failed[name] = failed.get(name, False) or has_failed
    yield from failed.items()


if __name__ == "__main__":
    sys.exit(main())
