"""WebSocket frames, without a socket. The examples are those of RFC 6455."""

from __future__ import annotations

import os
import random
import string
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from millstream.wire import frames as facade
from millstream.wire.frames import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    Closing,
    FrameError,
    accept_key,
    encode,
    encode_close,
    encode_masked,
    frame_bytes,
    is_key,
    read_close,
)
from wire.frame_twins import COMPILED, PURE, both_twins, needs_compiled

KEY = bytes.fromhex("37fa213d")
LENGTHS = [0, 1, 2, 3, 4, 5, 124, 125, 126, 127, 255, 65535, 65536, 70000]


def reader(twin: ModuleType, limit: int = 1 << 20) -> Any:
    return twin.FrameReader(limit, limit)


def test_the_compiled_twin_is_taken_unless_the_pure_one_is_asked_for() -> None:
    is_pure = os.environ.get("MILLSTREAM_PURE", "") not in ("", "0") or COMPILED is None
    twin = PURE if is_pure else COMPILED
    assert twin is not None
    assert ("pure" if is_pure else "compiled") == facade.IMPLEMENTATION
    assert facade.FrameReader is twin.FrameReader


def test_the_key_of_section_1_3() -> None:
    key = b"dGhlIHNhbXBsZSBub25jZQ=="
    assert is_key(key)
    assert accept_key(key) == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize("key", [b"", b"abc", b"dGhlIHNhbXBsZSBub25jZQ", b"AAAA", b"\xff" * 24])
def test_what_is_no_key(key: bytes) -> None:
    assert not is_key(key)


@both_twins
def test_the_frames_of_section_5_7(twin: ModuleType) -> None:
    hello = bytes.fromhex("818537fa213d7f9f4d5158")
    assert encode_masked(TEXT, b"Hello", KEY) == hello
    assert reader(twin).feed(hello) == [(TEXT, b"Hello")]
    assert encode(TEXT, b"Hello") == bytes.fromhex("810548656c6c6f")
    assert encode(PING, b"Hello") == bytes.fromhex("890548656c6c6f")
    pong = bytes.fromhex("8a8537fa213d7f9f4d5158")
    assert reader(twin).feed(pong) == [(PONG, b"Hello")]


@both_twins
@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_every_form_of_length_is_read_and_written_as_a_peer_does(
    twin: ModuleType, opcode: int, size: int
) -> None:
    payload = (string.ascii_letters * (size // 50 + 1)).encode()[:size]
    assert encode(opcode, payload) == Frame(Opcode(opcode), payload).serialize(mask=False)
    assert len(encode(opcode, payload)) == frame_bytes(size)
    theirs = Frame(Opcode(opcode), payload).serialize(mask=True)
    assert reader(twin).feed(theirs) == [(opcode, payload)]
    ours = twin.encode_many(opcode, [payload, b"", payload])
    client = twin.FrameReader(1 << 20, 1 << 20, from_client=False)
    assert client.feed(ours) == [(opcode, payload), (opcode, b""), (opcode, payload)]


@both_twins
@given(payload=st.binary(max_size=300), key=st.binary(min_size=4, max_size=4))
def test_unmasking_is_exclusive_or_and_its_own_inverse(
    twin: ModuleType, payload: bytes, key: bytes
) -> None:
    masked = twin.unmask(payload, key)
    assert masked == bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert twin.unmask(masked, key) == payload


@both_twins
@given(
    before=st.text(max_size=70).map(str.encode),
    first=st.integers(0, 2**63) | st.sampled_from([9, 99, 999_999, 2**64 - 3]),
    count=st.integers(0, 3),
    after=st.text(max_size=70).map(str.encode),
)
def test_texts_that_count_up_are_frames_like_any(
    twin: ModuleType, before: bytes, first: int, count: int, after: bytes
) -> None:
    texts = [before + str(first + at).encode() + after for at in range(count)]
    found = twin.encode_counted(before, first, count, after)
    assert found == b"".join(encode(TEXT, text) for text in texts)


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([TEXT, BINARY, PING, PONG]),
        st.text(max_size=30).map(str.encode),
        st.integers(1, 4),
    ),
    max_size=8,
)


def streamed(messages: list[tuple[int, bytes, int]]) -> tuple[bytes, list[tuple[int, bytes]]]:
    """What a client sends, some of it in fragments, and what is to be read of it."""
    stream, expected = b"", []
    for opcode, payload, pieces in messages:
        expected.append((opcode, payload))
        if opcode >= CLOSE or pieces == 1:
            stream += encode_masked(opcode, payload, os.urandom(4))
            continue
        step = len(payload) // pieces + 1
        parts = [payload[at : at + step] for at in range(0, len(payload), step)] or [b""]
        for index, part in enumerate(parts):
            is_final = index == len(parts) - 1
            kind = opcode if index == 0 else 0
            stream += encode_masked(kind, part, KEY, is_final=is_final)
    return stream, expected


@both_twins
@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 40), min_size=1))
def test_cut_anywhere_and_in_fragments_the_messages_are_the_same(
    twin: ModuleType, messages: list[tuple[int, bytes, int]], cuts: list[int]
) -> None:
    stream, expected = streamed(messages)
    frames, found, at, turn = reader(twin), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += frames.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == expected
    assert frames.error is None


@both_twins
def test_a_control_frame_may_stand_inside_a_message(twin: ModuleType) -> None:
    stream = (
        encode_masked(TEXT, b"a", KEY, is_final=False)
        + encode_masked(PING, b"p", KEY)
        + encode_masked(0, b"b", KEY)
    )
    frames = reader(twin)
    assert frames.feed(stream) == [(PING, b"p"), (TEXT, b"ab")]
    assert frames.has_control
    assert frames.feed(encode_masked(TEXT, b"c", KEY)) == [(TEXT, b"c")]
    assert not frames.has_control


@both_twins
@given(messages=MESSAGES, frames_max=st.integers(1, 3), cut=st.integers(0, 100))
def test_so_many_frames_at_a_time_are_the_same_messages(
    twin: ModuleType, messages: list[tuple[int, bytes, int]], frames_max: int, cut: int
) -> None:
    stream, expected = streamed(messages)
    frames, found = reader(twin), []
    # The second packet comes before the first is worked off.
    for data in (stream[:cut], stream[cut:]):
        found += frames.feed(data, frames_max)
    while frames.has_more:
        events = frames.feed(b"", frames_max)
        assert len(events) <= frames_max
        found += events
    assert found == expected


@both_twins
def test_fragments_without_a_byte_count_as_frames(twin: ModuleType) -> None:
    frames = reader(twin)
    stream = encode_masked(TEXT, b"", KEY, is_final=False)
    stream += encode_masked(0, b"", KEY, is_final=False) * 9 + encode_masked(0, b"end", KEY)
    assert frames.feed(stream, 10) == []
    assert frames.has_more
    assert frames.feed(b"", 10) == [(TEXT, b"end")]
    assert not frames.has_more


@both_twins
@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (b"\x81\x01a", 1002),
        (b"\xc1\x80" + KEY, 1002),
        (b"\x83\x80" + KEY, 1002),
        (b"\x8b\x80" + KEY, 1002),
        (b"\x80\x80" + KEY, 1002),
        (b"\x09\x80" + KEY, 1002),
        (b"\x89\xfe\x00\x7e" + KEY, 1002),
        (b"\x82\xfe\x00\x7d" + KEY, 1002),
        (b"\x82\xff" + bytes(8) + KEY, 1002),
        (b"\x82\xff" + b"\xff" * 8, 1002),
        (encode_masked(TEXT, b"a", KEY, is_final=False) + b"\x81\x80" + KEY, 1002),
        (encode_masked(TEXT, b"\xc3\x28", KEY), 1007),
        (encode_masked(TEXT, b"\xc3", KEY, is_final=False) + encode_masked(0, b"(", KEY), 1007),
    ],
)
def test_what_breaks_the_protocol_has_its_code(twin: ModuleType, stream: bytes, code: int) -> None:
    frames = reader(twin)
    good = encode_masked(BINARY, b"before", KEY)
    assert frames.feed(good + stream + good) == [(BINARY, b"before")]
    assert frames.error is not None
    assert frames.error.close_code == code
    assert frames.feed(good) == []


@both_twins
def test_a_character_may_be_cut_by_fragments(twin: ModuleType) -> None:
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    stream = encode_masked(TEXT, first, KEY, is_final=False) + encode_masked(0, second, KEY)
    assert reader(twin).feed(stream) == [(TEXT, "ü".encode())]


@both_twins
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_a_message_at_the_limit_passes_and_one_past_it_does_not(
    twin: ModuleType, opcode: int
) -> None:
    assert reader(twin, 10).feed(encode_masked(opcode, b"x" * 10, KEY)) == [(opcode, b"x" * 10)]
    frames = reader(twin, 10)
    # The head is enough to refuse it.
    assert frames.feed(encode_masked(opcode, b"x" * 11, KEY)[:2]) == []
    assert frames.error is not None
    assert frames.error.close_code == 1009
    frames = reader(twin, 10)
    part = encode_masked(0, b"x" * 5, KEY, is_final=False)
    frames.feed(encode_masked(opcode, b"x", KEY, is_final=False) + part + part)
    assert frames.error is not None
    assert frames.error.close_code == 1009


def test_close_frames() -> None:
    assert encode_close(1001, "bye") == b"\x88\x05\x03\xe9bye"
    assert encode_close(1005) == b"\x88\x00"
    long = encode_close(1000, "ü" * 100)
    assert len(long) == 2 + 2 + 122
    assert read_close(long[2:]) == Closing(1000, "ü" * 61)
    assert read_close(b"") == Closing(1005, "")


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"\x03", 1002),
        (b"\x03\xe7", 1002),  # 999
        (b"\x03\xee", 1002),  # 1006
        (b"\x07\xd0", 1002),  # 2000
        (b"\x13\x88", 1002),  # 5000
        (b"\x03\xe8\xff", 1007),
    ],
)
def test_a_wrong_close_frame_has_its_code(payload: bytes, code: int) -> None:
    with pytest.raises(FrameError) as wrong:
        read_close(payload)
    assert wrong.value.close_code == code


@both_twins
def test_a_message_that_comes_byte_by_byte_is_read_in_the_end(twin: ModuleType) -> None:
    frames = reader(twin)
    body = random.Random(5).randbytes(70_000)
    stream = encode_masked(BINARY, body, KEY)
    for at in range(len(stream) - 1):
        assert frames.feed(stream[at : at + 1]) == []
        assert frames.is_partial
    assert frames.feed(stream[-1:]) == [(BINARY, body)]
    assert not frames.is_partial


# Mostly frames, so that more than the first two bytes are looked at; some of them wrong.
HEADS = st.tuples(
    st.sampled_from([0x81, 0x82, 0x01, 0x02, 0x80, 0x00, 0x88, 0x89, 0x8A, 0x83, 0xC1, 0x8B]),
    st.sampled_from([0x80, 0x81, 0x85, 0xFD, 0xFE, 0xFF, 0x05]),
).map(bytes)
PIECES = st.one_of(
    HEADS,
    st.binary(max_size=12),
    st.tuples(
        st.sampled_from([TEXT, BINARY, 0, CLOSE, PING, PONG]),
        st.binary(max_size=140) | st.text(max_size=40).map(str.encode),
        st.booleans(),
    ).map(lambda one: encode_masked(one[0], one[1], KEY, is_final=one[2])),
)


@needs_compiled
@given(
    pieces=st.lists(PIECES, max_size=10),
    step=st.integers(1, 60),
    frames_max=st.sampled_from([1, 2, 1000]),
    limit=st.sampled_from([0, 4, 130]),
)
def test_both_twins_say_the_same_of_anything(
    pieces: list[bytes], step: int, frames_max: int, limit: int
) -> None:
    assert COMPILED is not None
    stream = b"".join(pieces)
    ours, theirs = COMPILED.FrameReader(limit, 100), PURE.FrameReader(limit, 100)
    for at in range(0, len(stream), step):
        data = stream[at : at + step]
        assert ours.feed(data, frames_max) == theirs.feed(data, frames_max)
        for name in ("has_more", "has_control", "is_partial"):
            assert getattr(ours, name) == getattr(theirs, name), name
        if theirs.error is not None:
            assert ours.error is not None
            assert (ours.error.close_code, ours.error.reason) == (
                theirs.error.close_code,
                theirs.error.reason,
            )
            return
        assert ours.error is None
