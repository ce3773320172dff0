"""The examples of pipelines do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from broker_process import BrokerProcess
from millstream.spark.pipelines.registry import find
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.pipelines.state import Status
from spark.records import publish, read_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples" / "spark"


def run(
    name: str, spark: SparkSession, broker: BrokerProcess, folder: Path, **options: str
) -> Status:
    found = find(f"{EXAMPLES}/{name}.py:{name}")
    settings = RunSettings(server=broker.url(""), folder=folder)
    return run_pipeline(found, options, settings, session=spark)


def test_a_payment_goes_through_once(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    hour = 3_600_000
    start = 1_763_942_400_000

    def sent(id: int, time_ms: int) -> dict[str, object]:
        return {"key": f"k{id}", "value": {"id": id}, "timestamp_ms": start + time_ms}

    publish(broker, "ex-payments", [sent(1, 0), sent(2, 1_000), sent(1, 2_000)])
    wanted = {"source": "ex-payments", "to": "ex-once"}
    assert run("dedupe", spark, broker, tmp_path, **wanted).records == 3
    publish(broker, "ex-payments", [sent(2, 5_000), sent(3, 6_000)])
    assert run("dedupe", spark, broker, tmp_path, **wanted).records == 2
    assert sorted(one.json()["id"] for one in read_all(broker, "ex-once")) == [1, 2, 3]
    # Past the hour it counts as another: the first of these moves time on.
    publish(broker, "ex-payments", [sent(4, 4 * hour)])
    run("dedupe", spark, broker, tmp_path, **wanted)
    publish(broker, "ex-payments", [sent(1, 4 * hour)])
    run("dedupe", spark, broker, tmp_path, **wanted)
    assert sorted(one.json()["id"] for one in read_all(broker, "ex-once")) == [1, 1, 2, 3, 4]


def test_payments_that_nothing_tells_apart_all_go_through(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    publish(broker, "ex-unknown", [{"value": {"total": 1}}, {"value": "no id"}, {"value": "no id"}])
    run("dedupe", spark, broker, tmp_path, source="ex-unknown", to="ex-known")
    assert len(read_all(broker, "ex-known")) == 3


def test_orders_know_their_customers(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    publish(
        broker,
        "customers",
        [
            {"key": "c1", "value": {"name": "Ada", "country": "FR"}},
            {"key": "c1", "value": {"name": "Ada", "country": "UK"}},
        ],
    )
    orders: list[dict[str, object]] = [
        {"value": {"id": 1, "customer": "c1", "total": 2.5}},
        {"value": {"id": 2, "customer": "c9", "total": 1.0}},
        {"value": "no order"},
        {"key": "c1", "value": None},
    ]
    publish(broker, "ex-orders", orders)
    wanted = {"source": "ex-orders", "to": "topic:ex-enriched"}
    run("enrich", spark, broker, tmp_path, **wanted)
    enriched = read_all(broker, "ex-enriched")
    assert len(enriched) == 2
    assert {one.key: one.json() for one in enriched} == {
        b"c1": {"customer": "c1", "id": 1, "total": 2.5, "name": "Ada", "country": "UK"},
        b"c9": {"customer": "c9", "id": 2, "total": 1.0},
    }
