"""Let each payment through once, however often it is sent.

    mill pipeline run examples/spark/dedupe.py:dedupe

A payment is known by the field `id` of its JSON. One that comes again within an hour (`--within`)
by its record's time is left out; state is kept no longer than that, so one that is later than
others by more than that is left out too. A payment without an `id` is not known, and goes through.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from millstream.spark.pipelines import Context, Option, pipeline


@pipeline(
    source="payments",
    sink="payments-once",
    options=[
        Option("by", "The field of the value that tells payments apart.", default="id"),
        Option("within", "How long a payment is remembered.", default="1 hour", metavar="TIME"),
    ],
)
def dedupe(payments: DataFrame, context: Context) -> DataFrame:
    """Let each payment through once, by a field of its value."""
    field = f.get_json_object(f.col("value").cast("string"), f"$.{context.options['by']}")
    place = f.concat_ws("/", "topic", "partition", "offset")
    return (
        payments.withColumn("id", f.struct(field, f.when(field.isNull(), place)))
        .withWatermark("timestamp", context.options["within"])
        .dropDuplicatesWithinWatermark(["id"])
        .select("key", "value", "timestamp")
    )
