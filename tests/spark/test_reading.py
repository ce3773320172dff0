"""What a task does, without Spark: over the wire and from segment files."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from broker_process import BrokerProcess, wait_until
from millstream.errors import BrokerUnreachable, DataLost, KafkaAnswerInvalid, TopicUnknown
from millstream.log import batch as batches
from millstream.spark import segments
from millstream.spark.driver import EVERYTHING, Driver
from millstream.spark.manifests import PartFiles
from millstream.spark.rows import ARROW_TYPES, Shape
from millstream.spark.slices import Reading, Task, read
from millstream.spark.source_options import SourceOptions, read_source_options
from spark.producing import client_of, fill, kafka_of, make_topic, produce

SHAPE = Shape(pa.schema([(name, ARROW_TYPES[name]) for name in ("offset", "value")]))


def options_of(broker: BrokerProcess, topic: str, **more: str) -> SourceOptions:
    given = {"server": broker.url(""), "subscribe": topic, "startingOffsets": "earliest"} | more
    return read_source_options(given, {}, is_stream=None)


def reading_of(driver: Driver) -> Reading:
    options = driver.options
    return Reading(
        place=options.place,
        servers=driver.servers,
        shape=SHAPE,
        access=options.access,
        isolation=options.isolation,
        fetch_bytes=options.fetch_bytes,
        is_failing_on_loss=options.is_failing_on_loss,
    )


def planned(broker: BrokerProcess, topic: str, **more: str) -> tuple[Reading, list[Task]]:
    driver = Driver(options_of(broker, topic, **more))
    try:
        return reading_of(driver), driver.tasks(driver.starting(), driver.ending(), EVERYTHING)
    finally:
        driver.close()


def rows(reading: Reading, tasks: list[Task]) -> list[tuple[int, bytes | None]]:
    return [
        (row["offset"], row["value"])
        for task in tasks
        for made in read(reading, task)
        for row in made.to_pylist()
    ]


@pytest.fixture(params=["wire", "files"])
def access(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbered(count: int) -> list[tuple[int, bytes]]:
    return [(n, b"v%d" % n) for n in range(count)]


def test_both_ways_give_all_records_in_order(broker: BrokerProcess, access: str) -> None:
    topic = f"both-{access}"
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 25_000)
    reading, tasks = planned(broker, topic, access=access)
    assert rows(reading, tasks) == numbered(25_000)
    # Ranges that begin and end inside of batches.
    reading, tasks = planned(broker, topic, access=access, minPartitions="7")
    assert len(tasks) == 7
    assert rows(reading, tasks) == numbered(25_000)


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_is_read(broker: BrokerProcess, access: str, compression: str) -> None:
    topic = f"{compression}-{access}"
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 3_000, compression=compression)
    reading, tasks = planned(broker, topic, access=access)
    assert rows(reading, tasks) == numbered(3_000)


def test_a_value_of_ten_megabytes_is_read(broker: BrokerProcess, access: str) -> None:
    topic = f"large-{access}"
    make_topic(broker, topic, message_bytes_max=32 * 2**20)
    value = os.urandom(10_000_000)
    with kafka_of(broker.kafka) as kafka:
        for _ in range(2):
            produce(kafka, (topic, 0), batches.encode([(1, None, value, [])]))
        produce(kafka, (topic, 0), batches.encode([(1, None, b"small", [])]))
    reading, tasks = planned(broker, topic, access=access)
    assert rows(reading, tasks) == [(0, value), (1, value), (2, b"small")]


def test_an_empty_topic_has_no_tasks(broker: BrokerProcess, access: str) -> None:
    make_topic(broker, f"empty-{access}", 3)
    assert planned(broker, f"empty-{access}", access=access)[1] == []


def test_files_go_over_many_segments(broker: BrokerProcess) -> None:
    make_topic(broker, "segmented", segment_bytes=2**20)
    fill(broker.kafka, ("segmented", 0), 40_000, value=b"v" * 100)
    reading, tasks = planned(broker, "segmented", access="files", maxRecordsPerPartition="9000")
    assert len(tasks) == 5
    files = tasks[1].files
    assert files is not None
    # Each task is told only of what it needs.
    assert 0 < len(files.segments) < 5
    found = rows(reading, tasks)
    assert [offset for offset, _ in found] == list(range(40_000))


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a topic in which compaction left the newest records."""
    flags = ("--kafka", "127.0.0.1:0", "--compaction-interval", "200ms")
    with BrokerProcess(str(tmp_path_factory.mktemp("compacted")), *flags) as process:
        process.wait_until_ready()
        make_topic(process, "compacted", compact=True, segment_bytes=2**20)
        fill(process.kafka, ("compacted", 0), 30_000, value=b"v" * 100)

        def is_compacted() -> bool:
            reading, tasks = planned(process, "compacted", access="wire")
            return len(rows(reading, tasks)) < 20_000

        wait_until(is_compacted, "a compaction")
        yield process


def test_a_compacted_topic_is_read_with_its_gaps(compacted: BrokerProcess, access: str) -> None:
    reading, tasks = planned(compacted, "compacted", access=access, minPartitions="3")
    found = rows(reading, tasks)
    offsets = [offset for offset, _ in found]
    assert len(offsets) < 20_000
    assert offsets == sorted(set(offsets))
    # The newest record of each key is always there.
    assert set(offsets) >= set(range(29_990, 30_000))


# ---- what is gone


def trimmed(broker: BrokerProcess, topic: str, offset: int) -> None:
    from kafka.protocol.admin import DeleteRecordsRequest, DeleteRecordsResponse

    Topic = DeleteRecordsRequest.DeleteRecordsTopic  # noqa: N806  a class
    with kafka_of(broker.kafka) as kafka:
        kafka.leader((topic, 0)).ask(
            DeleteRecordsRequest,
            DeleteRecordsResponse,
            _version=2,
            timeout_ms=10_000,
            topics=[
                Topic(
                    name=topic,
                    partitions=[Topic.DeleteRecordsPartition(partition_index=0, offset=offset)],
                )
            ],
        )


def test_records_that_are_gone_fail_a_task_and_are_named(
    broker: BrokerProcess, access: str
) -> None:
    topic = f"gone-{access}"
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 5_000)
    reading, tasks = planned(broker, topic, access=access)
    trimmed(broker, topic, 2_500)
    if access == "files":
        # The broker keeps a file for a minute after its records are gone, for readers as this.
        assert len(rows(reading, tasks)) in (2_500, 5_000)
        return
    with pytest.raises(DataLost) as caught:
        rows(reading, tasks)
    assert caught.value.fields == {"topic": topic, "partition": 0, "first": 0, "last": 2_499}
    assert "offsets 0 to 2499" in caught.value.message
    reading, _ = planned(broker, topic, access=access, failOnDataLoss="false")
    assert rows(reading, tasks) == numbered(5_000)[2_500:]


def test_a_topic_that_was_made_again_is_not_taken_for_the_old_one(
    broker: BrokerProcess, access: str
) -> None:
    topic = f"again-{access}"
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 100)
    reading, tasks = planned(broker, topic, access=access)
    with client_of(broker) as client:
        client.topics.delete(topic)
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 200, value=b"other")
    with pytest.raises(DataLost):
        rows(reading, tasks)
    if access == "wire":
        lenient, _ = planned(broker, topic, access=access, failOnDataLoss="false")
        assert rows(lenient, tasks) == []


def test_a_topic_that_goes_while_it_is_read_fails_its_task(broker: BrokerProcess) -> None:
    make_topic(broker, "going")
    fill(broker.kafka, ("going", 0), 20_000)
    reading, tasks = planned(broker, "going", access="wire")
    batches_read = read(reading, tasks[0])
    next(batches_read)
    with client_of(broker) as client:
        client.topics.delete("going")
    make_topic(broker, "going")
    with pytest.raises(DataLost):
        list(batches_read)


# ---- files that are not as they should be


def test_files_that_cannot_be_seen_are_left_to_the_wire(broker: BrokerProcess) -> None:
    make_topic(broker, "elsewhere")
    fill(broker.kafka, ("elsewhere", 0), 2_000)
    reading, tasks = planned(broker, "elsewhere")
    assert tasks[0].files is not None
    hidden = [moved(task, task.files, "/nowhere/topics/elsewhere@0") for task in tasks]
    assert rows(reading, hidden) == numbered(2_000)


def moved(task: Task, files: PartFiles | None, directory: str) -> Task:
    assert files is not None
    return replace(task, files=replace(files, directory=directory))


def test_small_ranges_are_not_worth_a_question_for_files(broker: BrokerProcess) -> None:
    make_topic(broker, "small")
    fill(broker.kafka, ("small", 0), 50)
    assert [task.files for task in planned(broker, "small")[1]] == [None]


@pytest.mark.parametrize("at", [3, 700, 90_000])
def test_a_flipped_bit_is_never_read_from_a_file(
    broker: BrokerProcess, tmp_path: Path, at: int
) -> None:
    topic = f"flipped-{at}"
    make_topic(broker, topic)
    fill(broker.kafka, (topic, 0), 10_000)
    reading, tasks = planned(broker, topic)
    files = tasks[0].files
    assert files is not None
    name = files.segments[0].name
    copy = tmp_path / f"{topic}@{files.uuid}" / "0"
    copy.mkdir(parents=True)
    wait_until(lambda: os.path.getsize(Path(files.directory, name)) > at, "the bytes")
    content = bytearray(Path(files.directory, name).read_bytes())
    content[at] ^= 1
    (copy / name).write_bytes(content)
    damaged = [moved(task, task.files, str(copy)) for task in tasks]
    # What is whole before the damage is taken, and the rest comes from the broker.
    assert rows(reading, damaged) == numbered(10_000)


def test_a_gap_between_segments_is_not_passed_over(broker: BrokerProcess) -> None:
    make_topic(broker, "holed", segment_bytes=2**20)
    fill(broker.kafka, ("holed", 0), 40_000, value=b"v" * 100)
    _, tasks = planned(broker, "holed", access="files")
    files = tasks[0].files
    assert files is not None
    assert len(files.segments) > 3
    holed = replace(files, segments=(files.segments[0], *files.segments[2:]))
    reading = segments.read(holed, 0, 40_000)
    with pytest.raises(segments.Unusable) as caught:
        list(reading)
    assert caught.value.offset == files.segments[1].base_offset


def test_files_that_are_behind_are_waited_for(broker: BrokerProcess) -> None:
    # Small appends are written to their segments a while after they are durable.
    make_topic(broker, "behind")
    with client_of(broker) as client:
        for number in range(30):
            client.topics.publish("behind", b"v%d" % number)
            reading, tasks = planned(broker, "behind", access="files")
            assert rows(reading, tasks) == numbered(number + 1)


# ---- brokers that go away


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Callable[[], BrokerProcess]]:
    """Starts, and starts again, a broker on the same data and addresses."""
    started: list[BrokerProcess] = []

    def start() -> BrokerProcess:
        flags = ["--kafka", started[-1].kafka if started else "127.0.0.1:0"]
        if started:
            flags += ["--http", started[-1].url("").removeprefix("http://")]
        process = BrokerProcess(str(tmp_path), *flags)
        started.append(process)
        return process.wait_until_ready()

    yield start
    for process in started:
        process.__exit__()


def test_a_broker_that_is_killed_while_it_is_read_is_waited_for(
    own_broker: Callable[[], BrokerProcess],
) -> None:
    broker = own_broker()
    make_topic(broker, "killed")
    fill(broker.kafka, ("killed", 0), 60_000, value=b"v" * 100)
    more = {"access": "wire", "kafka.max.partition.fetch.bytes": "200000"}
    reading, tasks = planned(broker, "killed", **more)
    found: list[Any] = []
    again: list[BrokerProcess] = []
    for made in read(reading, tasks[0]):
        found += made.column("offset").to_pylist()
        if not again:
            broker.stop(signal.SIGKILL)
            starter = threading.Thread(target=lambda: again.append(own_broker()))
            starter.start()
            again.append(broker)
    starter.join()
    assert found == list(range(60_000))


def test_a_broker_that_stays_away_is_named(broker: BrokerProcess) -> None:
    with (
        kafka_of("127.0.0.1:1", patience_s=0.3) as kafka,
        pytest.raises(BrokerUnreachable) as caught,
    ):
        kafka.metadata(None)
    assert "127.0.0.1:1" in caught.value.message


def test_an_address_of_something_else_is_told(broker: BrokerProcess) -> None:
    http = broker.url("").removeprefix("http://")
    with kafka_of(http, patience_s=5) as kafka, pytest.raises(KafkaAnswerInvalid) as caught:
        kafka.metadata(None)
    assert "`server`" in caught.value.message


def test_a_topic_that_is_not_there_is_named(broker: BrokerProcess) -> None:
    with pytest.raises(TopicUnknown) as caught:
        planned(broker, "nowhere")
    assert caught.value.fields == {"topic": "nowhere"}
    # Nor is it there now: looking makes nothing.
    with pytest.raises(TopicUnknown):
        planned(broker, "nowhere")
