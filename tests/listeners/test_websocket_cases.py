"""The protocol case by case, in the order of the Autobahn test suite, over real sockets.

There is nothing here that echoes: what a producer sends is found in its queue.
"""

from __future__ import annotations

import json

import pytest

from listeners.websocket_client import Client, House, run
from millstream.listeners.http.websocket import SocketTimes
from millstream.wire.frames import BINARY, CLOSE, PING, PONG, TEXT, encode_masked, read_close

KEY = b"\x37\xfa\x21\x3d"
# Nothing but what a client does ends a connection.
PATIENT = SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)
# Lengths at which the form of a frame's head changes, and those beside them.
SIZES = [0, 1, 125, 126, 127, 128, 65535, 65536, 100_000]


def frame(opcode: int, payload: bytes = b"", *, is_final: bool = True) -> bytes:
    return encode_masked(opcode, payload, KEY, is_final=is_final)


def text(payload: object) -> bytes:
    return json.dumps({"payload": payload}, ensure_ascii=False).encode()


async def is_alive(client: Client) -> bool:
    await client.send(frame(PING, b"still there?"))
    return await client.event() == (PONG, b"still there?")


# ---- 1: framing


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [997, 1 << 20])
def test_messages_of_every_length(size: int, step: int) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            client = await house.open("/queues/q/enqueue")
            body, string = b"*" * size, "x" * size
            stream = frame(BINARY, body) + frame(TEXT, text(string))
            for at in range(0, len(stream), step):
                await client.send(stream[at : at + step])
            assert [(await client.json())["queue_size"] for _ in range(2)] == [1, 2]
            assert house.held("q") == [body, json.dumps(string).encode()]
            consumer = await house.open("/queues/q/dequeue?format=binary")
            assert await consumer.event() == (BINARY, body)
            assert await consumer.event() == (BINARY, json.dumps(string).encode())

    run(scenario())


# ---- 2: pings and pongs


@pytest.mark.parametrize("path", ["/queues/q/enqueue", "/queues/q/dequeue"])
def test_pings_are_answered_and_pongs_are_not(path: str) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            house.queues.get_or_create("q")
            client = await house.open(path)
            payloads = [b"", b"hello", b"\x00\xff\xfe", b"x" * 125]
            await client.send(frame(PONG, b"nobody asked") + frame(PONG))
            await client.send(b"".join(frame(PING, payload) for payload in payloads))
            for payload in payloads:
                assert await client.event() == (PONG, payload)
            assert await is_alive(client)

    run(scenario())


# ---- 3 to 6: what is wrong ends the connection with its code, on both paths

WRONG = {
    "reserved bit 1": (b"\xc1\x80" + KEY, 1002),
    "reserved bit 2": (b"\xa1\x80" + KEY, 1002),
    "reserved bit 3": (b"\x91\x80" + KEY, 1002),
    "reserved bit in a ping": (b"\xc9\x80" + KEY, 1002),
    "reserved bit in a close": (b"\xf8\x80" + KEY, 1002),
    "opcode 3": (frame(3), 1002),
    "opcode 7": (frame(7, b"x"), 1002),
    "opcode 11": (frame(11), 1002),
    "opcode 15": (frame(15, b"x"), 1002),
    "a ping of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "a close of 126 bytes": (frame(CLOSE, b"\x03\xe8" + b"x" * 124), 1002),
    "a ping in fragments": (frame(PING, is_final=False) + frame(0), 1002),
    "a pong in fragments": (frame(PONG, is_final=False) + frame(0), 1002),
    "a continuation of nothing": (frame(0, b"x"), 1002),
    "a first fragment twice": (frame(BINARY, is_final=False) + frame(BINARY), 1002),
    "not masked": (b"\x82\x01x", 1002),
    "a ping that is not masked": (b"\x89\x00", 1002),
    "a length of 2 bytes for 125": (b"\x82\xfe\x00\x7d" + KEY, 1002),
    "a length of 8 bytes for 65,535": (b"\x82\xff" + (65535).to_bytes(8, "big") + KEY, 1002),
    "a length above 63 bits": (b"\x82\xff" + b"\xff" * 8 + KEY, 1002),
    "text: a lonely continuation byte": (frame(TEXT, b"a\x80b"), 1007),
    "text: an overlong slash": (frame(TEXT, b"\xc0\xaf"), 1007),
    "text: half of a pair": (frame(TEXT, b"\xed\xa0\x80"), 1007),
    "text: above the last character": (frame(TEXT, b"\xf4\x90\x80\x80"), 1007),
    "text: cut off": (frame(TEXT, "κόσμε".encode()[:-1]), 1007),
    "text: wrong across fragments": (
        frame(TEXT, b"\xce", is_final=False) + frame(0, b"\x28"),
        1007,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_ends_the_connection_with_its_code(case: str) -> None:
    async def scenario() -> None:
        sent, code = WRONG[case]
        async with House(times=PATIENT) as house:
            house.queues.get_or_create("q")
            for path in ("/queues/q/enqueue", "/queues/q/dequeue"):
                client = await house.open(path)
                await client.send(sent)
                closing = await client.closing()
                assert closing.code == code
                assert closing.reason
                # The client need not say goodbye to see the end.
                assert await client.read_all() == b""
                client.close()
            assert house.held("q") == []

    run(scenario())


# ---- 5: fragments, with control frames between them


def test_fragments_are_put_together_and_control_frames_pass_between_them() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            client = await house.open("/queues/q/enqueue")
            message = text("κόσμε")
            for step in (1, 3, len(message)):
                parts = [message[at : at + step] for at in range(0, len(message), step)]
                await client.send(frame(TEXT, is_final=False))
                for part in parts:
                    await client.send(frame(0, part, is_final=False) + frame(PING, part[:1]))
                await client.send(frame(0) + frame(BINARY, b"next"))
                for part in parts:
                    assert await client.event() == (PONG, part[:1])
                for _ in range(2):
                    assert (await client.json())["queued"] is True
            assert house.held("q") == ['"κόσμε"'.encode(), b"next"] * 3

    run(scenario())


def test_fragments_past_the_limit_are_too_large_together() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT, message_bytes_max=1000) as house:
            client = await house.open("/queues/q/enqueue")
            await client.send(frame(BINARY, b"x" * 600, is_final=False) + frame(0, b"x" * 400))
            assert (await client.json())["queued"] is True
            await client.send(frame(BINARY, b"x" * 600, is_final=False) + frame(0, b"x" * 401))
            assert (await client.closing()).code == 1009

    run(scenario())


# ---- 7: closing


@pytest.mark.parametrize(
    "code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999]
)
def test_a_close_with_a_good_code_is_answered_with_it(code: int) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            client = await house.open("/queues/q/enqueue")
            reason = "ü" * 61
            await client.send_close(code.to_bytes(2, "big") + reason.encode())
            assert (await client.closing()).code == code
            assert await client.read_all() == b""

    run(scenario())


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b"", 1005),
        (b"\x03", 1002),
        (b"\x03\xe8\xce\xba\xe1", 1007),
        *(
            (code.to_bytes(2, "big"), 1002)
            for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535)
        ),
    ],
)
def test_a_close_without_a_good_code(payload: bytes, answer: int) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            client = await house.open("/queues/q/enqueue")
            await client.send_close(payload)
            opcode, found = await client.event()
            assert (opcode, read_close(found).code) == (CLOSE, answer)
            assert await client.read_all() == b""

    run(scenario())


# ---- 12 and 13: compression, which is not spoken


def test_compression_is_not_taken_up() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            client = await house.raw()
            offer = "permessage-deflate; client_max_window_bits, x-webkit-deflate-frame"
            names = {"Sec-WebSocket-Extensions": offer, "Sec-WebSocket-Protocol": "chat, mqtt"}
            await client.send(client.request("/queues/q/enqueue", **names))
            head = (await client.read_until(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 101 ")
            assert b"extensions" not in head
            assert b"protocol:" not in head
            await client.send(frame(BINARY, b"plain"))
            assert (await client.json())["queued"] is True

    run(scenario())
