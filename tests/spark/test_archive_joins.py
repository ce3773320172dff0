"""Where a topic and its archive meet, found without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_process import BrokerProcess
from millstream.errors import ArchiveInvalid, DataLost
from millstream.spark.archive_reading import with_archive
from millstream.spark.driver import Loss
from millstream.spark.pipelines.archived import boundary_of
from millstream.spark.pipelines.lake import Entry, Lake, OffsetRange
from millstream.spark.positions import Limit, Position
from spark.records import client_of, publish

EARLIEST = Limit("earliest")
IDS = {"orders": "u1"}
PARTS = (("orders", 0), ("orders", 1))


def position(*offsets: int) -> Position:
    return Position(dict(zip(PARTS, offsets, strict=True)), IDS)


def lake_of(folder: Path, **ends: int) -> str:
    """With entries that hold partition 0 of a topic up to an offset."""
    lake = Lake.at(str(folder / "lake"))
    for topic, end in ends.items():
        held = OffsetRange(topic, "u1", 0, 0, end, end, 0, 0)
        lake.add(Entry(topic, 0, [f"topic={topic}/date=d/{topic}.parquet"], [held]), {})
    return lake.url


@pytest.mark.parametrize("held", [{}, {"payments": 90}, {"orders": 7}])
def test_a_log_that_begins_after_an_archive_that_holds_nothing_of_it_is_lost_data(
    tmp_path: Path, held: dict[str, int]
) -> None:
    """A mistyped folder, another topic's archive, and one of another partition."""
    url, loss = lake_of(tmp_path, **held), Loss(is_failing=True)
    with pytest.raises(DataLost, match="is it the folder of its archive") as caught:
        with_archive(url, EARLIEST, position(0, 5), position(9, 9), loss)
    assert caught.value.fields["partition"] == 1
    assert (caught.value.fields["first"], caught.value.fields["last"]) == (0, 4)


def test_a_query_that_may_lose_data_goes_on_without_what_no_archive_holds(tmp_path: Path) -> None:
    url, loss = lake_of(tmp_path, orders=3), Loss(is_failing=False)
    files, start = with_archive(url, EARLIEST, position(0, 5), position(9, 9), loss)
    assert [wanted.offsets for _, wanted in files] == [{0: (0, 3)}]
    assert (start.offsets, loss.offsets) == (position(3, 5).offsets, 5)


def test_a_log_that_is_there_from_its_first_record_needs_no_archive(tmp_path: Path) -> None:
    url, loss = lake_of(tmp_path), Loss(is_failing=True)
    files, start = with_archive(url, EARLIEST, position(0, 0), position(9, 9), loss)
    assert (files, start.offsets) == ([], position(0, 0).offsets)


def test_a_boundary_with_an_archive_that_holds_nothing_is_refused_once_the_log_has_lost_records(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    publish(broker, "aj-empty", [{"value": number} for number in range(10)], partitions=1)
    lake = Lake.at(str(tmp_path / "mistyped"))
    assert boundary_of("aj-empty", lake, broker.url("")).ends == {0: 0}
    with client_of(broker) as client:
        client.topics.purge("aj-empty")
    with pytest.raises(ArchiveInvalid, match="holds nothing of partition 0 of aj-empty"):
        boundary_of("aj-empty", lake, broker.url(""))
