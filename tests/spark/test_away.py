"""A broker that is away is waited for, also where it is asked over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.errors import BrokerUnreachable, DataLost, MillstreamError
from millstream.spark.driver import Driver
from millstream.spark.kafka_client import Kafka
from millstream.spark.manifests import PartFiles, SegmentFile, kafka_addresses
from millstream.spark.options import BROKER_ROWS, BrokerPlace, read_options, read_place
from millstream.spark.patience import WARN_S
from millstream.spark.positions import Position
from millstream.spark.ranges import Range
from millstream.spark.rows import ARROW_TYPES, Shape
from millstream.spark.slices import Reading, Task, read
from millstream.spark.source_options import read_source_options
from spark.moved_clock import MovedClock
from spark.scripted_http import Files, ScriptedHttp

CLUSTER, MANIFEST = "/v1/admin/cluster", "/v1/topics/orders/manifest"
UUID = "0123456789abcdef0123456789abcdef"
SHAPE = Shape(pa.schema([("value", ARROW_TYPES["value"])]))


@pytest.fixture
def http() -> Iterator[ScriptedHttp]:
    with ScriptedHttp() as made:
        made.pages[CLUSTER] = {"nodes": [{"kafka": "127.0.0.1:9"}]}
        yield made


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, UUID)


def place_of(http: ScriptedHttp, patience_s: float = 60.0) -> BrokerPlace:
    given = {"server": http.url, "kafkaConsumer.pollTimeoutMs": str(int(patience_s * 1000))}
    return read_place(read_options(given, BROKER_ROWS), {})


def clock_that(at_sleep: int, then: Callable[[], None]) -> MovedClock:
    """Does something in its n-th sleep."""
    return MovedClock(lambda number: then() if number == at_sleep else None)


# ---- the start of a query


def test_a_query_that_starts_while_its_broker_is_away_waits_for_it(http: ScriptedHttp) -> None:
    clock = clock_that(3, http.start)
    options = read_source_options({"server": http.url, "subscribe": "orders"}, {}, is_stream=None)
    assert Driver(options, clock=clock, sleep=clock.sleep).servers == ("127.0.0.1:9",)
    assert len(clock.slept_s) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_broker_that_says_to_come_back_is_waited_for(http: ScriptedHttp, status: int) -> None:
    right = http.pages[CLUSTER]
    http.pages[CLUSTER] = status
    http.start()
    clock = clock_that(2, lambda: http.pages.update({CLUSTER: right}))
    assert kafka_addresses(place_of(http), clock=clock, sleep=clock.sleep) == ("127.0.0.1:9",)


def test_a_broker_that_stays_away_is_named_with_the_time_it_was_given(http: ScriptedHttp) -> None:
    clock = MovedClock()
    with pytest.raises(BrokerUnreachable) as caught:
        kafka_addresses(place_of(http, 30.0), clock=clock, sleep=clock.sleep)
    assert http.url in caught.value.message
    assert "30 s (the option kafkaConsumer.pollTimeoutMs)" in caught.value.message
    assert 28 < sum(clock.slept_s) <= 30


def test_a_wait_for_a_broker_is_said_once_after_a_while(
    http: ScriptedHttp, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    with pytest.raises(BrokerUnreachable):
        kafka_addresses(place_of(http, 30.0), clock=clock, sleep=clock.sleep)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    said = caplog.text
    assert f"no broker answers at {http.url}: " in said
    assert re.search(r"it is tried for 2[67] s more \(the option kafkaConsumer", said)
    caplog.clear()
    # The same where addresses of Kafka are given.
    place = read_place(read_options({"servers": "127.0.0.1:1"}, BROKER_ROWS), {})
    with pytest.raises(BrokerUnreachable):
        Kafka(place, place.servers, clock=clock, sleep=clock.sleep).metadata(None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no broker answers the Kafka protocol at 127.0.0.1:1: " in caplog.text
    assert re.search(r"it is tried for 11[67] s more", caplog.text)


def test_a_broker_that_only_restarts_is_not_spoken_of(
    http: ScriptedHttp, caplog: pytest.LogCaptureFixture
) -> None:
    clock = clock_that(3, http.start)
    kafka_addresses(place_of(http), clock=clock, sleep=clock.sleep)
    assert sum(clock.slept_s) < WARN_S
    assert caplog.records == []


def test_what_is_no_broker_is_not_waited_for(http: ScriptedHttp) -> None:
    del http.pages[CLUSTER]
    http.start()
    clock = MovedClock()
    with pytest.raises(MillstreamError):
        kafka_addresses(place_of(http), clock=clock, sleep=clock.sleep)
    assert clock.slept_s == []


# ---- files alone


def values(
    http: ScriptedHttp, files: Files, clock: MovedClock, access: str = "files"
) -> list[bytes]:
    """Of offsets 0 to 3, by the files that a driver knew of."""
    page = files.manifest()
    http.pages.setdefault(MANIFEST, page)
    reading = Reading(
        place=place_of(http),
        servers=("127.0.0.1:9",),
        shape=SHAPE,
        access=access,
        isolation=1,
        fetch_bytes=2**20,
        is_failing_on_loss=True,
    )
    known = PartFiles(
        directory=f"{page['directory']}/0",
        uuid=files.uuid,
        start_offset=0,
        high_watermark=4,
        segments=(SegmentFile(f"{0:020d}.log", 0, is_sealed=False),),
    )
    task = Task(Range(("orders", 0), 0, 4), None, known)
    found = read(reading, task, clock=clock, sleep=clock.sleep)
    return [row["value"] for made in found for row in made.to_pylist()]


def test_files_whose_broker_restarts_are_read_on_when_it_is_back(
    http: ScriptedHttp, files: Files
) -> None:
    files.add(b"a", b"b")

    def back() -> None:
        files.add(b"c", b"d")
        http.pages[MANIFEST] = files.manifest()
        http.start()

    # Longer than files are waited for that lie behind.
    clock = clock_that(30, back)
    assert values(http, files, clock) == [b"a", b"b", b"c", b"d"]


def test_files_that_lie_behind_have_their_time_after_the_broker_is_back(
    http: ScriptedHttp, files: Files
) -> None:
    files.add(b"a", b"b")
    steps: dict[int, Callable[[], None]] = {30: http.start, 32: lambda: files.add(b"c", b"d")}
    clock = MovedClock(lambda number: steps[number]() if number in steps else None)
    assert values(http, files, clock) == [b"a", b"b", b"c", b"d"]


def test_files_whose_broker_stays_away_are_not_lost_data(http: ScriptedHttp, files: Files) -> None:
    files.add(b"a", b"b")
    clock = MovedClock()
    with pytest.raises(BrokerUnreachable, match="it was tried for 60 s"):
        values(http, files, clock)
    assert 58 < sum(clock.slept_s) <= 60


def test_files_of_another_topic_are_lost_data_at_once(http: ScriptedHttp, files: Files) -> None:
    files.add(b"a", b"b")
    http.pages[MANIFEST] = files.manifest() | {"uuid": "f" * 32}
    http.start()
    clock = MovedClock()
    with pytest.raises(DataLost):
        values(http, files, clock)
    http.pages[MANIFEST] = 404
    with pytest.raises(DataLost):
        values(http, files, clock)
    assert clock.slept_s == []


@pytest.mark.parametrize("access", ["files", "auto"])
def test_a_driver_waits_for_the_files_only_where_it_must(
    http: ScriptedHttp, files: Files, access: str
) -> None:
    files.add(*[b"v"] * 2_000)
    http.pages[MANIFEST] = files.manifest()
    clock = clock_that(5, http.start)
    given = {"server": http.url, "subscribe": "orders", "access": access}
    driver = Driver(read_source_options(given, {}, is_stream=None), clock=clock, sleep=clock.sleep)
    part = ("orders", 0)
    tasks = driver.tasks(Position({part: 0}), Position({part: 2_000}))
    assert (tasks[0].files is not None) == (access == "files")
    assert len(clock.slept_s) == (5 if access == "files" else 0)
