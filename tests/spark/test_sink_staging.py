"""What a task stages: all its rows once, in bounded requests, and bad rows as dead letters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import BrokerUnreachable, ColumnInvalid, OptionInvalid, RowInvalid
from millstream.log.batch import decode
from millstream.spark.encoding import TopicShape
from millstream.spark.sink_options import SinkOptions, sink_options
from millstream.spark.sink_schema import check_columns
from millstream.spark.staging import TaskDone, TaskPlace, chunks, stage_rows
from millstream.wire.staged import BODY_BYTES_MAX, NO_PART, StagedEntry, split_entries

NOW_MS = 1_800_000_000_000
PLACE = TaskPlace("totals", 7, 3, 1)
SHAPES = {"orders": TopicShape("orders", 3, "murmur2", 1 << 20, False)}


class Recorder:
    """A broker that keeps what is staged."""

    def __init__(self, *, is_committed: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.is_committed = is_committed
        self.error: Exception | None = None
        self.wanted_bytes = 0
        self._lock = threading.Lock()

    def stage(self, place: TaskPlace, body: bytes) -> str:
        assert place == PLACE
        if self.error is not None:
            raise self.error
        if self.is_committed:
            return NO_PART
        with self._lock:
            self.bodies.append(body)
            return f"part-{len(self.bodies)}"

    def shape_of(self, topic: str) -> TopicShape | None:
        return SHAPES.get(topic)

    def ensure_dead_letters(self, topic: str, bytes_max: int) -> int:
        assert topic == "orders"
        self.wanted_bytes = max(self.wanted_bytes, bytes_max)
        return 3

    def entries(self) -> list[StagedEntry]:
        return [entry for body in self.bodies for entry in split_entries(body)]

    def values(self, topic: str = "orders") -> list[bytes | None]:
        batches = [entry.batch for entry in self.entries() if entry.topic == topic]
        return [record.value for batch in batches for record in decode(batch)]


def options(**given: str) -> SinkOptions:
    return sink_options({"topic": "orders", **given}, {}, is_stream=True)


def values_of(*values: bytes, rows: int = 1000) -> Iterator[Any]:
    for at in range(0, len(values), rows):
        some = pa.array(values[at : at + rows], pa.binary())
        yield pa.RecordBatch.from_arrays([some], names=["value"])


def stage(broker: Recorder, batches: Iterator[Any], **given: str) -> TaskDone:
    return stage_rows(batches, options(**given), PLACE, broker, lambda: NOW_MS)


# ---- requests


def test_all_rows_are_staged_in_requests_of_a_bounded_size() -> None:
    broker = Recorder()
    values = [b"%08d" % n + b"x" * 1000 for n in range(20_000)]
    done = stage(broker, values_of(*values), compression="none")
    assert sorted(v or b"" for v in broker.values()) == values
    assert len(broker.bodies) > 2
    assert all(len(body) <= BODY_BYTES_MAX for body in broker.bodies)
    assert sorted(done.parts) == sorted(f"part-{n + 1}" for n in range(len(broker.bodies)))
    assert (done.writer, done.batch, done.rows, done.dead) == ("totals", 7, 20_000, 0)


def test_no_rows_need_no_request() -> None:
    broker = Recorder()
    assert stage(broker, values_of()).parts == ()
    assert broker.bodies == []


def test_a_batch_that_is_committed_is_not_staged_again_and_spark_is_heard_to_the_end() -> None:
    broker = Recorder(is_committed=True)
    taken = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for batch in values_of(*[b"x" * 100_000] * 300, rows=10):
            taken += 1
            yield batch

    done = stage(broker, rows(), compression="none")
    assert set(done.parts) == {NO_PART}
    assert (taken, done.rows) == (30, 300)


def test_a_broker_that_stays_away_fails_the_task() -> None:
    broker = Recorder()
    broker.error = BrokerUnreachable("no broker answers")
    with pytest.raises(BrokerUnreachable):
        stage(broker, values_of(b"v"))


def test_chunks_are_of_about_one_size_whatever_comes() -> None:
    small = list(values_of(*[b"x" * 100] * 5000, rows=100))
    joined = list(chunks(small, 100_000))
    assert 1 < len(joined) < 10
    large = list(values_of(*[b"x" * 1000] * 5000, rows=5000))
    cut = list(chunks(large, 100_000))
    assert 20 < len(cut) < 80
    for some in (joined, cut):
        assert sum(chunk.num_rows for chunk in some) == 5000
    empty = next(values_of(b"v")).slice(1)
    assert list(chunks([empty, empty], 100)) == []


# ---- rows that cannot be written


def bad_rows() -> Iterator[Any]:
    yield pa.RecordBatch.from_arrays(
        [
            pa.array([b"a", b"b", b"c", b"d"], pa.binary()),
            pa.array([b"1", b"2", b"3", b"4"], pa.binary()),
            pa.array(["high", "urgent", None, "normal"]),
            pa.array([1, 1, 99, 2], pa.int32()),
            pa.array([None, [("n", b"x"), ("ms-dead-error", b"old")], None, None], HEADERS),
        ],
        names=["key", "value", "lane", "partition", "headers"],
    )


HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))


def test_a_bad_row_fails_the_task_with_its_number_and_its_reason() -> None:
    with pytest.raises(RowInvalid, match=r"row 1 of task 3.*'urgent'.*onError") as caught:
        stage(Recorder(), bad_rows())
    assert caught.value.fields == {"row": 1, "topic": "orders"}


def test_bad_rows_go_to_the_dead_letters_and_say_why() -> None:
    broker = Recorder()
    done = stage(broker, bad_rows(), onError="deadletter")
    assert (done.rows, done.dead) == (4, 2)
    assert sorted(v or b"" for v in broker.values()) == [b"1", b"4"]
    letters = [entry for entry in broker.entries() if entry.topic == "orders.dlq"]
    found = {record.value: (one.partition, record) for one in letters for record in decode(one[3])}
    partition, record = found[b"2"]
    assert (partition, record.key) == (1, b"b")
    headers = dict(record.headers)
    assert (headers.pop("ms-dead-error") or b"").startswith(b"there is no lane 'urgent'")
    assert headers == {
        "n": b"x",
        "ms-dead-topic": b"orders",
        "ms-dead-partition": b"1",
        "ms-dead-group": b"totals",
        "ms-dead-deliveries": b"1",
        "ms-dead-reason": b"rejected",
        "ms-dead-first-failure": b"%d" % NOW_MS,
        "ms-dead-last-failure": b"%d" % NOW_MS,
    }
    partition, record = found[b"3"]
    assert partition in (0, 1, 2)
    assert "ms-dead-partition" not in dict(record.headers)
    assert b"partition 99" in (dict(record.headers)["ms-dead-error"] or b"")


def test_a_row_that_is_too_large_finds_room_among_the_dead_letters() -> None:
    broker = Recorder()
    large = b"x" * (2 * 2**20)
    stage(broker, values_of(b"v", large), onError="deadletter", compression="none")
    assert broker.values("orders.dlq") == [large]
    assert broker.wanted_bytes >= len(large) + 8 * 1024


@pytest.mark.parametrize("topic", [None, "nowhere", "orders.dlq"])
def test_where_there_are_no_dead_letters_the_task_fails(topic: str | None) -> None:
    SHAPES["orders.dlq"] = SHAPES["orders"]._replace(name="orders.dlq")
    rows = pa.RecordBatch.from_arrays(
        [pa.array([b"v"]), pa.array([topic], pa.string()), pa.array([-1], pa.int32())],
        names=["value", "topic", "partition"],
    )
    chosen = sink_options({"onError": "deadletter"}, {}, is_stream=True)
    with pytest.raises(RowInvalid, match=r"row 0 of task 3.*no topic whose dead letters"):
        stage_rows([rows], chosen, PLACE, Recorder(), lambda: NOW_MS)


@pytest.mark.parametrize("topic", [None, "nowhere", "or/ders"])
def test_of_dead_letters_is_told_only_where_there_are_some(topic: str | None) -> None:
    names = pa.array([topic], pa.string())
    rows = pa.RecordBatch.from_arrays([pa.array([b"v"]), names], names=["value", "topic"])
    with pytest.raises(RowInvalid, match="row 0 of task 3") as caught:
        stage_rows([rows], sink_options({}, {}, is_stream=True), PLACE, Recorder(), lambda: NOW_MS)
    assert "onError" not in caught.value.message


def test_headers_are_left_out_when_they_are_not_wanted() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array([b"v"]), pa.array([[("n", b"x")]], HEADERS)], names=["value", "headers"]
    )
    for wanted, count in (("true", 1), ("false", 0)):
        broker = Recorder()
        stage(broker, iter([rows]), includeHeaders=wanted)
        [record] = decode(broker.entries()[0].batch)
        assert len(record.headers) == count


# ---- columns and options


def test_columns_of_the_right_types_are_taken() -> None:
    check_columns(
        [
            ("key", "string"),
            ("value", "binary"),
            ("headers", "array<struct<key:string,value:binary>>"),
            ("topic", "string"),
            ("partition", "int"),
            ("lane", "string"),
            ("deliver_at", "timestamp"),
            ("timestamp", "timestamp"),
            ("offset", "bigint"),
            ("timestampType", "int"),
        ],
        has_topic=False,
        is_millstream=True,
    )
    check_columns([("value", "string"), ("key", "void")], has_topic=True, is_millstream=False)


@pytest.mark.parametrize(
    ("fields", "column", "words"),
    [
        ([("key", "string")], "value", "to_json"),
        ([("value", "bigint")], "value", r"bigint.*binary or string.*CAST\(value AS STRING\)"),
        ([("value", "struct<a:int>")], "value", r"binary or string: use to_json\(value\)"),
        ([("value", "void")], "value", "void"),
        ([("value", "string"), ("vlaue", "int")], "vlaue", "did you mean 'value'"),
        ([("value", "string"), ("amount", "int")], "amount", "no column 'amount'; it has key"),
        ([("value", "string"), ("partition", "bigint")], "partition", "bigint; it must be int"),
        ([("value", "string"), ("deliver_at", "string")], "deliver_at", "must be timestamp"),
        ([("value", "string"), ("headers", "map<string,string>")], "headers", "array<struct"),
    ],
)
def test_a_wrong_column_is_named_with_what_would_be_right(
    fields: list[tuple[str, str]], column: str, words: str
) -> None:
    with pytest.raises(ColumnInvalid, match=words) as caught:
        check_columns(fields, has_topic=True, is_millstream=True)
    assert caught.value.fields == {"column": column}


def test_something_must_say_where_rows_go() -> None:
    with pytest.raises(ColumnInvalid, match="set the option topic, or add a column topic"):
        check_columns([("value", "string")], has_topic=False, is_millstream=True)


@pytest.mark.parametrize("column", ["lane", "deliver_at"])
def test_what_only_millstream_can_do_is_refused_elsewhere(column: str) -> None:
    kind = "string" if column == "lane" else "timestamp"
    with pytest.raises(ColumnInvalid, match="Millstream alone"):
        check_columns([("value", "string"), (column, kind)], has_topic=True, is_millstream=False)


@pytest.mark.parametrize(
    ("given", "is_stream", "words"),
    [
        ({"compression": "brotli"}, True, "none.*gzip.*zstd"),
        ({"batchSize": "huge"}, True, "batchSize"),
        ({"onError": "ignore"}, True, "fail.*deadletter"),
        ({"onErorr": "fail"}, True, "did you mean 'onError'"),
        ({"writer": "a b"}, True, "no name"),
        ({"batch": "3"}, True, "numbers its batches itself"),
        ({"batch": "3"}, False, "option writer"),
        ({"writer": "w"}, False, "option batch"),
        ({"kafka.value.serializer": "x"}, False, "functions of Spark"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(
    given: dict[str, str], is_stream: bool, words: str
) -> None:
    with pytest.raises(OptionInvalid, match=words):
        sink_options(given, {}, is_stream=is_stream)


def test_options_are_those_of_sparks_connector_and_ours() -> None:
    found = sink_options(
        {
            "kafka.bootstrap.servers": "one:9092,two:9092",
            "topic": "orders",
            "Kafka.Compression.Type": "zstd",
            "BATCHSIZE": "64K",
            "startingOffsets": "earliest",
            "kafka.linger.ms": "5",
        },
        {},
        is_stream=False,
    )
    assert found.place.servers == ("one:9092", "two:9092")
    assert (found.compression, found.batch_bytes) == ("zstd", 64 * 1024)
    assert (
        sink_options(
            {"compression": "gzip", "kafka.compression.type": "lz4"}, {}, is_stream=True
        ).compression
        == "gzip"
    )
