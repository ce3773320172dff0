"""Topics as tables of Spark, and Spark's work back into topics.

    options.py      every option of source and sink, read and checked together
    positions.py    where a query stands in each partition, and where it is to start and end
    ranges.py       what a batch takes, and how it is cut into tasks
    kafka_client.py a blocking client of the Kafka protocol; fetching.py its hot path
    manifests.py    what the broker says of segment files; segments.py reads them
    rows.py         batches of records as Arrow columns, exactly as Spark wants them
    driver.py       what the driver does; slices.py what a task does
    datasource.py   the classes that Spark calls

Only `datasource.py`, the sink's counterpart, `session.py` and `pipelines` import pyspark.
"""
