"""Kafka's messages that are built and read by hand, held against two codecs of other people."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
)
from kafka.protocol.producer import ProduceRequest, ProduceResponse
from kio.serial import entity_reader

from millstream.wire.kafka import fetch, frames, list_offsets, produce
from millstream.wire.kafka.primitives import Cursor, Pieces, RequestInvalid

NAMES = ("orders", "größe")
RECORDS = memoryview(b"batch bytes, which nobody opens")


def versions(module: Any) -> list[int]:
    low, high = module.VERSIONS
    return list(range(low, high + 1))


def by_kio(api: str, version: int, entity: str, data: bytes) -> Any:
    """As kio reads it; None in versions that it does not have. All bytes must be read."""
    try:
        schema = importlib.import_module(f"kio.schema.{api}.v{version}.response")
    except ModuleNotFoundError:
        return None
    message, size = entity_reader(getattr(schema, entity))(data, 0)
    assert size == len(data)
    return message


def joined(pieces: Pieces) -> bytes:
    return b"".join(map(bytes, pieces))


# ---- Produce


@pytest.mark.parametrize("version", versions(produce))
def test_others_read_our_produce_responses(version: int) -> None:
    results = [
        produce.Result(0, 0, base_offset=5, append_time_ms=1_700_000_000_000, start_offset=2),
        produce.Result(7, 10, message="too large"),
    ]
    data = joined(produce.response([(name, results) for name in NAMES], version))
    theirs = ProduceResponse.decode(data, version=version)
    assert [topic.name for topic in theirs.responses] == list(NAMES)
    for topic in theirs.responses:
        first, second = topic.partition_responses
        assert (first.index, first.error_code, first.base_offset) == (0, 0, 5)
        assert (second.index, second.error_code, second.base_offset) == (7, 10, -1)
        if version >= 2:
            assert first.log_append_time_ms == 1_700_000_000_000
        if version >= 5:
            assert first.log_start_offset == 2
        if version >= 8:
            assert second.error_message == "too large"
    kio = by_kio("produce", version, "ProduceResponse", data)
    if kio is not None:
        assert [one.base_offset for one in kio.responses[1].partition_responses] == [5, -1]
    assert kio is not None or version < 3


@pytest.mark.parametrize("version", versions(produce))
def test_we_read_their_produce_requests(version: int) -> None:
    Topic = ProduceRequest.TopicProduceData  # noqa: N806  a class
    Part = Topic.PartitionProduceData  # noqa: N806  a class
    theirs = ProduceRequest(
        transactional_id=None,
        acks=-1,
        timeout_ms=100,
        topic_data=[
            Topic(
                name=name,
                partition_data=[Part(index=3, records=bytes(RECORDS)), Part(index=4, records=None)],
            )
            for name in NAMES
        ],
    )
    ours = produce.read(memoryview(theirs.encode(version=version)), version)
    assert ours == produce.Request(
        None, -1, [(name, [produce.Part(3, RECORDS), produce.Part(4, None)]) for name in NAMES]
    )


# ---- Fetch


@pytest.mark.parametrize("version", versions(fetch))
def test_others_read_our_fetch_responses(version: int) -> None:
    parts = [
        fetch.Given(0, 0, 100, 3, (RECORDS, RECORDS)),
        fetch.Given(1, 1),
        fetch.Given(2, 0, 9, 0, ()),
    ]
    pieces = fetch.response(0, 77, [(name, parts) for name in NAMES], version)
    data = joined(pieces)
    theirs = FetchResponse.decode(data, version=version)
    if version >= 7:
        assert (theirs.error_code, theirs.session_id) == (0, 77)
    assert [topic.topic for topic in theirs.responses] == list(NAMES)
    for topic in theirs.responses:
        first, second, third = topic.partitions
        assert (first.partition_index, first.high_watermark) == (0, 100)
        assert first.last_stable_offset == 100
        assert bytes(first.records) == bytes(RECORDS) * 2
        assert (second.error_code, second.high_watermark) == (1, -1)
        assert (third.partition_index, bytes(third.records or b"")) == (2, b"")
        if version >= 5:
            assert first.log_start_offset == 3
    kio = by_kio("fetch", version, "FetchResponse", data)
    assert kio is not None
    assert bytes(kio.responses[1].partitions[0].records) == bytes(RECORDS) * 2
    # What was read from the log goes out as it is.
    assert sum(piece is RECORDS for piece in pieces) == 4


@pytest.mark.parametrize("version", versions(fetch))
def test_we_read_their_fetch_requests(version: int) -> None:
    Topic = FetchRequest.FetchTopic  # noqa: N806  a class
    Part = Topic.FetchPartition  # noqa: N806  a class
    Forgotten = FetchRequest.ForgottenTopic  # noqa: N806  a class
    part = Part(
        partition=3,
        current_leader_epoch=9,
        fetch_offset=2**40,
        last_fetched_epoch=1,
        log_start_offset=-1,
        partition_max_bytes=4096,
    )
    theirs = FetchRequest(
        replica_id=-1,
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=2**20,
        isolation_level=0,
        session_id=12,
        session_epoch=3,
        topics=[Topic(topic=name, partitions=[part, part]) for name in NAMES],
        forgotten_topics_data=[Forgotten(topic="gone", partitions=[5, 6])],
        rack_id="",
    )
    ours = fetch.read(memoryview(theirs.encode(version=version)), version)
    epoch = 9 if version >= 9 else -1
    asked = [fetch.Part(3, epoch, 2**40, 4096)] * 2
    assert ours.topics == [(name, asked) for name in NAMES]
    assert (ours.wait_max_ms, ours.bytes_min, ours.bytes_max) == (500, 1, 2**20)
    if version >= 7:
        assert (ours.session_id, ours.session_epoch) == (12, 3)
        assert ours.forgotten == [("gone", [5, 6])]


# ---- ListOffsets


@pytest.mark.parametrize("version", versions(list_offsets))
def test_others_read_our_list_offsets_responses(version: int) -> None:
    found = [list_offsets.Found(0, 0, 1234, 99, 4), list_offsets.Found(1, 3)]
    data = joined(list_offsets.response([(name, found) for name in NAMES], version))
    theirs = ListOffsetsResponse.decode(data, version=version)
    for topic in theirs.topics:
        first, second = topic.partitions
        assert (first.partition_index, first.error_code) == (0, 0)
        assert (first.timestamp, first.offset) == (1234, 99)
        assert (second.error_code, second.offset) == (3, -1)
        if version >= 4:
            assert first.leader_epoch == 4
    kio = by_kio("list_offsets", version, "ListOffsetsResponse", data)
    assert kio is not None
    assert kio.topics[1].partitions[0].offset == 99


@pytest.mark.parametrize("version", versions(list_offsets))
def test_we_read_their_list_offsets_requests(version: int) -> None:
    Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806  a class
    Part = Topic.ListOffsetsPartition  # noqa: N806  a class
    part = Part(partition_index=2, current_leader_epoch=5, timestamp=-2)
    theirs = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=0,
        topics=[Topic(name=name, partitions=[part]) for name in NAMES],
        timeout_ms=0,
    )
    ours = list_offsets.read(memoryview(theirs.encode(version=version)), version)
    epoch = 5 if version >= 4 else -1
    assert ours == [(name, [list_offsets.Part(2, epoch, -2)]) for name in NAMES]


# ---- what is wrong


def a_request(module: Any, version: int) -> bytes:
    if module is produce:
        Topic = ProduceRequest.TopicProduceData  # noqa: N806  a class
        part = Topic.PartitionProduceData(index=3, records=b"12345")
        topic = Topic(name="t", partition_data=[part])
        message = ProduceRequest(transactional_id=None, acks=1, timeout_ms=1, topic_data=[topic])
    elif module is fetch:
        Topic = FetchRequest.FetchTopic  # noqa: N806  a class
        part = Topic.FetchPartition(partition=3, fetch_offset=1, partition_max_bytes=1)
        topic = Topic(topic="t", partitions=[part])
        message = FetchRequest(max_wait_ms=1, min_bytes=1, max_bytes=1, topics=[topic], rack_id="")
    else:
        Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806  a class
        topic = Topic(name="t", partitions=[Topic.ListOffsetsPartition(partition_index=1)])
        message = ListOffsetsRequest(replica_id=-1, topics=[topic])
    return bytes(message.encode(version=version))


EVERY = [(module, v) for module in (produce, fetch, list_offsets) for v in versions(module)]


@pytest.mark.parametrize(("module", "version"), EVERY)
def test_a_request_that_ends_early_or_late_is_refused(module: Any, version: int) -> None:
    data = a_request(module, version)
    module.read(memoryview(data), version)
    for end in range(len(data)):
        with pytest.raises(RequestInvalid):
            module.read(memoryview(data[:end]), version)
    with pytest.raises(RequestInvalid, match="left after"):
        module.read(memoryview(data + b"\0"), version)


@given(st.sampled_from(EVERY), st.data())
def test_a_changed_request_is_read_or_refused(which: tuple[Any, int], data: st.DataObject) -> None:
    module, version = which
    changed = bytearray(a_request(module, version))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RequestInvalid):
        module.read(memoryview(bytes(changed)), version)


@pytest.mark.parametrize("flexible", [False, True])
def test_a_count_that_the_rest_cannot_hold_is_refused(flexible: bool) -> None:
    said = b"\x06" if flexible else b"\0\0\0\x05"
    fits = Cursor(said + bytes(10), flexible=flexible)
    assert fits.count(2) == 5
    with pytest.raises(RequestInvalid, match="no room"):
        Cursor(said + bytes(9), flexible=flexible).count(2)


def test_tagged_fields_that_nobody_knows_are_skipped() -> None:
    cursor = Cursor(b"\x02\x07\x03abc\x81\x01\x00tail", flexible=True)
    cursor.skip_tags()
    assert bytes(cursor.data[cursor.at :]) == b"tail"


def test_a_header_is_read_with_and_without_a_client_id() -> None:
    named = frames.read_header(b"\0\x12\0\x03\0\0\0\x07\0\x02mebody")
    assert named == frames.RequestHeader(18, 3, 7, "me", 12)
    assert frames.read_header(b"\0\x12\0\x03\0\0\0\x07\xff\xff").client_id == ""
    for wrong in (b"", b"\0\x12\0\x03\0\0\0\x07\xff\xfe", b"\0\x12\0\x03\0\0\0\x07\0\x03me"):
        with pytest.raises(RequestInvalid):
            frames.read_header(wrong)


def test_the_body_of_a_flexible_request_begins_after_the_tagged_fields() -> None:
    frame = b"\0\x12\0\x03\0\0\0\x07\xff\xff\x01\x00\x01xbody"
    header = frames.read_header(frame)
    assert frame[frames.body_at(frame, header, True) :] == b"body"
    assert frames.body_at(frame, header, False) == header.end


@pytest.mark.parametrize("flexible", [False, True])
def test_a_response_says_its_size(flexible: bool) -> None:
    data = joined(frames.response(9, [b"abc", memoryview(b"de")], flexible=flexible))
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert data[4:] == b"\0\0\0\x09" + (b"\0" if flexible else b"") + b"abcde"
