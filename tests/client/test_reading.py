"""Reading by offset and time, streams, and the administration of topics and groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess
from client.scripted import LossyProxy, Request, run, until
from millstream.client import AsyncClient, Client, Received, reading
from millstream.errors import (
    ClientClosed,
    GroupUnknown,
    IdempotencyKeyInvalid,
    OffsetOutOfRange,
    OutcomeUnknown,
    ParameterInvalid,
    StreamClosed,
    TopicExists,
    TopicUnknown,
)


def test_a_read_begins_where_it_is_told_and_ends_at_the_end(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            assert [one async for one in client.read("t")] == []
            async with client.producer(batch_records=7) as producer:
                for number in range(100):
                    await producer.send("t", b"%d" % number, timestamp_ms=1000 + number)

            async def texts(**start: Any) -> list[str]:
                return [one.text async for one in client.read("t", **start)]

            everything = [str(number) for number in range(100)]
            assert await texts() == everything
            # In the middle of a batch.
            assert await texts(offset=31) == everything[31:]
            assert await texts(partition=0, offset=100) == []
            assert await texts(offset="latest") == []
            assert await texts(time_ms=1050) == everything[50:]
            assert await texts(time_ms=5000) == []
            assert await texts(last=3) == everything[-3:]
            with pytest.raises(OffsetOutOfRange):
                await texts(offset=101)
            with pytest.raises(ParameterInvalid):
                await texts(offset=1, last=3)
            with pytest.raises(TopicUnknown):
                await anext(aiter(client.read("none")))
            await client.topics.create("wide", partitions=2)
            with pytest.raises(ParameterInvalid):
                await anext(aiter(client.read("wide", offset=1)))

    run(scenario())


def test_a_read_follows_through_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        broker = BrokerProcess(str(tmp_path)).wait_until_ready()
        try:
            async with AsyncClient(broker.url("")) as client:
                await client.topics.create("t", partitions=3)
                for number in range(5):
                    await client.publish("t", number)
                found: list[Received] = []

                async def follow() -> None:
                    async for record in client.read("t", follow=True, patience_s=60):
                        found.append(record)  # noqa: PERF401  looked at while it grows

                following = asyncio.ensure_future(follow())
                await until(lambda: len(found) == 5, "what is there")
                await client.publish("t", 5)
                await until(lambda: len(found) == 6, "what comes")
                address = broker.url("").removeprefix("http://")
                broker.process.kill()
                broker.process.wait()
                broker = await asyncio.to_thread(BrokerProcess, str(tmp_path), "--http", address)
                await client.publish("t", 6)
                await until(lambda: len(found) == 7, "what comes after the restart")
                assert sorted(record.json() for record in found) == list(range(7))
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        finally:
            broker.process.kill()
            broker.process.wait()

    run(scenario())


def test_who_follows_all_partitions_reads_those_that_are_added(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "GROW_S", 0.2)

    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            found: list[str] = []
            alone: list[str] = []

            async def follow(into: list[str], **where: Any) -> None:
                async for record in client.read("t", follow=True, **where):
                    into.append(record.text)  # noqa: PERF401  looked at while it grows

            tasks = [
                asyncio.ensure_future(follow(found, offset="latest")),
                asyncio.ensure_future(follow(alone, partition=0)),
            ]
            await client.publish("t", "before", partition=0)
            await until(lambda: alone == ["before"], "what the only partition has")
            await client.topics.add_partitions("t", 3)
            await client.publish("t", "in the third", partition=2)
            await until(lambda: "in the third" in found, "what came in a partition that was added")
            await client.topics.add_partitions("t", 4)
            await client.publish("t", "in the fourth", partition=3)
            await client.publish("t", "after", partition=0)
            await until(lambda: {"in the fourth", "after"} <= set(found), "what came then")
            await until(lambda: alone == ["before", "after"], "only what it asked for")
            assert len(found) == len(set(found))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_an_open_stream_gets_the_records_of_partitions_that_are_added(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            async with client.stream("t") as stream:
                await stream.open()
                await client.topics.add_partitions("t", 2)
                await client.publish("t", "new", partition=1)
                async with asyncio.timeout(10):
                    record = await anext(stream)
                assert (record.partition, record.text) == (1, "new")
                await stream.ack(record)

    run(scenario())


def test_a_stream_publishes_reads_in_order_and_goes_on_where_it_was(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            async with client.stream("t") as stream:
                places = await asyncio.gather(*(stream.publish({"n": n}) for n in range(300)))
                assert [place.offset for place in places] == list(range(300))
                consumer_id = await stream.open(credit=10)
                taken = [await anext(stream) for _ in range(100)]
                assert [record.json()["n"] for record in taken] == list(range(100))
                await stream.ack(taken[69])
            async with client.stream("t") as stream:
                assert await stream.open(consumer_id) == consumer_id
                assert (await anext(stream)).json() == {"n": 70}
            with pytest.raises(StreamClosed):
                await anext(stream)
            async with client.stream("t") as stream:
                await stream.open(partition=0, start=297)
                assert (await anext(stream)).json() == {"n": 297}
            with pytest.raises(TopicUnknown):
                async with client.stream("none"):
                    raise AssertionError

    run(scenario())


def test_topics_and_groups_are_managed(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            made = await client.topics.create(
                "t", partitions=2, settings={"retention_ms": "1d", "fsync": "none"}
            )
            assert (made.partitions, made.settings["retention_ms"]) == (2, 86_400_000)
            with pytest.raises(TopicExists):
                await client.topics.create("t")
            changed = await client.topics.alter("t", {"retention_ms": None, "fsync": "every"})
            assert changed.settings["fsync"] == "every"
            assert (await client.topics.add_partitions("t", 4)).partitions == 4
            with pytest.raises(IdempotencyKeyInvalid):
                await client.publish("t", 1, idempotency_key="")
            placed = await client.topics.publish_many(
                "t", [{"value": "x", "partition": 3}, {"value": b"\xff", "partition": 3}]
            )
            assert [place.offset for place in placed] == [0, 1]
            first = await client.publish("t", "y", idempotency_key="one", partition=0)
            assert await client.publish("t", "y", idempotency_key="one", partition=1) == first
            ends = {one.partition: one.end for one in await client.topics.offsets("t")}
            assert ends == {0: 1, 1: 0, 2: 0, 3: 2}
            assert [topic.name for topic in await client.topics.list()] == ["t"]
            async with client.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
                for _ in range(3):
                    await anext(consumer)
            assert [group.group for group in await client.groups.list()] == ["g"]
            moved = await client.groups.reset("g", "t", "earliest", partitions=[3])
            assert [(one.partition, one.before, one.after) for one in moved] == [(3, 2, 0)]
            assert (await client.groups.lag("g")).messages == 2
            await client.topics.purge("t")
            assert (await client.topics.describe("t")).details[3].start == 2
            await client.groups.delete("g")
            with pytest.raises(GroupUnknown):
                await client.groups.describe("g")
            await client.topics.delete("t")
            assert await client.topics.list() == []

    run(scenario())


@pytest.mark.parametrize("verb", ["purge", "delete"])
def test_what_removes_records_is_asked_once_when_its_answer_got_lost(
    broker: BrokerProcess, verb: str
) -> None:
    def plan(request: Request) -> str | None:
        is_removing = request.method == "DELETE" or request.path.endswith("/purge")
        return "answer" if is_removing else None

    async def scenario() -> None:
        port = int(broker.url("").rpartition(":")[2])
        async with LossyProxy(port, plan) as proxy, AsyncClient(proxy.url) as client:
            await client.topics.create("t", partitions=1)
            with pytest.raises(OutcomeUnknown):
                await (client.topics.purge if verb == "purge" else client.topics.delete)("t")
            assert proxy.lost == ["answer"]

    run(scenario())


def test_the_blocking_face_has_topics_too(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=2)
        assert client.publish("t", {"n": -1}, partition=0).offset == 0
        with client.producer(batch_records=10) as producer:
            reports = [producer.send("t", {"n": number}) for number in range(500)]
            producer.flush()
            assert all(report.done() for report in reports)
        places = {report.result()[:2] for report in reports}
        assert len(places) == 500
        assert producer.statistics().delivered == 500
        with pytest.raises(ClientClosed):
            producer.send("t", b"late")
        assert len(list(client.read("t"))) == 501
        with client.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
            found = []
            for record in consumer:
                found.append(record.json()["n"])
                if len(found) == 501:
                    break
        assert sorted(found) == list(range(-1, 500))
        assert client.groups.lag("g").messages == 0
        with client.stream("t") as stream:
            stream.publish({"n": 500})
            stream.open()
            stream.ack(next(stream))
        assert client.topics.describe("t").partitions == 2
    with pytest.raises(ClientClosed):
        client.topics.list()


def test_a_blocking_producer_hands_over_no_more_than_there_is_room_for(
    broker: BrokerProcess,
) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        with client.producer(buffer_bytes=200_000) as producer:
            value = b"x" * 100_000
            reports = [producer.send("t", value) for _ in range(60)]
            assert producer._handed_bytes <= 3_000_000
        assert [report.result().offset for report in reports] == list(range(60))


def test_a_client_that_is_closed_delivers_first(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        producer = client.producer(linger_ms=60_000)
        report = producer.send("t", b"x")
    assert report.result(timeout_s=0).offset == 0
    with pytest.raises(ClientClosed):
        producer.flush()

    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            delivery = await client.producer(linger_ms=60_000).send("u", b"x")
        assert delivery.result().offset == 0

    run(scenario())
