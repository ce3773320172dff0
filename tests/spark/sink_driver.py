"""A streaming query in a process of its own, to be killed: files → topic, a file a micro-batch."""

from __future__ import annotations

import sys

from millstream.spark.session import spark_session


def main(
    server: str,
    topic: str,
    folder: str,
    checkpoint: str,
    # A task that fails is tried again.
    master: str = "local[2,4]",
) -> None:
    settings = {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = spark_session("killed", master=master, settings=settings)
    rows = (
        spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).json(folder)
    ).repartition(2)
    query = (
        rows.writeStream.format("millstream")
        .options(server=server, topic=topic, batchSize="1K")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
