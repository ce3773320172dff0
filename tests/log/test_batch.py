"""What a batch is, from outside and inside; each test runs on both twins."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.batch_twins import (
    COMPILED,
    PURE,
    Fields,
    both_twins,
    needs_compiled,
    numbered,
    plain,
    several_fields,
    some_fields,
)
from millstream.errors import (
    BatchCompressionInvalid,
    BatchCountInvalid,
    BatchLengthInvalid,
    BatchRecordInvalid,
)
from millstream.log import batch
from millstream.log._batch_layout import COPIED_BYTES_MAX, sealed

BYTES_MAX = 2**20
INT64_MAX = 2**63 - 1


# ---- the two twins


@pytest.mark.skipif("CI" not in os.environ, reason="at home the pure twin alone will do")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_where_there_is_a_compiler_the_compiled_twin_was_built() -> None:
    assert COMPILED is not None


@needs_compiled
def test_the_compiled_twin_is_taken_unless_the_pure_one_is_asked_for() -> None:
    for asked, expected in (("", "compiled"), ("0", "compiled"), ("1", "pure")):
        program = "from millstream.log import batch; print(batch.IMPLEMENTATION)"
        environment = {
            **os.environ,
            "MILLSTREAM_PURE": asked,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        answer = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        assert answer.stdout.decode().strip() == expected


@needs_compiled
@given(several_fields, st.sampled_from(batch.COMPRESSIONS), st.booleans())
def test_both_twins_write_the_same_bytes(
    records: list[Fields], compression: str, stamped: bool
) -> None:
    options: dict[str, Any] = {
        "base_offset": 7,
        "leader_epoch": 3,
        "compression": compression,
        "producer_id": 9,
        "producer_epoch": 1,
        "base_sequence": 5,
        "transactional": True,
        "append_time": 1234 if stamped else None,
        "lane": "low",
    }
    assert COMPILED is not None
    assert COMPILED.encode(records, **options) == PURE.encode(records, **options)


# ---- encode and decode


@both_twins
@given(several_fields, st.sampled_from(batch.COMPRESSIONS), st.integers(0, 2**62))
def test_what_is_encoded_is_decoded(
    twin: Any, records: list[Fields], compression: str, base_offset: int
) -> None:
    data = twin.encode(records, compression=compression, base_offset=base_offset)
    header = twin.verify(data, bytes_max=BYTES_MAX)
    assert header.compression == compression
    assert header.base_offset == base_offset
    assert header.count == len(records)
    assert header.base_timestamp == records[0][0]
    assert header.max_timestamp == max(record[0] for record in records)
    assert plain(twin.decode(data, check_crc=True)) == numbered(records, base_offset)


@both_twins
def test_records_can_be_encoded_again_as_they_were_decoded(twin: Any) -> None:
    data = twin.encode(some_fields(50), base_offset=100)
    records = twin.decode(data)
    assert twin.encode(records, base_offset=100) == data
    assert twin.encode(iter(records), base_offset=100) == data


@both_twins
def test_any_bytes_will_do_for_contents_and_for_batches(twin: Any) -> None:
    expected = twin.encode([(5, b"key", b"value", [("name", b"content")])])
    wrapped = [(5, bytearray(b"key"), memoryview(b"value"), [("name", bytearray(b"content"))])]
    assert twin.encode(wrapped) == expected
    for kind in (bytes, bytearray, memoryview):
        assert twin.decode(kind(expected)) == twin.decode(expected)
        assert twin.verify(kind(expected), bytes_max=BYTES_MAX).count == 1


@both_twins
@pytest.mark.parametrize(
    "wrong",
    [
        (1, "text", None, ()),
        (1, None, 5, ()),
        (1.5, None, None, ()),
        (1, None, None, [(b"name", b"")]),
        (1, None, None, [("name", "text")]),
        (1, None, None, None),
    ],
)
def test_contents_that_are_not_bytes_are_refused(twin: Any, wrong: Any) -> None:
    with pytest.raises(TypeError):
        twin.encode([wrong])


@both_twins
def test_a_batch_needs_a_record(twin: Any) -> None:
    with pytest.raises(BatchCountInvalid):
        twin.encode([])


@both_twins
def test_a_compression_or_lane_that_does_not_exist_is_refused(twin: Any) -> None:
    with pytest.raises(BatchCompressionInvalid, match="brotli"):
        twin.encode(some_fields(1), compression="brotli")
    with pytest.raises(ValueError, match="urgent"):
        twin.encode(some_fields(1), lane="urgent")


@both_twins
def test_timestamps_may_be_any_64_bits_but_not_lie_further_apart(twin: Any) -> None:
    for ends in ((0, INT64_MAX), (-INT64_MAX - 1, -1), (-1, -1), (5, -5)):
        data = twin.encode([(ends[0], None, b"", ()), (ends[1], None, b"", ())])
        assert [record.timestamp for record in twin.decode(data)] == list(ends)
    for wrong in ([INT64_MAX + 1], [-INT64_MAX - 2], [-2, INT64_MAX], [2**70]):
        with pytest.raises(BatchRecordInvalid):
            twin.encode([(timestamp, None, b"", ()) for timestamp in wrong])


@both_twins
def test_an_append_time_takes_the_place_of_every_timestamp(twin: Any) -> None:
    data = twin.encode(some_fields(5), append_time=77)
    header = batch.read_header(data)
    assert header.is_append_time
    assert header.base_timestamp == header.max_timestamp == 77
    assert {record.timestamp for record in twin.decode(data)} == {77}


@both_twins
def test_header_names_that_are_not_utf8_survive(twin: Any) -> None:
    name = b"\xff\xfe-name".decode("utf-8", "surrogateescape")
    data = twin.encode([(1, None, None, [(name, b"content")])])
    assert b"\xff\xfe-name" in data
    assert twin.decode(data)[0].headers == ((name, b"content"),)
    with pytest.raises(BatchRecordInvalid):
        twin.encode([(1, None, None, [("\ud800", None)])])


# ---- records


@both_twins
def test_a_record_is_a_value(twin: Any) -> None:
    record = twin.Record(offset=1, timestamp=2, key=b"k", value=None, headers=(("a", None),))
    same = twin.Record(1, 2, b"k", None, (("a", None),))
    other = twin.Record(1, 2, b"k", b"", (("a", None),))
    assert record == same
    assert record != other
    assert record != (1, 2)
    assert hash(record) == hash(same)
    assert repr(record) == (
        "Record(offset=1, timestamp=2, key=b'k', value=None, headers=(('a', None),))"
    )
    assert pickle.loads(pickle.dumps(record)) == record
    assert twin.Record(offset=1, timestamp=2).headers == ()
    with pytest.raises(AttributeError):
        record.offset = 5


@both_twins
@pytest.mark.parametrize(
    ("headers", "lane"),
    [
        ((), None),
        ((("other", b"high"),), None),
        ((("ms-lane", b"background"),), "background"),
        ((("ms-lane", b"urgent"),), None),
        ((("ms-lane", None),), None),
        ((("ms-lane", b"\xff"),), None),
        ((("ms-lane", b"low"), ("ms-lane", b"high"), ("other", b"")), "high"),
        ((("ms-lane", b"low"), ("ms-lane", b"urgent")), None),
    ],
)
def test_the_lane_of_a_record_is_what_its_last_lane_header_says(
    twin: Any, headers: Any, lane: str | None
) -> None:
    assert twin.Record(offset=0, timestamp=0, headers=headers).lane == lane


# ---- the header


@both_twins
def test_the_header_tells_all_that_was_asked_for(twin: Any) -> None:
    header = batch.read_header(
        twin.encode(
            some_fields(4),
            base_offset=100,
            leader_epoch=6,
            producer_id=11,
            producer_epoch=2,
            base_sequence=2**31 - 2,
            transactional=True,
            control=True,
            lane="background",
        )
    )
    assert (header.base_offset, header.last_offset, header.next_offset) == (100, 103, 104)
    assert (header.leader_epoch, header.producer_id, header.producer_epoch) == (6, 11, 2)
    assert header.is_transactional
    assert header.is_control
    assert not header.is_append_time
    assert header.lane == "background"
    assert header.compression == "none"
    # 2^31 - 2, 2^31 - 1, 0, 1
    assert header.last_sequence == 1


@both_twins
def test_without_flags_the_header_has_none(twin: Any) -> None:
    header = batch.read_header(twin.encode(some_fields(1)))
    assert header.attributes == 0
    assert header.lane is None
    assert header.last_sequence == -1
    assert header.size == len(twin.encode(some_fields(1)))


def test_the_lane_hint_has_room_for_each_lane_and_none_for_others() -> None:
    header = batch.read_header(PURE.encode(some_fields(1)))
    for index, lane in enumerate(batch.LANES):
        hinted = batch.read_header(PURE.encode(some_fields(1), lane=lane))
        assert hinted.attributes == (index + 1) << batch.LANE_SHIFT
        assert hinted.lane == lane
    assert header._replace(attributes=6 << batch.LANE_SHIFT).lane is None
    assert header._replace(attributes=-1).lane is None
    assert header._replace(attributes=7).compression == "unknown-7"


@both_twins
def test_a_batch_gets_its_place_without_a_new_checksum(twin: Any) -> None:
    for count in (3, 60):
        data = twin.encode(some_fields(count))
        start, rest = batch.placed(data, 2**40, 12)
        assert len(start) == batch.PLACE_BYTES
        header = twin.verify(start + rest, bytes_max=BYTES_MAX)
        assert (header.base_offset, header.leader_epoch) == (2**40, 12)
        records = twin.decode(start + rest)
        assert [record.offset for record in records] == [2**40 + i for i in range(count)]


def test_the_bytes_of_a_large_batch_are_not_copied_to_place_it() -> None:
    data = PURE.encode([(0, None, bytes(COPIED_BYTES_MAX), ())])
    rest = batch.placed(data, 0, 0)[1]
    assert isinstance(rest, memoryview)
    assert rest.obj is data


def test_walking_ends_before_a_partial_batch() -> None:
    one, two = PURE.encode(some_fields(3)), PURE.encode(some_fields(5), base_offset=3)
    assert [(at, header.count) for at, header in batch.walk(one + two)] == [(0, 3), (len(one), 5)]
    for cut in range(len(two)):
        assert len(batch.walk(one + two[:cut])) == 1
    assert batch.walk(b"") == []
    with pytest.raises(BatchLengthInvalid):
        batch.read_header(one, len(one) - 60)
    with pytest.raises(BatchLengthInvalid):
        batch.read_header(one, -1)


# ---- scan


@both_twins
def test_a_scan_follows_batches_to_the_end(twin: Any) -> None:
    blob = b"".join(twin.encode(some_fields(3), base_offset=10 + 3 * n) for n in range(4))
    found = twin.scan(b"junk" + blob, 4, 10, exact=True)
    assert (found.end, found.next_offset, found.reason) == (len(blob) + 4, 22, "end")
    assert [header.base_offset for _, header in found.batches] == [10, 13, 16, 19]
    assert found.batches[1][0] == 4 + found.batches[0][1].size
    assert twin.scan(b"", 0, 5, exact=True) == (0, 5, [], "end")


@both_twins
def test_a_scan_stops_at_a_torn_batch_wherever_it_is_torn(twin: Any) -> None:
    good, torn = twin.encode(some_fields(3)), twin.encode(some_fields(2), base_offset=3)
    for cut in range(1, len(torn)):
        found = twin.scan(good + torn[:cut], 0, 0, exact=True)
        assert (found.end, found.next_offset, found.reason) == (len(good), 3, "partial")


@both_twins
def test_a_scan_stops_at_any_flipped_bit(twin: Any) -> None:
    good, damaged = twin.encode(some_fields(1)), twin.encode(some_fields(1), base_offset=1)
    epoch_bits = range(12 * 8, 16 * 8)  # the one field that nothing in a batch can vouch for
    for bit in set(range(len(damaged) * 8)) - set(epoch_bits):
        flipped = bytearray(damaged)
        flipped[bit // 8] ^= 1 << bit % 8
        found = twin.scan(good + flipped, 0, 0, exact=True)
        assert found.end == len(good)
        assert found.reason in ("invalid", "partial")


@both_twins
def test_zeroes_where_a_batch_should_be_are_not_a_batch(twin: Any) -> None:
    good = twin.encode(some_fields(3))
    assert twin.scan(good + bytes(4096), 0, 0, exact=True)[::3] == (len(good), "invalid")


@both_twins
def test_gaps_are_fine_in_a_compacted_log_only(twin: Any) -> None:
    whole = twin.encode(some_fields(4), base_offset=10)
    sparse = twin.retain(whole, {11, 13})
    for data, next_offset, exact, reason in (
        (whole, 10, True, "end"),
        (whole, 8, True, "invalid"),
        (whole, 8, False, "end"),
        (whole, 11, False, "invalid"),
        (sparse, 10, True, "invalid"),
        (sparse, 10, False, "end"),
    ):
        assert twin.scan(data, 0, next_offset, exact=exact).reason == reason


# ---- compaction


@both_twins
@given(several_fields, st.sampled_from(batch.COMPRESSIONS), st.data())
def test_retaining_keeps_the_place_of_what_is_kept(
    twin: Any, records: list[Fields], compression: str, data: st.DataObject
) -> None:
    offsets = range(50, 50 + len(records))
    keep = data.draw(st.sets(st.sampled_from(offsets)))
    whole = twin.encode(
        records, base_offset=50, leader_epoch=4, compression=compression, producer_id=8, lane="low"
    )
    kept = twin.retain(whole, keep)
    if not keep:
        assert kept is None
        return
    header = twin.verify(kept, bytes_max=BYTES_MAX, exact_count=False)
    expected = [item for item in numbered(records, 50) if item[0] in keep]
    assert plain(twin.decode(kept)) == expected
    assert header.max_timestamp == max(item[1][0] for item in expected)
    before = batch.read_header(whole)
    for field in set(header._fields) - {"length", "crc", "count", "max_timestamp"}:
        assert getattr(header, field) == getattr(before, field), field
    if len(keep) == len(records):
        assert kept is whole


@both_twins
def test_a_batch_stamped_at_its_append_keeps_its_stamp(twin: Any) -> None:
    kept = twin.retain(twin.encode(some_fields(4), append_time=99), {2})
    assert batch.read_header(kept).max_timestamp == 99
    assert [(record.offset, record.timestamp) for record in twin.decode(kept)] == [(2, 99)]


@both_twins
@given(several_fields, st.sampled_from(batch.COMPRESSIONS))
def test_keys_are_what_compaction_needs(twin: Any, records: list[Fields], compression: str) -> None:
    data = twin.encode(records, base_offset=9, compression=compression)
    assert twin.keys(data) == [
        (offset, key, value is None) for offset, (_, key, value, _) in numbered(records, 9)
    ]


@both_twins
def test_a_batch_that_compaction_emptied_is_still_a_batch(twin: Any) -> None:
    header = batch.read_header(twin.encode(some_fields(3), base_offset=5))
    empty = sealed(header._replace(count=0), b"")
    assert twin.verify(empty, bytes_max=BYTES_MAX, exact_count=False).next_offset == 8
    assert twin.decode(empty) == []
    assert twin.decode_columns(empty).rows == 0
    with pytest.raises(BatchCountInvalid):
        twin.verify(empty, bytes_max=BYTES_MAX)
