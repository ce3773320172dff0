"""Bytes that are no batch: each wrong thing has its own error, and both twins agree on it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from log.batch_twins import COMPILED, PURE, both_twins, needs_compiled, plain, some_fields
from millstream.errors import (
    BatchChecksumMismatch,
    BatchCompressionInvalid,
    BatchCountInvalid,
    BatchInvalid,
    BatchLengthInvalid,
    BatchMagicUnsupported,
    BatchRecordInvalid,
    BatchTooLarge,
)
from millstream.log import batch
from millstream.log._batch_compression import compress
from millstream.log._batch_layout import sealed

BYTES_MAX = 2**20
COMPRESSED = batch.COMPRESSIONS[1:]
SAMPLE = PURE.encode(some_fields(8), base_offset=20)
HEADER = batch.read_header(SAMPLE)
ONE = batch.read_header(PURE.encode(some_fields(1)))


def with_body(body: bytes, header: batch.Header = ONE) -> bytes:
    """A batch that is right from outside."""
    return sealed(header, body)


def changed(**fields: int) -> bytes:
    """The sample with other header fields, and a CRC that fits them."""
    return sealed(HEADER._replace(**fields), SAMPLE[batch.HEADER_BYTES :])


def examiner(twin: Any) -> Callable[..., batch.Header]:
    return functools.partial(twin.examine, bytes_max=BYTES_MAX)


def outcome(action: Callable[[], object]) -> object:
    """What comes out, or the kind of refusal. Anything but a BatchInvalid fails the test."""
    try:
        return action()
    except BatchInvalid as error:
        return type(error)


# ---- from outside


@both_twins
def test_a_batch_cut_at_any_byte_has_a_wrong_length(twin: Any) -> None:
    for cut in range(len(SAMPLE)):
        verify = functools.partial(twin.verify, bytes_max=BYTES_MAX)
        for check in (verify, examiner(twin), twin.decode, twin.keys):
            with pytest.raises(BatchLengthInvalid):
                check(SAMPLE[:cut])
    with pytest.raises(BatchLengthInvalid):
        twin.verify(SAMPLE + b"\0", bytes_max=BYTES_MAX)
    with pytest.raises(BatchLengthInvalid):
        twin.decode(SAMPLE + SAMPLE)


@both_twins
@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48, len(SAMPLE) - 13, 2**31 - 1])
def test_a_length_that_does_not_fit_the_bytes_is_refused(twin: Any, length: int) -> None:
    data = bytearray(SAMPLE)
    data[8:12] = length.to_bytes(4, "big", signed=True)
    for check in (lambda d: twin.verify(d, bytes_max=BYTES_MAX), twin.decode):
        with pytest.raises(BatchLengthInvalid):
            check(data)
    if length < 49:
        with pytest.raises(BatchLengthInvalid):
            batch.read_header(data)


@both_twins
def test_a_batch_may_be_as_large_as_the_limit_and_not_a_byte_more(twin: Any) -> None:
    assert twin.verify(SAMPLE, bytes_max=len(SAMPLE)) == HEADER
    with pytest.raises(BatchTooLarge) as caught:
        twin.verify(SAMPLE, bytes_max=len(SAMPLE) - 1)
    assert caught.value.fields == {"limit_bytes": len(SAMPLE) - 1}


@both_twins
@pytest.mark.parametrize("magic", [0, 1, 3, 255])
def test_another_magic_is_refused(twin: Any, magic: int) -> None:
    data = bytearray(SAMPLE)
    data[16] = magic
    checks: list[Callable[[], object]] = [
        lambda: twin.verify(data, bytes_max=BYTES_MAX),
        lambda: twin.decode(data),
        lambda: twin.decode_columns(data),
        lambda: batch.read_header(data),
        lambda: batch.walk(data),
    ]
    for check in checks:
        with pytest.raises(BatchMagicUnsupported):
            check()


@both_twins
@pytest.mark.parametrize("code", [5, 6, 7])
def test_an_unknown_compression_is_refused(twin: Any, code: int) -> None:
    data = changed(attributes=code)
    with pytest.raises(BatchCompressionInvalid):
        twin.verify(data, bytes_max=BYTES_MAX)
    for read in (twin.decode, twin.keys, twin.decode_columns):
        with pytest.raises(BatchCompressionInvalid):
            read(data)


@both_twins
def test_every_flipped_bit_under_the_checksum_is_seen(twin: Any) -> None:
    data = PURE.encode(some_fields(2))
    for bit in range(17 * 8, len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises((BatchChecksumMismatch, BatchCompressionInvalid)):
            twin.verify(flipped, bytes_max=BYTES_MAX)
        with pytest.raises(BatchChecksumMismatch):
            twin.decode(flipped, check_crc=True)


@both_twins
@pytest.mark.parametrize(
    "fields",
    [
        {"count": 0},
        {"count": -1},
        {"count": 7},
        {"count": 9},
        {"count": 2**31 - 1},
        {"last_offset_delta": -1},
        {"last_offset_delta": -(2**31)},
        {"last_offset_delta": 8},
        {"count": 2**31 - 1, "last_offset_delta": 2**31 - 2},
        {"count": 2**31 - 1, "last_offset_delta": 2**31 - 2, "attributes": 4},
        {"base_offset": 2**63 - 8},
    ],
)
def test_a_count_that_does_not_fit_is_refused(twin: Any, fields: dict[str, int]) -> None:
    with pytest.raises(BatchCountInvalid):
        twin.verify(changed(**fields), bytes_max=BYTES_MAX)


@both_twins
def test_with_gaps_allowed_the_count_may_be_less_but_not_more(twin: Any) -> None:
    for count in range(9):
        assert twin.verify(changed(count=count), bytes_max=BYTES_MAX, exact_count=False)
    for fields in (
        {"count": 9},
        {"count": -1},
        {"last_offset_delta": 6},
        {"last_offset_delta": -1},
    ):
        with pytest.raises(BatchCountInvalid):
            twin.verify(changed(**fields), bytes_max=BYTES_MAX, exact_count=False)


@both_twins
def test_attributes_that_kafka_may_come_to_use_are_let_through(twin: Any) -> None:
    for bit in (0x40, 0x80, 0x0700, 0x0800, -0x8000):
        data = changed(attributes=bit)
        assert twin.verify(data, bytes_max=BYTES_MAX).attributes == bit
        assert len(twin.decode(data)) == 8


# ---- the records


@both_twins
def test_fewer_records_than_counted_are_refused(twin: Any) -> None:
    two = ONE._replace(count=2, last_offset_delta=1)
    short = PURE.encode([(1, None, bytes(50), ())])[batch.HEADER_BYTES :]
    for read in (twin.decode, examiner(twin)):
        with pytest.raises(BatchCountInvalid):
            read(with_body(short, two))
    with pytest.raises(BatchCountInvalid):
        twin.decode(with_body(b"", ONE))


VARINT_ENDLESS = b"\x80" * 30
WRONG_RECORDS = {
    "a length that never ends": VARINT_ENDLESS,
    "a length of 5 bytes and more than 32 bits": b"\xff\xff\xff\xff\x1f" + bytes(20),
    "a negative length": b"\x01" + bytes(8),
    "no length": b"\x00" + bytes(8),
    "a length past the end": b"\x20" + bytes(8),
    "a length of nothing but the attributes": b"\x02" + bytes(8),
    "a timestamp that never ends": b"\x28\x00" + b"\x80" * 19,
    "a timestamp of more than 64 bits": b"\x28\x00" + b"\xff" * 9 + b"\x02" + bytes(9),
    "an offset that never ends": b"\x28\x00\x00" + b"\x80" * 18,
    "an offset past the last": b"\x0c\x00\x00\x02\x01\x01\x00",
    "an offset before the first": b"\x0c\x00\x00\x01\x01\x01\x00",
    "a key that reaches past the end": b"\x0c\x00\x00\x00\x0a\x01\x00",
    "a key length below -1": b"\x0c\x00\x00\x00\x03\x01\x00",
    "a key length that never ends": b"\x28\x00\x00\x00" + b"\x80" * 17,
    "a value that reaches past the end": b"\x0c\x00\x00\x00\x01\x06\x00",
    "a value length below -1": b"\x0c\x00\x00\x00\x01\x05\x00",
    "a value of 2 GiB": b"\x14\x00\x00\x00\x01\xfe\xff\xff\xff\x0f\x00",
    "a header count below zero": b"\x0c\x00\x00\x00\x01\x01\x01",
    "more headers than bytes": b"\x0e\x00\x00\x00\x01\x01\x04\x00",
    "a billion headers": b"\x14\x00\x00\x00\x01\x01\xfe\xff\xff\xff\x0f",
    "a header without a name": b"\x10\x00\x00\x00\x01\x01\x02\x01\x01",
    "a header value that reaches past the end": b"\x10\x00\x00\x00\x01\x01\x02\x00\x02",
    "a header value length below -1": b"\x10\x00\x00\x00\x01\x01\x02\x00\x03",
    "bytes left in the record": b"\x0e\x00\x00\x00\x01\x01\x00\x00",
    "bytes left after the record": b"\x0c\x00\x00\x00\x01\x01\x00\x00",
    "bytes left after the headers": b"\x12\x00\x00\x00\x01\x01\x02\x00\x01\x00",
}


@both_twins
@pytest.mark.parametrize("compression", batch.COMPRESSIONS)
def test_what_is_right_inside_and_outside_is_told_its_header(twin: Any, compression: str) -> None:
    data = PURE.encode(some_fields(8), base_offset=20, compression=compression)
    assert examiner(twin)(data) == batch.read_header(data)
    with pytest.raises(BatchTooLarge):
        twin.examine(data, bytes_max=len(data) - 1)


@both_twins
def test_a_batch_with_gaps_is_no_producers_batch(twin: Any) -> None:
    gapped = PURE.retain(SAMPLE, {20, 22})
    assert [key for _, key, _ in twin.keys(gapped)] == [None, b"key-2"]
    with pytest.raises(BatchCountInvalid):
        examiner(twin)(gapped)


@both_twins
@pytest.mark.parametrize("compression", batch.COMPRESSIONS)
@pytest.mark.parametrize("wrong", WRONG_RECORDS)
def test_a_wrong_record_is_refused(twin: Any, wrong: str, compression: str) -> None:
    code = batch.COMPRESSIONS.index(compression)
    body = WRONG_RECORDS[wrong]
    data = with_body(compress(code, body) if code else body, ONE._replace(attributes=code))
    assert twin.verify(data, bytes_max=BYTES_MAX).count == 1
    retain = functools.partial(twin.retain, keep={0})
    for read in (twin.decode, twin.keys, twin.decode_columns, retain, examiner(twin)):
        with pytest.raises(BatchRecordInvalid):
            read(data)


@both_twins
def test_a_varint_may_be_longer_than_it_needs_to_be(twin: Any) -> None:
    padded = b"\x14\x00\x80\x80\x00\x80\x00\x81\x00\x01\x00"
    record = twin.decode(with_body(padded))[0]
    assert (record.key, record.value, record.headers) == (None, None, ())


@both_twins
def test_offsets_must_rise(twin: Any) -> None:
    two = ONE._replace(count=2, last_offset_delta=5)
    for deltas, good in (((0, 1), True), ((2, 5), True), ((1, 1), False), ((3, 2), False)):
        body = b"".join(b"\x0c\x00\x00%c\x01\x01\x00" % (2 * delta) for delta in deltas)
        if good:
            assert [record.offset for record in twin.decode(with_body(body, two))] == list(deltas)
        else:
            with pytest.raises(BatchRecordInvalid):
                twin.decode(with_body(body, two))


@both_twins
def test_a_timestamp_past_64_bits_is_refused(twin: Any) -> None:
    for base, delta in ((2**63 - 1, b"\x02"), (-(2**63), b"\x01")):
        body = b"\x0c\x00" + delta + b"\x00\x01\x01\x00"
        with pytest.raises(BatchRecordInvalid):
            twin.decode(with_body(body, ONE._replace(base_timestamp=base)))


# ---- compression


@both_twins
@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_body_that_does_not_decompress_is_refused(twin: Any, compression: str) -> None:
    code = batch.COMPRESSIONS.index(compression)
    header = ONE._replace(attributes=code)
    body = compress(code, bytes(range(256)) * 4)
    for wrong in (b"", b"\x05", b"garbage" * 9, body[: len(body) // 2], body[:-1]):
        data = with_body(wrong, header)
        for read in (twin.decode, twin.keys, twin.decode_columns, examiner(twin)):
            with pytest.raises((BatchCompressionInvalid, BatchRecordInvalid)):
                read(data)


XERIAL = b"\x82SNAPPY\x00" + bytes(8)


@both_twins
@pytest.mark.parametrize(
    "body",
    [
        XERIAL + b"\x00\x00",
        XERIAL + b"\x00\x00\x00\x00",
        XERIAL + b"\x00\x00\x00\x09abc",
        XERIAL + b"\xff\xff\xff\xff" + bytes(9),
        XERIAL + b"\x00\x00\x00\x03\xff\xff\xff",
    ],
)
def test_a_snappy_frame_with_wrong_blocks_is_refused(twin: Any, body: bytes) -> None:
    with pytest.raises(BatchCompressionInvalid):
        twin.decode(with_body(body, ONE._replace(attributes=2)))


@both_twins
@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_batch_may_grow_to_the_limit_and_not_a_byte_more(twin: Any, compression: str) -> None:
    records = [(1, None, bytes(100_000), ())]
    data = twin.encode(records, compression=compression)
    size = len(twin.encode(records)) - batch.HEADER_BYTES
    assert len(twin.decode(data, inflated_bytes_max=size)) == 1
    assert examiner(twin)(data, inflated_bytes_max=size) == batch.read_header(data)
    for read in (twin.decode, twin.keys, twin.decode_columns, examiner(twin)):
        with pytest.raises(BatchTooLarge) as caught:
            read(data, inflated_bytes_max=size - 1)
        assert caught.value.fields == {"limit_bytes": size - 1}


# In a process of its own, because what the tests before used at most would hide the growth.
BOMB_PROGRAM = """
import functools, importlib, pathlib, resource, sys
from millstream.errors import BatchTooLarge
twin = importlib.import_module(sys.argv[1])
bombs = [pathlib.Path(name).read_bytes() for name in sys.argv[2:]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for bomb in bombs:
    examine = functools.partial(twin.examine, bytes_max=len(bomb))
    for read in (twin.decode, twin.keys, twin.decode_columns, examine):
        try:
            read(bomb)
        except BatchTooLarge:
            print("refused")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@both_twins
def test_bombs_are_refused_before_they_fill_the_memory(twin: Any, tmp_path: Path) -> None:
    zeroes = bytes(256 * 2**20)
    paths = []
    for code in range(1, len(batch.COMPRESSIONS)):
        paths.append(tmp_path / batch.COMPRESSIONS[code])
        paths[-1].write_bytes(with_body(compress(code, zeroes), ONE._replace(attributes=code)))
        assert paths[-1].stat().st_size < 16 * 2**20
    answer = subprocess.run(
        [sys.executable, "-c", BOMB_PROGRAM, twin.__name__, *paths],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    *refused, grown_kib = answer.stdout.split()
    assert refused == ["refused"] * 16
    assert int(grown_kib) * 1024 < batch.INFLATED_BYTES_MAX + 32 * 2**20


# ---- anything at all


mutations = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.integers(0, 255), st.sampled_from(["set", "cut", "add"])),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    """The batch after these changes to its body, with length and CRC made to fit again."""
    body = bytearray(data[batch.HEADER_BYTES :])
    for place, byte, how in changes:
        position = place % (len(body) + 1)
        if how == "add":
            body.insert(position, byte)
        elif how == "cut":
            del body[position : position + 1 + byte % 4]
        else:
            body[position : position + 1] = bytes([byte])
    return sealed(batch.read_header(data), bytes(body))


def everything(twin: Any, data: bytes) -> list[object]:
    keep = set(range(0, 40, 2))
    return [
        outcome(lambda: tuple(twin.verify(data, bytes_max=BYTES_MAX, exact_count=False))),
        outcome(lambda: tuple(examiner(twin)(data))),
        outcome(lambda: plain(twin.decode(data))),
        outcome(lambda: twin.keys(data)),
        outcome(lambda: twin.retain(data, keep)),
        outcome(lambda: as_bytes(twin.decode_columns(data, check_crc=False))),
        twin.scan(data, 0, 20, exact=False)[:2],
    ]


def as_bytes(columns: Any) -> object:
    """Columns with the buffers of either twin made comparable."""
    if isinstance(columns, tuple):
        return [as_bytes(column) for column in columns]
    return bytes(columns) if isinstance(columns, memoryview) else columns


@needs_compiled
@settings(max_examples=400)
@given(st.sampled_from(batch.COMPRESSIONS), mutations)
@example("none", [(0, 0, "set")])
def test_both_twins_make_the_same_of_a_changed_body(
    compression: str, changes: list[tuple[int, int, str]]
) -> None:
    data = PURE.encode(some_fields(8), base_offset=20, compression=compression)
    wrong = mutated(data, changes)
    assert everything(COMPILED, wrong) == everything(PURE, wrong)


@needs_compiled
@settings(max_examples=400)
@given(
    st.sampled_from(batch.COMPRESSIONS),
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_both_twins_make_the_same_of_changed_bytes(
    compression: str, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(PURE.encode(some_fields(8), base_offset=20, compression=compression))
    for place, byte in changes:
        data[place % len(data)] = byte
    assert everything(COMPILED, bytes(data)) == everything(PURE, bytes(data))


@needs_compiled
@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_both_twins_make_the_same_of_any_bytes(noise: bytes) -> None:
    assert everything(COMPILED, noise) == everything(PURE, noise)
    header = HEADER._replace(attributes=0)
    wrapped = sealed(header, noise)
    assert everything(COMPILED, wrapped) == everything(PURE, wrapped)


@both_twins
@given(st.lists(st.sampled_from(list(WRONG_RECORDS.values())), max_size=3), st.integers(0, 7))
def test_wrong_records_after_good_ones_are_refused(
    twin: Any, wrong: list[bytes], good: int
) -> None:
    body = b"".join(b"\x0c\x00\x00%c\x01\x01\x00" % (2 * n) for n in range(good))
    result = outcome(lambda: twin.decode(with_body(body + b"".join(wrong), HEADER)))
    assert result in (BatchRecordInvalid, BatchCountInvalid)
