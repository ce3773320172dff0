"""An archive that is killed between any two of its steps has each record once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from broker_process import plain_environment
from spark.sparks import SPARK_SECONDS

FILES, ROWS = 2, 40
TESTS = str(Path(__file__).parent.parent)


def make_rows(folder: Path) -> None:
    """Files that are read one a micro-batch, with records of two days."""
    folder.mkdir()
    for number in range(FILES):
        rows = [
            {
                "topic": "t",
                "partition": row % 2,
                "offset": number * ROWS + row,
                "timestamp": f"2026-11-{18 + row % 2}T10:00:00Z",
                "lane": "normal",
            }
            for row in range(ROWS)
        ]
        path = folder / f"{number}.json"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        # The order in which they are read.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def archive(folder: Path, step: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spark.archive_victim", str(folder), step],
        capture_output=True,
        text=True,
        timeout=SPARK_SECONDS,
        env=plain_environment({"PYTHONPATH": TESTS}),
        check=False,
    )


def offsets_in(lake: Path) -> list[int]:
    """What a reader finds that knows nothing of entries."""
    files = list(lake.glob("topic=*/date=*/*.parquet"))
    return [offset for file in files for offset in pq.read_table(file)["offset"].to_pylist()]


# One of them in every run, the others where time does not matter.
@pytest.mark.parametrize(
    "step",
    [
        "moved",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("stage", "add", "move", "end")),
    ],
)
def test_a_killed_archive_has_each_record_once(tmp_path: Path, step: str) -> None:
    make_rows(tmp_path / "in")
    dead = archive(tmp_path, step)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    lake = tmp_path / "lake"
    assert max(Counter(offsets_in(lake)).values(), default=1) == 1
    # Only what stands between the first entry and the first move has counted.
    assert len(list(lake.glob("_millstream/entries/*"))) == (step in ("move", "moved", "end"))
    mended = archive(tmp_path, "none")
    assert mended.returncode == 0, mended.stderr
    assert sorted(offsets_in(lake)) == list(range(FILES * ROWS))
    assert mended.stdout.split() == [str(FILES)]
    assert not list(lake.glob("_millstream/staged/*"))
