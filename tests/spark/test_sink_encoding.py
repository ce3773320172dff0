"""Rows as Arrow columns become batches for each topic, partition, lane and time; bad ones are told
with their number and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.log import batch as batches
from millstream.log.batch import LANES, read_header
from millstream.spark.encoding import HORIZON_MS, BadRow, Encoded, Encoder, TopicShape
from millstream.spark.row_columns import HEADERS
from millstream.wire.partitioning import Partitioner, partition_of_key
from millstream.wire.staged import StagedEntry, join_entries, split_entries

NOW_MS = 1_800_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)
TIME = pa.timestamp("us", tz="UTC")
KINDS = {
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": HEADERS,
    "topic": pa.string(),
    "partition": pa.int32(),
    "lane": pa.string(),
    "deliver_at": TIME,
    "timestamp": TIME,
}
ORDERS = TopicShape("orders", 3, "murmur2", 1000, False)
PAYMENTS = TopicShape("payments", 5, "murmur3", 1000, False)
NEWEST = TopicShape("newest", 2, "murmur2", 1000, True)
SHAPES = {one.name: one for one in (ORDERS, PAYMENTS, NEWEST)}


def table(rows: Iterable[Mapping[str, Any]], **kinds: Any) -> Any:
    listed = list(rows)
    names = [name for name in KINDS if any(name in row for row in listed)]
    arrays = [
        pa.array([row.get(name) for row in listed], kinds.get(name, KINDS[name])) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def encode(chunk: Any, *, first_row: int = 0, **options: Any) -> Encoded:
    encoder = Encoder(
        **{
            "topic": None if "topic" in chunk.schema.names else "orders",
            "compression": "none",
            "batch_bytes": 10_000,
            "shape_of": SHAPES.get,
            "now_ms": lambda: NOW_MS,
            **options,
        }
    )
    return encoder.encode(chunk, first_row)


def records(entries: Iterable[StagedEntry]) -> dict[tuple[str, int, int], list[Any]]:
    """By topic, partition and time, and in their order; each as it is decoded."""
    found = defaultdict(list)
    for entry in split_entries(join_entries(entries)):
        batches.examine(entry.batch, bytes_max=2**20)
        header = read_header(entry.batch)
        for record in batches.decode(entry.batch, check_crc=True):
            assert header.lane in (record.lane, None)
            found[entry.topic, entry.partition, entry.deliver_at_ms].append(record)
    return dict(found)


def reasons(bad: Iterable[BadRow]) -> dict[int, str]:
    return {one.row: one.reason for one in bad}


# ---- good rows

contents = st.none() | st.binary(max_size=20)
rows_of = st.lists(
    st.fixed_dictionaries(
        {
            "key": contents,
            "value": contents,
            "headers": st.none()
            | st.lists(
                st.fixed_dictionaries({"key": st.text("abc", min_size=1), "value": contents}),
                max_size=2,
            ),
            "topic": st.sampled_from(["orders", "payments"]),
            "partition": st.none() | st.integers(0, 2),
            "lane": st.none() | st.sampled_from([*LANES, "0", "4"]),
            "deliver_at": st.none() | st.sampled_from([NOW + timedelta(hours=n) for n in (-1, 2)]),
        }
    ),
    max_size=30,
)


@given(rows_of, st.integers(1, 300), st.integers(0, 7))
def test_every_row_is_in_its_place_in_order(
    rows: list[dict[str, Any]], batch_bytes: int, skipped: int
) -> None:
    # Its time tells a row from the others.
    for number, row in enumerate(rows):
        row["timestamp"] = NOW - timedelta(milliseconds=number)
    padding = [{"value": b"", "topic": "orders"}] * skipped
    encoded = encode(table([*padding, *rows], **KINDS).slice(skipped), batch_bytes=batch_bytes)
    assert encoded.bad == []
    found = {
        record.timestamp: (place, record)
        for place, some in records(encoded.entries).items()
        for record in some
    }
    assert len(found) == len(rows)
    for number, row in enumerate(rows):
        place, record = found[NOW_MS - number]
        assert (record.key, record.value) == (row["key"], row["value"])
        assert list(record.headers) == expected_headers(row)
        assert place in expected_places(row)
    for some in records(encoded.entries).values():
        for lane in (None, *LANES):
            times = [record.timestamp for record in some if record.lane == lane]
            assert times == sorted(times, reverse=True)


def expected_headers(row: Mapping[str, Any]) -> list[tuple[str, bytes | None]]:
    lane = row["lane"]
    lane = LANES[int(lane)] if lane is not None and lane.isdecimal() else lane
    own = [] if lane in (None, "normal") else [("ms-lane", lane.encode())]
    return [(one["key"], one["value"]) for one in row["headers"] or ()] + own


def expected_places(row: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    shape = SHAPES[row["topic"]]
    is_later = row["deliver_at"] is not None and row["deliver_at"] > NOW
    partitions: Iterable[int] = range(shape.partitions)
    if row["partition"] is not None:
        partitions = [row["partition"]]
    elif is_later:
        partitions = [-1]
    elif row["key"] is not None:
        partitions = [partition_of_key(row["key"], shape.partitions, _hash(shape))]
    due_ms = NOW_MS + 2 * 3_600_000 if is_later else 0
    return [(shape.name, partition, due_ms) for partition in partitions]


def _hash(shape: TopicShape) -> Partitioner:
    return "murmur3" if shape.partitioner == "murmur3" else "murmur2"


@pytest.mark.parametrize("compression", batches.COMPRESSIONS)
def test_batches_are_compressed_as_asked(compression: str) -> None:
    rows = [{"value": b"v%d" % n, "key": b"k%d" % (n % 9)} for n in range(100)]
    encoded = encode(table(rows), compression=compression)
    assert {read_header(entry.batch).compression for entry in encoded.entries} == {compression}
    values = {record.value for some in records(encoded.entries).values() for record in some}
    assert values == {row["value"] for row in rows}


def test_text_is_written_as_its_bytes() -> None:
    rows: list[dict[str, Any]] = [
        {"key": "schlüssel", "value": "wért"},
        {"key": None, "value": None},
    ]
    encoded = encode(table(rows, key=pa.string(), value=pa.string()), topic="payments")
    found = [record for some in records(encoded.entries).values() for record in some]
    assert sorted((r.key or b"", r.value) for r in found if r.value) == [
        ("schlüssel".encode(), "wért".encode())
    ]
    assert any(r.key is None and r.value is None for r in found)


def test_a_column_of_nulls_says_nothing() -> None:
    nothing = dict.fromkeys(("key", "partition", "lane", "deliver_at", "timestamp"), pa.null())
    row = dict.fromkeys(nothing) | {"value": b"v"}
    encoded = encode(table([row], **nothing))
    [[record]] = records(encoded.entries).values()
    assert (record.key, record.value, record.timestamp) == (None, b"v", NOW_MS)


def test_rows_without_a_key_take_turns_a_batch_at_a_time() -> None:
    rows = [{"value": b"x" * 100}] * 90
    encoded = encode(table(rows), batch_bytes=1000)
    counts = {place[1]: len(some) for place, some in records(encoded.entries).items()}
    assert counts == {0: 30, 1: 30, 2: 30}
    later = encode(table(rows[:5]), batch_bytes=1000, first_turn=7)
    assert [place[1] for place in records(later.entries)] == [1]


def test_the_option_topic_wins_over_the_column() -> None:
    encoded = encode(table([{"value": b"v", "topic": "payments"}]), topic="orders")
    assert [entry.topic for entry in encoded.entries] == ["orders"]


def test_a_record_that_was_read_with_its_lane_among_its_headers_keeps_one_lane() -> None:
    rows: list[dict[str, Any]] = [
        {
            "value": b"a",
            "headers": [{"key": "ms-lane", "value": b"high"}, {"key": "n", "value": b"1"}],
        },
        {"value": b"b", "headers": [{"key": "ms-lane", "value": b"high"}], "lane": "low"},
        {"value": b"c", "headers": None},
        {"value": b"d", "headers": [{"key": "ms-lane", "value": b"urgent"}]},
    ]
    encoded = encode(table(rows))
    found = {r.value: r for some in records(encoded.entries).values() for r in some}
    assert found[b"a"].headers == (("n", b"1"), ("ms-lane", b"high"))
    assert found[b"b"].headers == (("ms-lane", b"low"),)
    assert found[b"c"].headers == ()
    assert list(reasons(encoded.bad)) == [3]


def test_part_of_a_millisecond_is_never_early_and_never_late() -> None:
    late = NOW + timedelta(microseconds=1)
    early = NOW - timedelta(microseconds=1)
    encoded = encode(table([{"value": b"v", "deliver_at": late, "timestamp": early}]))
    [(place, [record])] = records(encoded.entries).items()
    assert place[2] == NOW_MS + 1
    assert record.timestamp == NOW_MS - 1


def test_nothing_comes_of_nothing() -> None:
    assert encode(table([{"value": b"v"}]).slice(1)) == Encoded([], [])


# ---- bad rows


def test_each_bad_row_has_its_number_and_its_reason_and_the_others_go_on() -> None:
    far = NOW + timedelta(milliseconds=HORIZON_MS + 1000)
    rows: list[dict[str, Any]] = [
        {"value": b"good"},
        {"value": b"v", "partition": 3},
        {"value": b"v", "partition": -1},
        {"value": b"v", "lane": "urgent"},
        {"value": b"v", "deliver_at": far},
        {"value": b"v", "timestamp": datetime(1969, 12, 31, tzinfo=UTC)},
        {"value": b"v", "headers": [{"key": "", "value": b""}]},
        {"value": b"v", "headers": [{"key": None, "value": b""}]},
        {"value": b"v", "headers": [{"key": "n" * 256, "value": b""}]},
        {"value": b"v", "headers": [None]},
        {"value": b"x" * 1001},
        {"value": b"x" * 900, "headers": [{"key": "n", "value": b"x" * 100}]},
        {"value": b"good too", "lane": "high"},
    ]
    encoded = encode(table(rows), first_row=500)
    found = reasons(encoded.bad)
    assert list(found) == [500 + n for n in range(1, 12)]
    for row, word in {
        501: "no partition 3; it has 0 to 2",
        502: "no partition -1",
        503: "'urgent'",
        504: "ten years",
        505: "1970",
        506: "1 to 255 bytes",
        507: "1 to 255 bytes",
        508: "1 to 255 bytes",
        509: "1 to 255 bytes",
        510: "1001 bytes, topic orders takes 1000",
        511: "1005 bytes",
    }.items():
        assert word in found[row], found[row]
    good = {r.value for some in records(encoded.entries).values() for r in some}
    assert good == {b"good", b"good too"}


def test_rows_for_no_topic_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [
        {"value": b"a", "topic": None},
        {"value": b"b", "topic": "orders"},
        {"value": b"c", "topic": "nowhere"},
        {"value": b"d", "topic": ""},
        {"value": b"e", "topic": "payments", "partition": 9},
        {"value": b"f", "topic": "a/b"},
        {"value": b"g", "topic": ".."},
    ]
    encoded = encode(table(rows))
    found = reasons(encoded.bad)
    assert list(found) == [0, 2, 3, 4, 5, 6]
    assert "'a/b' is no topic's name: 1 to 249 of letters" in found[5]
    assert "'..' is no topic's name" in found[6]
    assert "null" in found[0]
    assert "no topic nowhere" in found[2]
    assert "empty" in found[3]
    assert "payments has no partition 9" in found[4]
    assert [entry.topic for entry in encoded.entries] == ["orders"]


def test_a_compacted_topic_needs_a_key_and_takes_a_tombstone() -> None:
    rows: list[dict[str, Any]] = [{"key": b"k", "value": None}, {"key": None, "value": b"v"}]
    encoded = encode(table(rows), topic="newest")
    assert list(reasons(encoded.bad)) == [1]
    [[record]] = records(encoded.entries).values()
    assert (record.key, record.value) == (b"k", None)
