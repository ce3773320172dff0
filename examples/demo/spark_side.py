"""What Spark does: `rollup` and `archive` catch up again and again; when no more orders come, once
more, and then `deadletters` writes its report.

These are the pipelines of `mill pipeline run`; one program runs them all in one session. It tells
what it did on its standard output, a line of JSON each, and hears `finish` on its standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from orders import TOPIC
from processes import hear

from millstream.spark.pipelines import archive, deadletters, rollup
from millstream.spark.pipelines.registry import Pipeline
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.session import spark_session

TOTALS = f"{TOPIC}.totals"
# Between two rounds, while orders come.
PAUSE_S = 1.0


def main(server: str, folder: Path) -> None:
    finish = threading.Event()
    hear("finish", finish.set)
    lake, totals, report = folder / "lake", folder / "totals", folder / "report"
    settings = RunSettings(server=server, folder=folder / "pipelines")
    # The rows of a demo need no more than one task after a shuffle.
    small = {"spark.sql.shuffle.partitions": "1", "spark.driver.memory": "1g"}
    spark = spark_session("demo", master="local[2]", settings=small)
    tell("spark", state="ready")

    def catch_up(pipeline: Pipeline, **options: str) -> None:
        tell("begin", pipeline=pipeline.name)
        status = run_pipeline(pipeline, options, settings, session=spark)
        tell(pipeline.name, records=status.records_ever, state=status.state)
        if status.state == "stopped":
            sys.exit(0)

    is_last = False
    while not is_last:
        is_last = finish.wait(PAUSE_S)
        catch_up(
            rollup.PIPELINE,
            topics=TOPIC,
            to=f"topic:{TOTALS},parquet:{totals}",
            window="5s",
            watermark="3s",
            by="country",
            sum="amount",
            distinct="customer",
            **{"percentiles-of": "amount", "percentiles": "50,95"},
        )
        catch_up(archive.PIPELINE, topics=TOPIC, to=str(lake))
    catch_up(deadletters.PIPELINE, report=str(report))
    archived = spark.read.parquet(str(lake / "topic=*" / "date=*")).count() if lake.exists() else 0
    tell(
        "report",
        page=str(report / "report.md"),
        lake=str(lake),
        totals=str(totals),
        archived=archived,
    )
    spark.stop()


def tell(what: str, **facts: object) -> None:
    print(json.dumps({"what": what} | facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
