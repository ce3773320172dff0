"""One Spark session and one broker for all tests of Spark.

A session takes seconds to start and a gigabyte to hold, so all of these tests are one group, and
run in one process, however many there are for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker_process import BrokerProcess
from millstream.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
TIMEOUT_S = 900
TEST_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    # Progress of queries is looked at by tests, all of it.
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))
            # The first one pays for the start of Spark, and each for whoever else is at work.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = spark_session("tests", master="local[2]", settings=TEST_SETTINGS)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """With a Kafka listener; each test makes topics of its own."""
    directory = str(tmp_path_factory.mktemp("broker"))
    with BrokerProcess(directory, "--kafka", "127.0.0.1:0") as process:
        yield process.wait_until_ready()
