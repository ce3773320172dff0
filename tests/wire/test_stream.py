"""The binary frames of a stream: what is written is read again, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import BatchInvalid
from millstream.log.batch import encode as encode_batch
from millstream.wire import stream
from millstream.wire.batches import join_batches, split_batches

IDS = st.integers(-1, 2**31 - 1)
OFFSETS = st.integers(-(2**63), 2**63 - 1)
PARTITIONS = st.integers(-(2**31), 2**31 - 1)
BYTES = st.none() | st.binary(max_size=50)
HEADERS = st.lists(st.tuples(st.text(max_size=10), BYTES), max_size=3).map(tuple)
RECORDS = st.lists(
    st.builds(stream.Record, BYTES, BYTES, HEADERS, OFFSETS, PARTITIONS, OFFSETS), max_size=4
)
WORDS = st.text(st.characters(max_codepoint=127), max_size=30)
MESSAGES = st.one_of(
    st.builds(stream.Publish, IDS, RECORDS, st.sampled_from(stream.ACKS), WORDS),
    st.builds(
        stream.Published,
        IDS,
        st.lists(st.builds(stream.Place, PARTITIONS, OFFSETS, OFFSETS), max_size=4),
        st.booleans(),
    ),
    st.builds(stream.Open, IDS, WORDS, PARTITIONS, OFFSETS),
    st.builds(stream.Opened, IDS, WORDS, st.dictionaries(PARTITIONS, OFFSETS, max_size=4)),
    st.builds(stream.Next, st.integers(0, 2**32 - 1)),
    st.builds(stream.Messages, RECORDS),
    st.builds(stream.Ack, IDS, PARTITIONS, OFFSETS),
    st.builds(stream.Acked, IDS, PARTITIONS, OFFSETS),
    st.builds(stream.Failed, IDS, st.binary(max_size=50)),
)


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written(message: stream.Message) -> None:
    assert stream.decode(stream.encode(message)) == message


@given(MESSAGES, st.data())
def test_half_a_message_is_none(message: stream.Message, data: st.DataObject) -> None:
    whole = stream.encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(stream.StreamFrameError):
        stream.decode(whole[:cut])
    with pytest.raises(stream.StreamFrameError):
        stream.decode(whole + b"\x00")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = stream.decode(data)
    except stream.StreamFrameError:
        return
    assert stream.decode(stream.encode(message)) == message


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "the frame is empty"),
        (b"\x63", "there is no message of kind 99; kinds are 1 to 9"),
        (b"\x00", "there is no message of kind 0; kinds are 1 to 9"),
        (b"\x01", "the frame ends too early: it has 1 bytes, and what begins at byte 1 has 4"),
        (
            b"\x01\0\0\0\1",
            "the frame ends too early: it has 5 bytes, and what begins at byte 5 has 1",
        ),
        (b"\x01\0\0\0\1\7\0\0\0\0\0\0", "acks is 7; it must be 0 (none), 1 (leader) or 2 (all)"),
        (b"\x01\0\0\0\1\2\0\1\xff", "the text at byte 6 is not UTF-8"),
        (b"\x05\0\0\0\1x", "1 bytes follow the message"),
    ],
)
def test_a_frame_that_is_no_message_hears_why(frame: bytes, said: str) -> None:
    with pytest.raises(stream.StreamFrameError) as caught:
        stream.decode(frame)
    assert str(caught.value) == said


def test_a_count_that_is_a_lie_allocates_nothing() -> None:
    with pytest.raises(stream.StreamFrameError, match="reaches past the end"):
        stream.decode(b"\x06\xff\xff\xff\xff" + bytes(100))


BATCHES = st.lists(
    st.tuples(
        PARTITIONS, st.binary(max_size=30).map(lambda value: encode_batch([(0, None, value, ())]))
    ),
    max_size=4,
)


@given(BATCHES)
def test_batches_with_their_partitions_come_apart_again(entries: list[tuple[int, bytes]]) -> None:
    assert split_batches(join_batches(entries)) == entries


@given(BATCHES.filter(bool), st.data())
def test_a_body_that_ends_inside_a_batch_is_refused(
    entries: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    body = join_batches(entries)
    last = len(body) - len(entries[-1][1]) - 4
    cut = data.draw(st.integers(last + 1, len(body) - 1))
    with pytest.raises(BatchInvalid):
        split_batches(body[:cut])


@given(st.binary(max_size=300))
def test_any_body_is_batches_or_refused(body: bytes) -> None:
    try:
        entries = split_batches(body)
    except BatchInvalid:
        return
    assert join_batches(entries) == body
