"""Many WebSockets, and those that want too much: nobody starves, nothing grows, nothing is lost."""

from __future__ import annotations

import random
import socket
from itertools import islice

import pytest

from listeners.websocket_client import House, run, until
from millstream.listeners.http.queue_sockets import HELPING_BYTES_MAX, TURN_COUNT_MAX
from millstream.listeners.http.websocket import ANSWERS_BYTES_MAX, FRAMES_PER_TURN, SocketTimes
from millstream.process import raise_open_files
from millstream.wire.frames import BINARY, PING, encode_masked

CROWD = 1000
PATIENT = SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)
TINY = encode_masked(BINARY, b"", b"abcd")
# Many turns of frames, in a packet that the system takes whole.
MANY = 12_000
FRAMES = {
    "messages": TINY,
    "pings": encode_masked(PING, b"", b"abcd"),
    "fragments": encode_masked(0, b"", b"abcd", is_final=False),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_packet_of_tiny_frames_does_not_hold_up_the_others(kind: str) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT, capacity=10**6) as house:
            greedy = await house.open("/queues/greedy/enqueue")
            (connection,) = house.connections
            witness = await house.open("/queues/witness/enqueue")
            house.queues.get_or_create("witness")
            consumer = await house.open("/queues/witness/dequeue?format=binary")
            if kind == "fragments":
                await greedy.send(encode_masked(BINARY, b"", b"abcd", is_final=False))
            # Both lie there before the broker looks.
            greedy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
            packet = FRAMES[kind] * MANY
            assert greedy.socket.send(packet) == len(packet)
            witness.socket.send(encode_masked(BINARY, b"me too", b"abcd"))
            assert (await witness.json())["queued"] is True
            assert await consumer.event() == (BINARY, b"me too")
            assert connection._reader.has_more, "the others had to wait for all of it"
            if kind == "messages":
                assert len(house.queues.get("greedy")) < MANY // 2
                for place in range(1, MANY + 1):
                    assert (await greedy.json())["queue_size"] == place

    run(scenario())


def test_confirmations_that_nobody_reads_are_bounded_and_complete_in_the_end() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT, capacity=10**6) as house:
            greedy = await house.open("/queues/q/enqueue")
            (connection,) = house.connections
            queue = house.queues.get_or_create("q")
            total = 0

            def is_taken_or_too_much() -> bool:
                return connection.is_paused or len(queue) == total

            while not connection.is_paused:
                await greedy.send(TINY * MANY)
                total += MANY
                await until(is_taken_or_too_much, "all to be taken, or too many answers")
            answer_bytes = 100
            most = ANSWERS_BYTES_MAX + FRAMES_PER_TURN * answer_bytes
            assert connection.transport.get_write_buffer_size() <= most
            assert len(queue) < total
            for place in range(1, total + 1):
                assert (await greedy.json())["queue_size"] == place

    run(scenario())


def test_messages_after_a_close_frame_are_not_taken_and_those_before_it_are() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT, capacity=10**6) as house:
            client = await house.open("/queues/q/enqueue")
            count = 3 * FRAMES_PER_TURN
            await client.send(TINY * count + encode_masked(8, b"\x03\xe8", b"abcd") + TINY)
            answers, closing = await client.messages_until_the_end()
            assert closing is not None
            assert (closing.code, len(answers)) == (1000, count)
            assert len(house.queues.get("q")) == count
            assert await client.read_all() == b""

    run(scenario())


def test_more_than_a_turn_of_messages_is_shared_evenly() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT, capacity=10**6) as house:
            house.queues.get_or_create("q")
            consumers = [await house.open("/queues/q/dequeue?format=binary") for _ in range(8)]
            await until(lambda: house.queues.get("q").facts().waiting == 8, "all to wait")
            # Little enough to lie in the system's buffers, so that nobody has to be waited for.
            share = TURN_COUNT_MAX // 4
            house.fill("q", [b"%d" % number for number in range(8 * share)])
            found: list[int] = []
            for consumer in consumers:
                own = [int((await consumer.event())[1]) for _ in range(share)]
                assert own == sorted(own)
                found += own
            assert sorted(found) == list(range(8 * share))

    run(scenario())


def test_a_consumer_that_does_not_read_holds_up_no_more_than_a_helping() -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            bodies = [b"%06d" % number + b"x" * 1000 for number in range(6000)]
            house.fill("q", bodies, is_json=False)
            slow = await house.open("/queues/q/dequeue?format=binary")
            (connection,) = house.connections
            await until(lambda: connection.is_paused, "the buffers to be full")
            assert connection.transport.get_write_buffer_size() <= 1.1 * HELPING_BYTES_MAX
            for body in bodies:
                assert await slow.event() == (BINARY, body)

    run(scenario())


@pytest.fixture
def many_files() -> None:
    if raise_open_files(2 * CROWD + 500) < 2 * CROWD + 500:
        pytest.skip(f"{CROWD} connections need more open files than the system allows")


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_thousand_consumers_that_die_at_once_take_no_message_along(end: str) -> None:
    async def scenario() -> None:
        async with House(times=PATIENT) as house:
            house.queues.get_or_create("q")
            consumers = [await house.open("/queues/q/dequeue") for _ in range(CROWD)]
            await until(lambda: house.queues.get("q").facts().waiting == CROWD, "all to wait")
            producer = await house.open("/queues/q/enqueue")
            random.Random(3).shuffle(consumers)
            # All at once: the broker has not looked when the messages come.
            messages = [b"%d" % number for number in range(CROWD + 100)]
            producer.socket.send(
                b"".join(encode_masked(BINARY, body, b"abcd") for body in islice(messages, 50))
            )
            for consumer in consumers:
                if end == "killed":
                    consumer.kill()
                else:
                    consumer.close()
            await producer.send(
                b"".join(encode_masked(BINARY, body, b"abcd") for body in messages[50:])
            )
            for _ in messages:
                assert (await producer.json())["queued"] is True
            await until(lambda: len(house.connections) == 1, "their ends to be seen")
            await until(lambda: len(house.queues.get("q")) == len(messages), "all to be back")
            assert house.held("q") == messages
            facts = house.queues.get("q").facts()
            assert (facts.enqueued_total, facts.dequeued_total) == (len(messages), 0)
            assert house.queues.bytes == sum(map(len, messages))

    run(scenario())
