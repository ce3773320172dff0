"""Add what is known of its customer to each order.

    mill pipeline run examples/spark/enrich.py:enrich

Orders are a stream, customers a table: the newest record of each key in the topic `customers`. The
table is read anew for each micro-batch. An order whose customer is unknown goes through without;
what is no JSON object is no order, and is left out.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from millstream.spark.pipelines import Context, pipeline

ORDER = "id BIGINT, customer STRING, total DOUBLE"
CUSTOMER = "name STRING, country STRING"


@pipeline(
    source="orders",
    sink="orders-enriched",
    key="customer",
    source_options={"valueFormat": "json", "valueSchema": ORDER},
)
def enrich(orders: DataFrame, context: Context) -> DataFrame:
    """Add its customer's name and country to each order."""
    records = context.table("customers", valueFormat="json", valueSchema=CUSTOMER)
    newest = f.max_by("value", f.struct("partition", "offset"))
    customers = records.groupBy(f.col("key").cast("string").alias("customer")).agg(
        newest.alias("known")
    )
    return (
        orders.where("value IS NOT NULL")
        .select("value.*")
        .join(customers, "customer", "left")
        .select("customer", "id", "total", "known.name", "known.country")
    )
