"""Pipelines against a broker whose certificate an authority of one's own has signed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker_process import BrokerProcess
from certificates import Pair
from millstream.client import Client
from millstream.errors import BrokerUnreachable, SettingInvalid
from millstream.spark.manifests import kafka_addresses
from millstream.spark.options import BROKER_ROWS, read_options, read_place
from millstream.spark.pipelines import archive, restore
from millstream.spark.pipelines.archived import read_with_archive
from millstream.spark.pipelines.context import broker_client
from millstream.spark.pipelines.registry import Pipeline
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from spark.moved_clock import MovedClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.pipelines.state import Status


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = str(tmp_path_factory.mktemp("secure"))
    with BrokerProcess(folder, "--kafka", "127.0.0.1:0", *pair.flags) as process:
        yield process.wait_until_ready()


def test_an_archive_is_made_read_and_restored_over_tls(
    spark: SparkSession, secure: BrokerProcess, pair: Pair, tmp_path: Path
) -> None:
    server, ca, lake = secure.url(""), str(pair.authority), str(tmp_path / "lake")

    def run(pipeline: Pipeline, **given: str) -> Status:
        settings = RunSettings(server=server, ca=ca, folder=tmp_path / "runs")
        return run_pipeline(pipeline, given, settings, session=spark)

    with Client(server, tls=pair.trust()) as client:
        client.topics.create("orders", partitions=2)
        client.topics.publish_many("orders", [{"value": {"n": n}} for n in range(20)])
        assert run(archive.PIPELINE, topics="orders", to=lake).records == 20
        given = {"from": lake, "topic": "orders", "to": "again"}
        assert run(restore.PIPELINE, **given).records == 20
        assert sorted(one.json()["n"] for one in client.read("again")) == list(range(20))
    both = read_with_archive(spark, "orders", lake, server=server, options={"CA": ca})
    assert sorted(json.loads(row.value)["n"] for row in both.collect()) == list(range(20))


def test_a_certificate_that_is_not_trusted_is_not_waited_for_and_says_what_helps(
    secure: BrokerProcess,
) -> None:
    clock = MovedClock()
    place = read_place(read_options({"server": secure.url("")}, BROKER_ROWS), {})
    with pytest.raises(BrokerUnreachable, match=r"not trusted: .*; name who .* the option ca$"):
        kafka_addresses(place, clock=clock, sleep=clock.sleep)
    assert clock.slept_s == []


def test_a_file_that_names_nobody_to_trust_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("none", encoding="utf-8")
    with pytest.raises(
        SettingInvalid, match=r"--ca is .*, which cannot be used: is no certificate"
    ):
        broker_client("https://127.0.0.1:8443", str(wrong))
    gone = str(tmp_path / "gone.pem")
    with pytest.raises(SettingInvalid, match="which cannot be used: No such file"):
        broker_client("https://127.0.0.1:8443", gone)
