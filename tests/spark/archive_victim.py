"""Archives rows of JSON files, and kills itself before the step that it was told.

    python -m spark.archive_victim FOLDER STEP

STEP is `stage`, `add`, `move` (before the first file), `moved` (after it), `end` or `none`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from millstream.spark.pipelines.archive import MicroBatches
from millstream.spark.pipelines.lake import Lake
from millstream.spark.session import spark_session

ROWS = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, lane STRING"
)


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(step: str, files: Any) -> Any:
    """The lake's methods, with a death in front of one; its file system for the moves."""
    if step == "stage":
        Lake.staged_names = die  # type: ignore[assignment, method-assign]
    elif step == "add":
        Lake.add = die  # type: ignore[assignment, method-assign]
    elif step == "end":
        finish = Lake.finish

        def and_die(lake: Lake, entry: Any) -> None:
            finish(lake, entry)
            die()

        Lake.finish = and_die  # type: ignore[assignment, method-assign]
    return Dying(files, step) if step in ("move", "moved") else files


class Dying:
    """A file system in which the program dies around its first move of a file of data."""

    def __init__(self, files: Any, step: str) -> None:
        self.files, self.step = files, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def move(self, source: str, target: str) -> None:
        if target.endswith(".parquet") and self.step == "move":
            die()
        self.files.move(source, target)
        if target.endswith(".parquet"):
            die()


def main(folder: str, step: str) -> None:
    lake = Lake.at(f"{folder}/lake")
    lake = Lake(lake.url, arm(step, lake.files), lake.root)
    if step == "none":
        lake.finish_all()
    spark = spark_session("victim", master="local[1]", settings={"spark.driver.memory": "700m"})
    rows = spark.readStream.schema(ROWS).option("maxFilesPerTrigger", 1).json(f"{folder}/in")
    newest = max((entry.written_ms for entry in lake.entries()), default=0)
    checkpoint = f"{folder}/checkpoint"
    batches = MicroBatches(lake, checkpoint, {"t": "u"}, 2**20, lake.ends(), newest)
    writer = rows.writeStream.foreachBatch(batches.write).trigger(availableNow=True)
    writer.option("checkpointLocation", checkpoint).start().awaitTermination()
    print(len(lake.entries()))


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    main(sys.argv[1], sys.argv[2])
