"""WebSocket frames, without a socket. The examples are those of RFC 6455."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from millstream.wire.frames import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    TEXT,
    Closing,
    FrameError,
    FrameReader,
    accept_key,
    encode,
    encode_close,
    encode_many,
    encode_masked,
    frame_bytes,
    is_key,
    read_close,
    unmask,
)

KEY = bytes.fromhex("37fa213d")
LENGTHS = [0, 1, 2, 3, 4, 5, 124, 125, 126, 127, 255, 65535, 65536, 70000]


def reader(limit: int = 1 << 20) -> FrameReader:
    return FrameReader(limit, limit)


def test_the_key_of_section_1_3() -> None:
    key = b"dGhlIHNhbXBsZSBub25jZQ=="
    assert is_key(key)
    assert accept_key(key) == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize("key", [b"", b"abc", b"dGhlIHNhbXBsZSBub25jZQ", b"AAAA", b"\xff" * 24])
def test_what_is_no_key(key: bytes) -> None:
    assert not is_key(key)


def test_the_frames_of_section_5_7() -> None:
    hello = bytes.fromhex("818537fa213d7f9f4d5158")
    assert encode_masked(TEXT, b"Hello", KEY) == hello
    assert reader().feed(hello) == [(TEXT, b"Hello")]
    assert encode(TEXT, b"Hello") == bytes.fromhex("810548656c6c6f")
    assert encode(PING, b"Hello") == bytes.fromhex("890548656c6c6f")
    pong = bytes.fromhex("8a8537fa213d7f9f4d5158")
    assert reader().feed(pong) == [(PONG, b"Hello")]


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_every_form_of_length_is_read_and_written_as_a_peer_does(opcode: int, size: int) -> None:
    payload = b"x" * size
    assert encode(opcode, payload) == Frame(Opcode(opcode), payload).serialize(mask=False)
    assert len(encode(opcode, payload)) == frame_bytes(size)
    theirs = Frame(Opcode(opcode), payload).serialize(mask=True)
    assert reader().feed(theirs) == [(opcode, payload)]
    ours = encode_many(opcode, [payload, b"", payload])
    client = FrameReader(1 << 20, 1 << 20, from_client=False)
    assert client.feed(ours) == [(opcode, payload), (opcode, b""), (opcode, payload)]


@given(st.binary(max_size=300), st.binary(min_size=4, max_size=4))
def test_unmasking_is_exclusive_or_and_its_own_inverse(payload: bytes, key: bytes) -> None:
    masked = unmask(payload, key)
    assert masked == bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert unmask(masked, key) == payload


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([TEXT, BINARY, PING, PONG]),
        st.text(max_size=30).map(str.encode),
        st.integers(1, 4),
    ),
    max_size=8,
)


@given(MESSAGES, st.lists(st.integers(1, 40), min_size=1))
def test_cut_anywhere_and_in_fragments_the_messages_are_the_same(
    messages: list[tuple[int, bytes, int]], cuts: list[int]
) -> None:
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
    frames, found, at, turn = reader(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += frames.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert found == expected
    assert frames.error is None


def test_a_control_frame_may_stand_inside_a_message() -> None:
    stream = (
        encode_masked(TEXT, b"a", KEY, is_final=False)
        + encode_masked(PING, b"p", KEY)
        + encode_masked(0, b"b", KEY)
    )
    assert reader().feed(stream) == [(PING, b"p"), (TEXT, b"ab")]


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
def test_what_breaks_the_protocol_has_its_code(stream: bytes, code: int) -> None:
    frames = reader()
    good = encode_masked(BINARY, b"before", KEY)
    assert frames.feed(good + stream + good) == [(BINARY, b"before")]
    assert frames.error is not None
    assert frames.error.close_code == code
    assert frames.feed(good) == []


def test_a_character_may_be_cut_by_fragments() -> None:
    first, second = "ü".encode()[:1], "ü".encode()[1:]
    stream = encode_masked(TEXT, first, KEY, is_final=False) + encode_masked(0, second, KEY)
    assert reader().feed(stream) == [(TEXT, "ü".encode())]


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_a_message_at_the_limit_passes_and_one_past_it_does_not(opcode: int) -> None:
    assert reader(10).feed(encode_masked(opcode, b"x" * 10, KEY)) == [(opcode, b"x" * 10)]
    frames = reader(10)
    # The head is enough to refuse it.
    assert frames.feed(encode_masked(opcode, b"x" * 11, KEY)[:2]) == []
    assert frames.error is not None
    assert frames.error.close_code == 1009
    frames = reader(10)
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


@given(st.binary(max_size=400))
def test_garbage_never_raises(garbage: bytes) -> None:
    frames = reader(100)
    frames.feed(garbage[:7])
    for at in range(7, len(garbage)):
        frames.feed(garbage[at : at + 1])
