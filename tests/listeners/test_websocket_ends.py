"""How WebSockets end: refused, closed, killed, too slow; and that no message goes with them."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from listeners.websocket_client import House, run, until
from millstream.broker.queues import Queues
from millstream.listeners.http import queue_sockets
from millstream.listeners.http.queue_sockets import HELPING_BYTES_MAX
from millstream.listeners.http.websocket import SocketTimes
from millstream.wire.frames import BINARY, PING, PONG, TEXT, encode_masked

# More than all buffers between a broker and a client that does not read.
FLOOD = [b"%06d" % number + b"x" * 1000 for number in range(6000)]


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/queues/q/enqueue", {"Origin": "http://evil.example"}, 403, "foreign_request"),
        ("/queues/q/enqueue", {"Host": "evil.example"}, 403, "foreign_request"),
        ("/queues/q/enqueue", {"Sec-Fetch-Site": "cross-site"}, 403, "foreign_request"),
        ("/health", {}, 404, "not_found"),
        ("/queues/q", {}, 404, "not_found"),
        ("/queues/q/enqueue/batch", {}, 404, "not_found"),
        ("/queues/nope/dequeue", {}, 404, "queue_not_found"),
        ("/queues/a%20b/enqueue", {}, 400, "queue_name_invalid"),
        ("/queues/q/enqueue", {"Sec-WebSocket-Key": "short"}, 400, "bad_handshake"),
        ("/queues/q/enqueue", {"Sec-WebSocket-Key": ""}, 400, "bad_handshake"),
        ("/queues/q/enqueue", {"Sec-WebSocket-Version": "8"}, 426, "bad_handshake"),
        ("/queues/there/dequeue?format=xml", {}, 400, "parameter_invalid"),
        ("/queues/there/dequeue?max=0", {}, 400, "parameter_invalid"),
        ("/queues/there/dequeue?max=5&format=binary", {}, 400, "parameter_invalid"),
    ],
)
def test_what_is_refused(path: str, headers: dict[str, str], status: int, code: str) -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("there")
            assert house.queues.get("there").facts().waiting == 0
            found, body = await house.refusal(path, **headers)
            assert (found, body["error"]) == (status, code)

    run(scenario())


def test_our_own_pages_may_connect() -> None:
    async def scenario() -> None:
        async with House() as house:
            await house.open("/queues/q/enqueue", Origin=f"http://127.0.0.1:{house.port}")

    run(scenario())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x81\x01a", 1002),  # not masked
        (b"\xc1\x80abcd", 1002),  # a reserved bit
        (b"\x83\x80abcd", 1002),  # a reserved opcode
        (b"\x80\x80abcd", 1002),  # a continuation of nothing
        (b"\x09\x80abcd", 1002),  # a ping in pieces
        (b"\x81\xfe\x00\x05abcdabcde", 1002),  # a length that is too long for its number
        (encode_masked(8, b"\x03", b"abcd"), 1002),
        (encode_masked(8, b"\x03\xed", b"abcd"), 1002),  # 1005 is never sent
        (encode_masked(TEXT, b"\xff\xfe", b"abcd"), 1007),
        (b"\x82\xff" + (10**12).to_bytes(8, "big"), 1009),
        (b"\x82\xff" + (129 * 1024).to_bytes(8, "big"), 1009),
        (b"\x81\xff" + (1024 * 1024 + 1).to_bytes(8, "big"), 1009),
    ],
)
@pytest.mark.parametrize("path", ["/queues/q/enqueue", "/queues/q/dequeue"])
def test_broken_frames_end_the_connection_with_a_code(path: str, sent: bytes, code: int) -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            client = await house.open(path)
            await client.send(sent)
            assert (await client.closing()).code == code

    run(scenario())


def test_what_came_before_a_broken_frame_is_confirmed() -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.open("/queues/q/enqueue")
            await client.send(encode_masked(TEXT, b'{"payload":1}', b"abcd") + b"\xff\xff\xff")
            assert (await client.json())["queued"] is True
            assert (await client.closing()).code == 1002
            assert house.held("q") == [b"1"]

    run(scenario())


def test_a_message_at_the_limit_is_taken_and_one_past_it_is_not() -> None:
    async def scenario() -> None:
        async with House(message_bytes_max=1000) as house:
            client = await house.open("/queues/q/enqueue")
            await client.send_binary(b"x" * 1000)
            assert (await client.json())["queued"] is True
            await client.send_json("x" * 999)
            assert (await client.json())["error"] == "message_too_large"
            await client.send_binary(b"x" * 1001)
            assert (await client.closing()).code == 1009

    run(scenario())


@pytest.mark.parametrize("path", ["/queues/q/enqueue", "/queues/q/dequeue"])
def test_who_sends_too_much_is_told_so_at_once_and_may_finish(path: str) -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)) as house:
            house.queues.get_or_create("q")
            client = await house.open(path)
            size = 8 * 1024 * 1024
            # All of it, although nobody wants it: a connection that is cut with bytes unread
            # would take the close frame along.
            await client.send(b"\x82\xff" + size.to_bytes(8, "big") + b"abcd" + b"x" * size)
            closing = await client.closing()
            assert (closing.code, "bytes" in closing.reason) == (1009, True)
            assert await client.read_all() == b""
            client.close()
            await until(lambda: not house.connections, "the end")

    run(scenario())


def test_a_fault_of_ours_ends_one_connection_with_1011(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.open("/queues/q/enqueue")
            other = await house.open("/queues/q/enqueue")
            with monkeypatch.context() as patch:
                patch.setattr(Queues, "fits", lambda *_: 1 // 0)
                await client.send_json(1)
                closing = await client.closing()
            assert (closing.code, closing.reason) == (1011, "internal")
            await other.send_json(2)
            assert (await other.json())["queue_size"] == 1

    run(scenario())


def test_garbage_ends_a_connection_and_nothing_else() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(ping_s=3600, close_s=0.05)) as house:
            dice = random.Random(7)
            witness = await house.open("/queues/witness/enqueue")
            for _ in range(40):
                client = await house.open("/queues/q/enqueue")
                await client.send(dice.randbytes(dice.randrange(1, 300)))
                client.close()
            await witness.send_json(1)
            assert (await witness.json())["queued"] is True
            await until(lambda: len(house.connections) == 1, "the others to be gone")

    run(scenario())


def test_a_consumer_that_talks_is_told_that_nobody_listens() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            client = await house.open("/queues/q/dequeue")
            await client.send_text(b"hello")
            assert (await client.closing()).code == 1003

    run(scenario())


def test_a_close_is_answered_with_its_code() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            for path in ("/queues/q/enqueue", "/queues/q/dequeue"):
                client = await house.open(path)
                await client.send_close(b"\x0f\xa1bye")
                assert (await client.closing()).code == 4001
                assert await client.read_all() == b""
            assert house.queues.get("q").facts().waiting == 0

    run(scenario())


def test_a_ping_is_answered_with_its_payload() -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.open("/queues/q/enqueue")
            await client.send(encode_masked(PING, b"are you there", b"abcd"))
            assert await client.event() == (PONG, b"are you there")

    run(scenario())


def test_a_client_that_answers_pings_stays_and_one_that_does_not_is_closed() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(ping_s=1.0, slow_s=3600, close_s=0.05)) as house:
            house.queues.get_or_create("q")
            deaf = await house.open("/queues/q/dequeue")
            alive = await house.open("/queues/q/dequeue")
            answers = 0

            async def answer_pings() -> None:
                nonlocal answers
                while await alive.event() == (PING, b""):
                    await alive.send(encode_masked(PONG, b"", b"abcd"))
                    answers += 1

            answering = asyncio.create_task(answer_pings())
            closing = await deaf.closing()
            assert (closing.code, closing.reason) == (1008, "no_pong")
            # It has outlived the other by two more pings.
            gone_at = answers
            await until(lambda: answers >= gone_at + 2, "more pings")
            assert house.queues.get("q").facts().waiting == 1
            answering.cancel()

    run(scenario())


@pytest.mark.parametrize(
    "begun",
    [b"\x82", b"\x82\x85abcd123", encode_masked(BINARY, b"first", b"abcd", is_final=False)],
)
def test_a_message_that_does_not_come_to_its_end_ends_the_connection(begun: bytes) -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=3600, slow_s=3600, close_s=3600, message_s=0.2)
        async with House(times=times) as house:
            client = await house.open("/queues/q/enqueue")
            (connection,) = house.connections
            await client.send(begun)
            if not begun[0] & 0x80:
                # Between fragments a client may ping, which does not get it on.
                await until(lambda: connection._message_timer, "the clock to run")
                await client.send(encode_masked(PING, b"", b"abcd"))
            closing = await client.closing()
            assert (closing.code, closing.reason) == (1008, "slow_sender")

    run(scenario())


def test_who_gets_on_may_have_a_message_half_sent_at_any_time() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(3600, 3600, 3600, 3600)) as house:
            client = await house.open("/queues/q/enqueue")
            (connection,) = house.connections
            frame = encode_masked(BINARY, b"whole", b"abcd")
            await client.send(frame[:5])
            await until(lambda: connection._reader.is_partial, "half of a message")
            for _ in range(3):
                await client.send(frame[5:] + frame[:5])
                assert (await client.json())["queued"] is True
                # The time is over; another message is half sent, but one was complete.
                connection._on_message_due()
                assert not connection.is_ending
            connection._on_message_due()
            assert (await client.closing()).reason == "slow_sender"

    run(scenario())


def test_a_stop_closes_with_1001_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            clients = [await house.open(f"/queues/q/{way}queue") for way in ("en", "de")]
            house.lane.drain()
            status, body = await house.refusal("/queues/q/enqueue")
            assert (status, body["error"]) == (503, "stopping")
            stopping = asyncio.create_task(house.listener.stop(30))
            for client in clients:
                assert (await client.closing()).code == 1001
                await client.send_close(b"\x03\xe9")
            await stopping
            house.fill("q", [b"1"])
            assert house.held("q") == [b"1"]

    run(scenario())


def test_what_was_not_sent_is_back_when_a_stop_has_cut_the_connection() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)) as house:
            house.fill("q", FLOOD, is_json=False)
            client = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_paused, "the buffers to be full")
            await house.listener.stop(0.01)
            # A snapshot would be made here.
            held = house.held("q")
            assert not house.connections
            frames, _ = await client.messages_until_the_end()
            assert frames + held == FLOOD

    run(scenario())


def test_consumers_of_a_deleted_queue_are_told() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            client = await house.open("/queues/q/dequeue")
            await until(lambda: house.queues.get("q").facts().waiting, "the consumer")
            house.queues.delete("q")
            closing = await client.closing()
            assert (closing.code, closing.reason) == (1001, "queue_deleted")

    run(scenario())


@pytest.mark.parametrize("form", ["", "?format=binary", "?max=7"])
def test_what_a_slow_consumer_was_not_sent_goes_back_in_order(form: str) -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=60, slow_s=0.05, close_s=0.05)
        async with House(times=times) as house:
            flood = [b'"%b"' % body for body in FLOOD]
            house.fill("q", flood)
            queue = house.queues.get("q")
            slow = await house.open("/queues/q/dequeue" + form)
            await until(lambda: len(queue) and not house.connections, "the end")
            held = house.held("q")
            assert held
            assert flood[-len(held) :] == held
            assert queue.facts().dequeued_total == len(flood) - len(held)
            # What counts as sent has really been sent, and the rest has not.
            frames, _ = await slow.messages_until_the_end()
            sent = sum(frame.count(b'xxxx"') for frame in frames)
            assert sent == len(flood) - len(held)

    run(scenario())


def test_a_slow_consumer_that_wakes_up_is_told_why_it_is_closed() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(ping_s=60, slow_s=0.1, close_s=20)) as house:
            house.fill("q", FLOOD, is_json=False)
            slow = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_ending, "the broker to lose its patience")
            frames, closing = await slow.messages_until_the_end()
            assert closing is not None
            assert (closing.code, closing.reason) == (1008, "slow_consumer")
            await slow.send_close(b"\x03\xf0")
            assert frames + house.held("q") == FLOOD

    run(scenario())


def test_a_killed_consumer_takes_nothing_along_that_was_not_sent() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("q", FLOOD, is_json=False)
            queue = house.queues.get("q")
            client = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_paused, "the buffers to be full")
            unsent = consumer.transport.get_write_buffer_size()
            given = queue.facts().dequeued_total
            assert unsent
            client.kill()
            await until(lambda: not house.connections, "the end")
            held = house.held("q")
            assert FLOOD[-len(held) :] == held
            frame = len(FLOOD[0]) + 4
            assert given - queue.facts().dequeued_total == -(-unsent // frame)

    run(scenario())


def test_what_a_slow_consumer_has_read_does_not_come_again_when_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The system takes a helping in small bites, and several of them between two looks.
    monkeypatch.setattr(queue_sockets, "SEND_BUFFER_BYTES", 8 * 1024)
    monkeypatch.setattr(queue_sockets, "LOOK_S", 1.0)

    async def scenario() -> None:
        async with House(times=SocketTimes(3600, 3600, 3600)) as house:
            house.fill("q", FLOOD, is_json=False)
            client = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_paused, "the buffers to be full")
            read: list[bytes] = []

            def has_left_in_part() -> bool:
                waiting = consumer.transport.get_write_buffer_size()
                return bool(0 < waiting < consumer._written - consumer._left_at)

            # Until more of a helping has left than the broker knows of.
            while not has_left_in_part():
                read.append((await client.event())[1])
                await asyncio.sleep(0)
            while client.has_events:
                read.append((await client.event())[1])
            await until(lambda: not has_left_in_part(), "the broker to look again")
            given = house.queues.get("q").facts().dequeued_total
            unsent = consumer.transport.get_write_buffer_size()
            client.kill()
            await until(lambda: not house.connections, "the end")
            held = house.held("q")
            assert read == FLOOD[: len(read)]
            assert held == FLOOD[-len(held) :]
            assert len(read) + len(held) <= len(FLOOD)
            # What had left when the client died does not come again. More may have left before
            # the broker's system had word of it, which is then lost like all that was sent.
            frame = len(FLOOD[0]) + 4
            assert given - house.queues.get("q").facts().dequeued_total <= -(-unsent // frame)

    run(scenario())


def test_consumers_that_are_killed_lose_and_double_nothing_for_those_who_stay() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            stays = await house.open("/queues/q/dequeue?format=binary")
            producer = await house.open("/queues/q/enqueue")
            for number in range(20):
                leaves = await house.open("/queues/q/dequeue?format=binary")
                leaves.kill()
                await until(lambda: len(house.connections) == 2, "it to be gone")
                await producer.send_binary(b"%d" % number)
                assert await stays.event() == (BINARY, b"%d" % number)
                await producer.json()

    run(scenario())


def test_a_producer_that_does_not_read_its_confirmations_is_not_read_from() -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=60, slow_s=0.2, close_s=0.05)
        async with House(times=times, capacity=10**9) as house:
            client = await house.open("/queues/q/enqueue")
            packet = encode_masked(BINARY, b"", os.urandom(4)) * 10_000

            async def flood() -> None:
                while True:
                    await client.send(packet)

            with pytest.raises(OSError):
                await flood()
            assert not house.connections

    run(scenario())


def test_a_client_that_pings_and_does_not_read_does_not_fill_the_memory() -> None:
    async def scenario() -> None:
        async with House(times=SocketTimes(3600, 3600, 3600)) as house:
            house.fill("q", FLOOD, is_json=False)
            client = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_paused, "the buffers to be full")
            await client.send(encode_masked(PING, b"x" * 125, b"abcd") * 10_000)
            # A helping with its heads, and not ten thousand pongs.
            assert consumer.transport.get_write_buffer_size() <= 1.1 * HELPING_BYTES_MAX
            client.kill()
            await until(lambda: not house.connections, "the end")

    run(scenario())


def test_a_queue_that_is_deleted_under_a_slow_consumer_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=60, slow_s=0.2, close_s=0.05)
        async with House(times=times) as house:
            house.fill("q", FLOOD, is_json=False)
            client = await house.open("/queues/q/dequeue?format=binary")
            (consumer,) = house.connections
            await until(lambda: consumer.is_paused, "the buffers to be full")
            house.queues.delete("q")
            house.fill("q", [b"of another queue"], is_json=False)
            await until(lambda: not house.connections, "the end")
            assert house.held("q") == [b"of another queue"]
            assert house.queues.bytes == len(b"of another queue")
            client.close()

    run(scenario())


def values(house: House) -> dict[tuple[str, ...], float]:
    """The metrics of WebSockets that are not zero."""
    return {
        (sample.name.removeprefix("millstream_websocket_"), *sample.labels.values()): sample.value
        for family in house.lane.metrics()
        for sample in family.samples
        if sample.name.startswith("millstream_websocket_") and sample.value
    }


def test_connections_messages_and_ends_are_counted() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("q", [b"1", b"2"])
            producer = await house.open("/queues/other/enqueue")
            await producer.send_text(b'{"payload":1}', b'{"payloads":[2,3]}', b"no message")
            for _ in range(3):
                await producer.json()
            consumer = await house.open("/queues/q/dequeue")
            for _ in range(2):
                await consumer.json()
            assert values(house) == {
                ("connections", "enqueue"): 1,
                ("connections", "dequeue"): 1,
                ("messages_received_total",): 3,
                ("messages_sent_total",): 2,
            }
            await producer.send_close()
            await consumer.send_text(b"hello")
            lost, big = [await house.open("/queues/q/enqueue") for _ in range(2)]
            lost.kill()
            await big.send(b"\x82\xff" + (10**9).to_bytes(8, "big"))
            for client in (producer, consumer, big):
                await client.closing()
            await consumer.send_close()
            big.close()
            await until(lambda: not house.connections, "all to be gone")
            gone = await house.open("/queues/q/dequeue")
            await until(lambda: house.queues.get("q").facts().waiting, "the consumer")
            house.queues.delete("q")
            await gone.closing()
            gone.close()
            await until(lambda: not house.connections, "all to be gone")
            found = values(house)
            del found["messages_received_total",], found["messages_sent_total",]
            reasons = ("client", "unsupported", "lost", "too_large", "queue_deleted")
            assert found == {("closed_total", reason): 1 for reason in reasons}

    run(scenario())
