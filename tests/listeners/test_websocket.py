"""Queues over WebSocket, on real sockets: messages in, messages out."""

from __future__ import annotations

import json

import pytest

from listeners.websocket_client import House, run
from millstream.wire.frames import BINARY, PING, PONG, TEXT, encode_masked


def test_each_message_is_confirmed_in_order() -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.open("/queues/emails/enqueue")
            await client.send_json(*range(100))
            for number in range(100):
                answer = await client.json()
                assert answer.pop("enqueued_at") > 1_600_000_000_000_000
                assert answer == {"queued": True, "queue_name": "emails", "queue_size": number + 1}
            assert house.held("emails") == [b"%d" % number for number in range(100)]

    run(scenario())


def test_a_full_queue_is_answered_and_the_connection_goes_on() -> None:
    async def scenario() -> None:
        async with House(capacity=2) as house:
            client = await house.open("/queues/q/enqueue")
            await client.send_json(1, 2, 3)
            answers = [await client.json() for _ in range(3)]
            assert [answer.get("queued") for answer in answers] == [True, True, None]
            assert answers[2]["error"] == "queue_full"
            assert answers[2]["queue_capacity"] == 2
            house.queues.clear(house.queues.get("q"))
            await client.send_json(4)
            assert (await client.json())["queued"] is True

    run(scenario())


def test_a_batch_frame_is_taken_whole_or_not_at_all() -> None:
    async def scenario() -> None:
        async with House(capacity=3) as house:
            client = await house.open("/queues/q/enqueue")
            await client.send_text(b'{"payloads":[1,"two"]}', b'{"payloads":[3,4]}')
            answer = await client.json()
            assert (answer["queued"], answer["queue_size"]) == (2, 2)
            assert (await client.json())["error"] == "queue_full"
            assert house.held("q") == [b"1", b'"two"']

    run(scenario())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"payload":1,"payloads":[2]}',
        b'{"payloads":5}',
        b'{"payload":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_text_of_the_wrong_form_is_answered_and_the_connection_goes_on(text: bytes) -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.open("/queues/q/enqueue")
            await client.send_text(text, b'{"payload":null}')
            assert (await client.json())["error"] == "body_invalid"
            assert (await client.json())["queue_size"] == 1
            assert house.held("q") == [b"null"]

    run(scenario())


def test_a_binary_frame_is_one_raw_message() -> None:
    async def scenario() -> None:
        async with House() as house:
            producer = await house.open("/queues/q/enqueue")
            await producer.send_binary(b"\x00\xff raw")
            assert (await producer.json())["queue_size"] == 1
            await producer.send_json({"a": 1})
            await producer.json()
            consumer = await house.open("/queues/q/dequeue?format=binary")
            assert await consumer.event() == (BINARY, b"\x00\xff raw")
            assert await consumer.event() == (BINARY, b'{"a": 1}')

    run(scenario())


def test_messages_come_in_order_as_long_as_the_client_stays() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("q", [b"%d" % number for number in range(50)])
            consumer = await house.open("/queues/q/dequeue")
            producer = await house.open("/queues/q/enqueue")
            for number in range(50):
                assert (await consumer.json())["payload"] == number
            for number in range(50):
                await producer.send_json({"n": number})
                message = await consumer.json()
                assert message.pop("enqueued_at") > 1_600_000_000_000_000
                assert message == {"payload": {"n": number}, "queue_name": "q"}
            assert house.queues.get("q").facts().dequeued_total == 100

    run(scenario())


def test_raw_messages_come_as_base64_in_json() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("q", [b"\xff\x00"], is_json=False)
            consumer = await house.open("/queues/q/dequeue")
            message = await consumer.json()
            assert (message["payload"], message["encoding"]) == ("/wA=", "base64")

    run(scenario())


def test_batch_frames_have_at_most_so_many_messages() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("q", [b"%d" % number for number in range(25)])
            consumer = await house.open("/queues/q/dequeue?max=10")
            found: list[int] = []
            while len(found) < 25:
                frame = await consumer.json()
                assert frame["queue_name"] == "q"
                assert len(frame["messages"]) <= 10
                found += [message["payload"] for message in frame["messages"]]
            assert found == list(range(25))

    run(scenario())


def test_many_consumers_share_a_burst_evenly() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            consumers = [await house.open("/queues/q/dequeue") for _ in range(8)]
            house.fill("q", [b"%d" % number for number in range(800)])
            found: list[int] = []
            for consumer in consumers:
                share = [(await consumer.json())["payload"] for _ in range(100)]
                assert share == sorted(share)
                found += share
            assert sorted(found) == list(range(800))

    run(scenario())


def test_many_consumers_take_single_messages_in_turn() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            consumers = [await house.open("/queues/q/dequeue") for _ in range(4)]
            producer = await house.open("/queues/q/enqueue")
            for number in range(40):
                await producer.send_json(number)
                assert (await consumers[number % 4].json())["payload"] == number
                await producer.json()

    run(scenario())


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_packets_may_be_cut_anywhere(step: int) -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.raw()
            key = b"\x11\x22\x33\x44"
            long = json.dumps({"payload": "x" * 200}).encode()
            stream = client.request("/queues/q/enqueue") + b"".join(
                (
                    encode_masked(TEXT, b'{"payload"', key, is_final=False),
                    encode_masked(PING, b"between", key),
                    encode_masked(0, b":1}", key),
                    encode_masked(TEXT, long, key),
                    encode_masked(BINARY, b"", key),
                )
            )
            for at in range(0, len(stream), step):
                await client.send(stream[at : at + step])
            await client.shake_hands()
            assert await client.event() == (PONG, b"between")
            for size in (1, 2, 3):
                assert (await client.json())["queue_size"] == size
            assert house.held("q") == [b"1", b'"' + b"x" * 200 + b'"', b""]

    run(scenario())


def test_frames_that_come_with_the_request_are_not_lost() -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.raw()
            frame = encode_masked(TEXT, b'{"payload":1}', b"abcd")
            await client.send(client.request("/queues/q/enqueue") + frame)
            await client.shake_hands()
            assert (await client.json())["queued"] is True

    run(scenario())


def test_a_connection_may_be_upgraded_after_other_requests() -> None:
    async def scenario() -> None:
        async with House() as house:
            client = await house.raw()
            post = b"POST /enqueue HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"
            await client.send(post)
            answer = await client.read_until(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 202 ")
            await client.send(client.request("/queues/default/dequeue?format=binary"))
            await client.shake_hands()
            assert await client.event() == (BINARY, b"hi")

    run(scenario())


def test_an_upgrade_to_something_else_is_a_request_like_any() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.fill("default", [b"one", b"two", b"three"], is_json=False)
            client = await house.raw()
            plain = b"GET /dequeue HTTP/1.1\r\nHost: localhost\r\n"
            upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            await client.send(plain + b"\r\n" + plain + upgrade + b"\r\n" + plain + b"\r\n")
            answer = await client.read_until(b"three")
            assert answer.count(b"HTTP/1.1 200 OK") == 3
            assert answer.index(b"one") < answer.index(b"two") < answer.index(b"three")

    run(scenario())
