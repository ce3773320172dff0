"""Each record has one report, and the report is true."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

from broker_process import BrokerProcess
from client.scripted import Answer, LossyProxy, Request, ScriptedServer, answer, run, until
from millstream.client import AsyncClient, Delivery, Place, Received
from millstream.client import producer as producer_module
from millstream.errors import (
    BodyInvalid,
    BrokerUnreachable,
    ClientClosed,
    HeaderInvalid,
    LaneUnknown,
    MessageTooLarge,
    MillstreamError,
    OutcomeUnknown,
    ParameterInvalid,
    PartitionUnknown,
    TopicUnknown,
)
from millstream.wire.batches import decode, walk
from millstream.wire.retry import RetryPolicy

FACTS = answer(
    200,
    b'{"name":"t","uuid":"x","partitions":1,"created_ms":0,"settings":{"partitioner":"murmur2"}}',
)
PLACED = answer(200, b'{"topic":"t","placed":[{"partition":0,"offset":40,"count":1}]}')


async def stored(client: AsyncClient, topic: str) -> dict[tuple[int, int], Received]:
    return {(one.partition, one.offset): one async for one in client.read(topic)}


def port_of(broker: BrokerProcess) -> int:
    return int(broker.url("").rpartition(":")[2])


# ---- against a broker


def test_a_report_says_where_its_record_is(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=3)
            sent: list[tuple[bytes | None, bytes | None, Delivery]] = []
            async with client.producer(batch_records=7) as producer:
                for number in range(200):
                    key = b"key-%d" % (number % 11) if number % 3 else None
                    value = b"value-%d" % number if number % 10 else None
                    delivery = await producer.send("t", value, key=key)
                    sent.append((key, value, delivery))
            found = await stored(client, "t")
            assert len(found) == 200
            for key, value, delivery in sent:
                place = await delivery
                record = found.pop((place.partition, place.offset))
                assert (record.key, record.value) == (key, value)
                assert record.timestamp_ms == place.timestamp_ms
            assert producer.statistics().delivered == 200

    run(scenario())


def test_records_of_one_key_keep_their_order_in_the_partition_the_broker_would_choose(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=5)
            by_broker = {
                key: (await client.publish("t", "first", key=key)).partition for key in "abcdefgh"
            }
            async with client.producer(batch_records=3) as producer:
                for number in range(100):
                    for key in by_broker:
                        await producer.send("t", b"%d" % number, key=key)
            values: dict[str, list[int]] = {key: [] for key in by_broker}
            async for record in client.read("t"):
                assert record.key is not None
                assert record.partition == by_broker[record.key.decode()]
                if record.value != b"first":
                    values[record.key.decode()].append(int(record.text))
            assert all(numbers == list(range(100)) for numbers in values.values())

    run(scenario())


def test_every_kind_of_value_comes_back_as_it_was(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            async with client.producer() as producer:
                await producer.send("t", {"a": [1, None]}, headers={"h": "x", "n": None})
                await producer.send("t", "tëxt", timestamp_ms=1234)
                await producer.send("t", bytearray(b"\xff\x00"), partition=0)
                await producer.send("t", None, key="k")
                for wrong in (object(), {1: object()}):
                    with pytest.raises(BodyInvalid):
                        await producer.send("t", wrong)
                with pytest.raises(HeaderInvalid):
                    await producer.send("t", b"", headers={"ms-type": "json"})
                for name in ("timestamp_ms", "partition"):
                    with pytest.raises(ParameterInvalid):
                        await producer.send("t", b"", **{name: -1})  # type: ignore[arg-type]
            one, two, three, four = [record async for record in client.read("t")]
            assert one.is_json
            assert one.json() == {"a": [1, None]}
            assert dict(one.headers)["h"] == b"x"
            assert dict(one.headers)["n"] is None
            assert (two.text, two.timestamp_ms, two.is_json) == ("tëxt", 1234, False)
            assert three.value == b"\xff\x00"
            assert (four.key, four.value) == (b"k", None)

    run(scenario())


def test_a_producer_a_publish_and_a_stream_store_the_same(broker: BrokerProcess) -> None:
    values = [date(2026, 1, 31), UUID(int=7), "text", b"\xff", None, True, 1.5, {"a": 1}, (1, "b")]

    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            async with client.producer() as producer, client.stream("t") as stream:
                for value in values:
                    await (await producer.send("t", value))
                    await client.publish("t", value)
                    await stream.publish(value)
                for wrong in (math.nan, "\ud800"):
                    for sending in (
                        producer.send("t", wrong),
                        client.publish("t", wrong),
                        stream.publish(wrong),
                    ):
                        with pytest.raises(BodyInvalid):
                            await sending
            found = [(one.value, one.is_json) async for one in client.read("t")]
        assert found[::3] == found[1::3] == found[2::3]
        assert found[0] == (b"2026-01-31", False)
        assert len(found) == 3 * len(values)

    run(scenario())


def test_a_topic_that_is_not_there_is_made_when_the_broker_makes_topics(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client, client.producer(batch_records=5) as made:
            sent = [await made.send("new", {"n": n}, key=f"k{n % 4}") for n in range(40)]
            places = [await one for one in sent]
            more = [await made.send("new", {"n": n}, key=f"k{n % 4}") for n in range(40, 80)]
            places += [await one for one in more]
            found = await stored(client, "new")
            assert len(found) == len(set(places)) == 80
            numbers = [found[place.partition, place.offset].json()["n"] for place in places]
            assert numbers == list(range(80))
            of_key = [one.json()["n"] for one in found.values() if one.key == b"k1"]
            assert of_key == sorted(of_key)

    run(scenario())


def test_what_the_broker_refuses_is_the_report(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with AsyncClient(url) as client, client.producer() as producer:
            with pytest.raises(TopicUnknown):
                await (await producer.send("none", b"x"))
            await client.topics.create("t", partitions=1)
            with pytest.raises(PartitionUnknown):
                await (await producer.send("t", b"x", partition=7))
            assert (await (await producer.send("t", b"x"))).offset == 0
            assert producer.statistics().failed == 2

    with BrokerProcess(str(tmp_path), "--topic-auto-create", "off") as broker:
        run(scenario(broker.wait_until_ready().url("")))


def test_a_topic_that_has_fewer_partitions_now_gets_all_that_named_none(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=8)
            async with client.producer(batch_records=7) as producer:
                before = [await producer.send("t", b"x", key=f"{n}") for n in range(64)]
                assert {(await one).partition for one in before} == set(range(8))
                await client.topics.delete("t")
                await client.topics.create("t", partitions=2)
                named = await producer.send("t", b"named", partition=6)
                sent = [
                    (await producer.send("t", b"%d" % n, key=f"{n % 16}", lane=1), n)
                    for n in range(256)
                ]
                sent += [(await producer.send("t", b"%d" % n), n) for n in range(256, 300)]
                mixed = [
                    await producer.send("t", b"mixed", key="a", partition=5 if n % 2 else None)
                    for n in range(6)
                ]
                places = [((await one)[:2], n) for one, n in sent]
                for failing in (named, *mixed[1::2]):
                    assert isinstance(await _error(failing), PartitionUnknown)
                assert len({await one for one in mixed[::2]}) == 3
                statistics = producer.statistics()
            found = await stored(client, "t")
            assert all(found[place].value == b"%d" % n for place, n in places)
            assert len(found) == len(places) + 3
            assert (statistics.waiting, statistics.waiting_bytes) == (0, 0)
            assert (statistics.delivered, statistics.failed) == (64 + 303, 4)

    run(scenario())


async def _error(delivery: Delivery) -> MillstreamError | None:
    with suppress(MillstreamError):
        await delivery
    return delivery.exception()


def test_partitions_that_are_added_are_used_soon(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "FRESH_S", 0.05)

    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client, client.producer() as producer:
            await client.topics.create("t", partitions=1)
            assert (await (await producer.send("t", b"x", key="a"))).partition == 0
            await client.topics.add_partitions("t", 50)
            chosen = (await client.publish("t", b"x", key="a")).partition
            assert chosen != 0
            async with asyncio.timeout(20):
                while (await (await producer.send("t", b"x", key="a"))).partition != chosen:
                    pass

    run(scenario())


def test_a_record_that_is_too_large_fails_alone(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create(
                "t", partitions=1, settings={"message_bytes_max": 1000, "segment_bytes": "64K"}
            )
            async with client.producer(batch_bytes=4 * 2**20) as producer:
                sizes = [10] * 20 + [3 * 2**20] + [10] * 20
                sent = [await producer.send("t", b"x" * size) for size in sizes]
            for size, delivery in zip(sizes, sent, strict=True):
                error = delivery.exception()
                assert (error is None) == (size == 10), error
            assert len(await stored(client, "t")) == 40

    run(scenario())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_record_that_is_too_large_is_named(broker: BrokerProcess, is_there: bool) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            if is_there:
                await client.topics.create("t", partitions=1)
            async with client.producer(batch_bytes=8 * 2**20) as producer:
                before = await producer.send("t", b"small")
                sent = await producer.send(
                    "t", b"x" * (3 * 2**20), key=b"huge" + b"y" * 200, headers={"name": b"four"}
                )
                after = await producer.send("t", b"small")
            assert (before.exception(), after.exception()) == (None, None)
            error = sent.exception()
            assert isinstance(error, MessageTooLarge)
            assert error.fields["topic"] == "t"
            assert error.fields["partition"] == (0 if is_there else None)
            assert error.fields["record_bytes"] == 3 * 2**20 + 204 + 8
            assert error.fields["limit_bytes"] in range(2**20, 2**20 + 1000)
            key, dots = repr(b"huge" + b"y" * 96), "the record with the key "
            assert dots + key + " for t" in error.message
            assert ("`message_bytes_max`" in error.message) == is_there

    run(scenario())


@pytest.mark.parametrize("acks", ["none", "leader"])
def test_acks_that_do_not_wait_for_everything_store_all_the_same(
    broker: BrokerProcess, acks: Literal["none", "leader"]
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            # The first goes before the topic is there.
            async with client.producer(acks=acks) as producer:
                places = [await (await producer.send("t", b"%d" % n)) for n in range(3)]
            assert [place.offset < 0 for place in places] == [acks == "none"] * 3
            async with asyncio.timeout(60):
                while len(await stored(client, "t")) < 3:  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.01)

    run(scenario())


@pytest.mark.parametrize(
    "options",
    [
        {"batch_records": 0},
        {"linger_ms": -1},
        {"delivery_timeout_s": float("nan")},
        {"acks": "some"},
        {"compression": "rar"},
    ],
)
def test_a_producer_that_cannot_work_is_not_made(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with AsyncClient("http://127.0.0.1:1") as client:
            with pytest.raises(ParameterInvalid) as caught:
                client.producer(**options)
            assert [caught.value.fields["parameter"]] == list(options)

    run(scenario())


def test_a_single_record_does_not_wait_for_others(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client, client.producer() as producer:
            delivery = await producer.send("t", b"alone")
            assert isinstance(await delivery, Place)
            await producer.flush()
            assert producer.statistics().waiting == 0

    run(scenario())


def test_answers_that_get_lost_store_nothing_twice(broker: BrokerProcess) -> None:
    """Requests and answers are lost at random; every record is there once, in order."""
    chance = random.Random(7)

    def plan(request: Request) -> str | None:
        if not request.path.endswith("/batches") or chance.random() < 0.6:
            return None
        return chance.choice(["request", "answer", "half"])

    async def scenario() -> None:
        async with LossyProxy(port_of(broker), plan) as proxy:
            async with AsyncClient(proxy.url) as client:
                await client.topics.create("t", partitions=2)
                async with client.producer(batch_records=10) as producer:
                    sent = [await producer.send("t", b"%d" % n) for n in range(400)]
                places = [delivery.result() for delivery in sent]
            assert len(proxy.lost) > 10
            assert producer.statistics().retries >= len(proxy.lost)
        async with AsyncClient(broker.url("")) as client:
            found = await stored(client, "t")
        assert len(found) == 400
        assert [found[place.partition, place.offset].value for place in places] == [
            b"%d" % n for n in range(400)
        ]

    run(scenario())


def test_reports_are_true_when_the_broker_is_killed(tmp_path: Path) -> None:
    """Killed again and again under load: all that was reported is there, once."""

    async def scenario() -> None:
        broker = BrokerProcess(str(tmp_path)).wait_until_ready()
        port = port_of(broker)
        sent: list[Delivery] = []
        is_over = False

        async def load(client: AsyncClient) -> None:
            async with client.producer(batch_records=10, buffer_bytes=20_000) as producer:
                while not is_over:
                    sent.append(await producer.send("t", b"%d" % len(sent)))

        try:
            async with AsyncClient(broker.url("")) as client:
                await client.topics.create("t", partitions=3)
                loading = asyncio.ensure_future(load(client))
                for _ in range(3):
                    goal = len(sent) + 300
                    await until(lambda: len(sent) > goal, "records")  # noqa: B023  read at once
                    broker.process.kill()
                    broker.process.wait()
                    broker = await asyncio.to_thread(
                        BrokerProcess, str(tmp_path), "--http", f"127.0.0.1:{port}"
                    )
                goal = len(sent) + 300
                await until(lambda: len(sent) > goal, "records")
                is_over = True
                await loading
                found = await stored(client, "t")
        finally:
            broker.process.kill()
            broker.process.wait()
        values = [found[place.partition, place.offset].value for place in map(_place, sent)]
        assert values == [b"%d" % number for number in range(len(sent))]
        assert len(found) == len(sent)

    run(scenario())


def _place(delivery: Delivery) -> Place:
    return delivery.result()


# ---- against a server that does what brokers seldom do


class Scripted:
    """Answers the topic's facts, and batches by a list of answers."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.batches: list[bytes] = []

    async def __call__(self, request: Request) -> Answer:
        if request.method == "GET":
            return FACTS
        self.batches.append(request.body)
        if not self.answers:
            await asyncio.Event().wait()
        return self.answers.pop(0)

    def numbers(self) -> list[tuple[int, int]]:
        """Producer id and sequence of each batch that came."""
        headers = [walk(body)[0][1] for body in self.batches]
        return [(header.producer_id, header.base_sequence) for header in headers]


async def deliver(
    script: Scripted, *values: bytes, **options: float | str
) -> list[MillstreamError | Place]:
    async with ScriptedServer(script) as server, AsyncClient(server.url, answer_s=20) as client:
        producer = client.producer(batch_records=1, **options)  # type: ignore[arg-type]
        quick = RetryPolicy(producer._options.retry.timeout_s, pause_s=0.001, pause_s_max=0.01)
        producer._options = producer._options._replace(retry=quick)
        async with producer:
            sent = [await producer.send("t", value) for value in values]
        return [one.exception() or one.result() for one in sent]


def test_a_busy_broker_is_asked_again_with_the_same_number() -> None:
    busy = answer(429, b'{"error":"engine_busy","message":"later"}', retry_after="0")
    gone = answer(503, b'{"error":"engine_stopped","message":"later"}')
    script = Scripted([busy, gone, None, PLACED])
    assert run(deliver(script, b"x")) == [Place(0, 40, _timestamp(script))]
    assert len(set(script.numbers())) == 1
    assert len(script.batches) == 4


def test_numbers_go_on_from_batch_to_batch() -> None:
    script = Scripted([PLACED, PLACED, PLACED])
    run(deliver(script, b"x", b"y", b"z"))
    assert [sequence for _, sequence in script.numbers()] == [0, 1, 2]
    assert len({producer_id for producer_id, _ in script.numbers()}) == 1


def test_a_batch_that_was_refused_leaves_no_gap() -> None:
    refused = answer(400, b'{"error":"batch_invalid","message":"no"}')
    script = Scripted([refused, PLACED])
    first, second = run(deliver(script, b"x", b"y"))
    assert isinstance(first, MillstreamError)
    assert first.code == "batch_invalid"
    assert isinstance(second, Place)
    assert [sequence for _, sequence in script.numbers()] == [0, 0]


def test_without_acks_batches_have_no_number_and_a_doubtful_one_is_not_sent_again() -> None:
    script = Scripted([None, PLACED])
    first, second = run(deliver(script, b"x", b"y", acks="none"))
    assert isinstance(first, OutcomeUnknown)
    assert isinstance(second, Place)
    assert script.numbers() == [(-1, -1), (-1, -1)]


def test_a_broker_that_lost_what_came_before_gets_a_new_producer_id() -> None:
    out_of_order = answer(409, b'{"error":"sequence_out_of_order","message":"a gap"}')
    script = Scripted([PLACED, out_of_order, PLACED])
    assert all(isinstance(one, Place) for one in run(deliver(script, b"x", b"y")))
    first, second, third = script.numbers()
    assert first[0] == second[0] != third[0]
    assert third[1] == 0
    assert [record.value for record in decode(script.batches[2])] == [b"y"]


def test_giving_up_says_whether_it_may_be_stored() -> None:
    async def cut(request: Request) -> Answer:
        return FACTS if request.method == "GET" else None

    async def scenario() -> None:
        async with ScriptedServer(cut) as server, AsyncClient(server.url) as client:
            producer = client.producer(delivery_timeout_s=0.2)
            unknown = await producer.send("t", b"x")
            with pytest.raises(OutcomeUnknown):
                await unknown
            server._server.close()
            refused = await producer.send("t", b"y")
            with pytest.raises(BrokerUnreachable):
                await refused
            assert producer.statistics().failed == 2
            await producer.close()

    run(scenario())


def test_what_has_no_report_is_bounded_and_send_waits() -> None:
    async def scenario() -> None:
        script = Scripted([])
        async with ScriptedServer(script) as server, AsyncClient(server.url) as client:
            producer = client.producer(buffer_bytes=50_000)
            sent: list[Delivery] = []

            async def flood() -> None:
                while True:
                    sent.append(await producer.send("t", b"x" * 900))

            flooding = asyncio.ensure_future(flood())
            await until(lambda: producer.statistics().waiting_bytes > 49_000, "a full buffer")
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(sent) == producer.statistics().waiting == 50
            assert producer.statistics().waiting_bytes == 50_000
            # One that nobody waits for any more takes no room.
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
            script.answers.append(PLACED)
            await producer.close(timeout_s=0.05)
            assert producer.statistics().waiting_bytes == 0
            kinds = {type(delivery.exception()) for delivery in sent}
            assert kinds <= {OutcomeUnknown, ClientClosed, type(None)}
            with pytest.raises(ClientClosed):
                await producer.send("t", b"late")

    run(scenario())


def test_a_full_buffer_does_not_wait_until_batches_are_old() -> None:
    async def scenario() -> None:
        script = Scripted([PLACED] * 100)
        async with ScriptedServer(script) as server, AsyncClient(server.url) as client:
            async with client.producer(buffer_bytes=5_000, linger_ms=100_000) as producer:
                async with asyncio.timeout(20):
                    for _ in range(30):
                        await producer.send("t", b"x" * 900)
                    await asyncio.gather(*(producer.send("t", b"x" * 900) for _ in range(30)))
                    await producer.flush()
            assert producer.statistics().delivered == 60

    run(scenario())


def test_what_was_stored_nobody_knows_where_is_not_said_to_be_not_stored() -> None:
    duplicate = answer(409, b'{"error":"sequence_duplicate","message":"written before"}')
    script = Scripted([duplicate, PLACED])
    first, second = run(deliver(script, b"x", b"y"))
    assert isinstance(first, OutcomeUnknown)
    assert isinstance(second, Place)
    (doubtful, _), (renewed, sequence) = script.numbers()
    assert doubtful != renewed
    assert sequence == 0


def test_a_record_larger_than_the_buffer_goes_alone() -> None:
    script = Scripted([PLACED, PLACED])
    done = run(deliver(script, b"x" * 5000, b"y" * 5000, buffer_bytes=1000))
    assert all(isinstance(one, Place) for one in done)


def test_waiting_for_one_report_can_be_given_up_without_harm() -> None:
    async def scenario() -> None:
        script = Scripted([])
        async with ScriptedServer(script) as server, AsyncClient(server.url) as client:
            producer = client.producer()
            delivery = await producer.send("t", b"x")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_wait(delivery), 0.05)
            assert not delivery.done()
            await producer.close(timeout_s=0.05)
            with pytest.raises((OutcomeUnknown, MessageTooLarge)):
                await delivery

    run(scenario())


async def _wait(delivery: Delivery) -> Place:
    return await delivery


def _timestamp(script: Scripted) -> int:
    return walk(script.batches[0])[0][1].base_timestamp


# ---- lanes


async def lanes_of(client: AsyncClient, topic: str, partition: int) -> dict[bytes, str | None]:
    """Value → lane, as the bytes on disk have it."""
    reply = await client._transport.ask("GET", f"/v1/topics/{topic}/partitions/{partition}/batches")
    found: dict[bytes, str | None] = {}
    for at, header in walk(reply.body):
        for record in decode(reply.body[at : at + header.size]):
            assert record.lane == header.lane
            found[record.value or b""] = record.lane
    return found


@pytest.mark.parametrize("is_made", [True, False])
def test_a_producer_sends_each_lane_in_batches_of_its_own(
    broker: BrokerProcess, is_made: bool
) -> None:
    lanes = ("critical", None, "background", "high", 3)

    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            if is_made:
                await client.topics.create("t", partitions=2)
            sent: dict[bytes, Delivery] = {}
            async with client.producer(batch_records=7) as producer:
                for number in range(100):
                    value = b"%d" % number
                    sent[value] = await producer.send("t", value, lane=lanes[number % 5])
                with pytest.raises(LaneUnknown):
                    await producer.send("t", b"", lane="urgent")
            places = {value: await delivery for value, delivery in sent.items()}
            assert len({place[:2] for place in places.values()}) == 100
            count = (await client.topics.describe("t")).partitions
            found: dict[bytes, str | None] = {}
            for partition in range(count):
                found |= await lanes_of(client, "t", partition)
            names = ("critical", None, "background", "high", "low")
            assert found == {b"%d" % number: names[number % 5] for number in range(100)}

    run(scenario())


def test_one_call_publishes_into_a_lane(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await client.topics.publish("t", b"a", lane="high")
            await client.publish("t", b"b", lane=4)
            await client.topics.publish_many("t", [{"value": b"c", "lane": "low"}])
            assert await lanes_of(client, "t", 0) == {b"a": "high", b"b": "background", b"c": "low"}

    run(scenario())
