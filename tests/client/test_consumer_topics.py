"""Topics that go, or are made again, under a member that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from client.scripted import run, until
from millstream.client import AsyncClient, Consumer, Received
from millstream.client.membership import Joined, JoinOptions, Membership, Polled, Standing
from millstream.client.transport import Transport
from millstream.errors import TopicUnknown
from millstream.wire.retry import RetryPolicy


async def fill(client: AsyncClient, topic: str, *values: str) -> None:
    async with client.producer() as producer:
        for value in values:
            await producer.send(topic, value)


async def take(consumer: Consumer, count: int) -> list[str]:
    found: list[Received] = []
    while len(found) < count:
        found += await consumer.take(count - len(found), timeout_s=30)
    return [one.text for one in found]


async def offsets(client: AsyncClient, group: str = "g") -> dict[str, int]:
    return {one.topic: one.offset for one in await client.groups.offsets(group)}


async def make_again(client: AsyncClient, topic: str, consumer: Consumer, *values: str) -> None:
    """Until the consumer has heard of it."""
    before = consumer.statistics().generation
    await client.topics.delete(topic)
    await client.topics.create(topic, partitions=1)
    await fill(client, topic, *values)
    await until(
        lambda: consumer.statistics().generation > before and (topic, 0) in consumer.assignment,
        "the consumer to hear of the new topic",
    )


@asynccontextmanager
async def five_records(broker: BrokerProcess) -> AsyncIterator[tuple[AsyncClient, Consumer]]:
    """A topic that has them, and who reads it from its start."""
    async with AsyncClient(broker.url("")) as client:
        await client.topics.create("x", partitions=1)
        await fill(client, "x", *"abcde")
        async with client.consumer(
            "x", group="g", commit="manual", auto_offset_reset="earliest"
        ) as consumer:
            yield client, consumer


def test_what_was_done_in_a_topic_is_not_committed_in_one_made_again(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with five_records(broker) as (client, consumer):
            assert await take(consumer, 5) == list("abcde")
            # Done, as far as the consumer knows; and then in hand, which is as good.
            assert await consumer.take(1, timeout_s=0) == []
            await make_again(client, "x", consumer, *"ABCDEFGH")
            await consumer.commit()
            assert await offsets(client) == {"x": 0}
            assert await take(consumer, 3) == list("ABC")
            await consumer.commit()
            assert await offsets(client) == {"x": 3}

    run(scenario())


def test_a_commit_in_the_old_topic_does_not_keep_one_in_the_new_from_being_made(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with five_records(broker) as (client, consumer):
            await take(consumer, 5)
            await consumer.commit()
            assert await offsets(client) == {"x": 5}
            await make_again(client, "x", consumer, *"ABC")
            assert await take(consumer, 2) == list("AB")
            await consumer.commit()
            assert await offsets(client) == {"x": 2}

    run(scenario())


def test_records_of_a_topic_made_again_are_all_new_ones(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with five_records(broker) as (client, consumer):
            await until(lambda: consumer.statistics().buffered == 5, "records ahead")
            # Two are in hand, three wait.
            assert await take(consumer, 2) == list("ab")
            await make_again(client, "x", consumer, *"ABC")
            assert await take(consumer, 2) == list("AB")
            await consumer.commit()
            assert await offsets(client) == {"x": 2}

    run(scenario())


class LateBroker(Membership):
    """Answers the first poll only when the topic was deleted and made again since."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport, "g", RetryPolicy())
        self.polls = 0
        self.is_told = asyncio.Event()
        self.has_polled_again = asyncio.Event()

    def standing(self, generation: int) -> Standing:
        both = frozenset({("x", 0), ("y", 0)})
        return Standing("m", generation, both, frozenset(), {"x": f"x{generation}", "y": "y"})

    async def join(self, options: JoinOptions, member_id: str | None) -> Joined:
        return Joined(self.standing(1), 0.001)

    async def heartbeat(self, member_id: str, generation: int) -> Standing:
        self.is_told.set()
        return self.standing(2)

    async def poll(self, member_id: str, generation: int, **how: object) -> Polled:
        self.polls += 1
        if self.polls > 1:
            self.has_polled_again.set()
            await asyncio.Event().wait()
        await self.is_told.wait()
        # The consumer hears of the new topic before it hears of these.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        records = [Received(topic, 0, 7, 0, None, topic.encode()) for topic in ("x", "y")]
        return Polled(self.standing(1), 1, records)

    async def leave(self, member_id: str, generation: int, retry: RetryPolicy) -> None:
        pass


def test_an_answer_from_before_a_topic_was_made_again_brings_none_of_its_records() -> None:
    async def scenario() -> None:
        async with AsyncClient("http://127.0.0.1:1") as client:
            consumer = client.consumer(["x", "y"], group="g", commit="manual")
            late = consumer._membership = LateBroker(client._transport)
            async with consumer:
                await late.has_polled_again.wait()
                assert [one.text for one in await consumer.take(5, timeout_s=0)] == ["y"]

    run(scenario())


def test_a_deleted_topic_keeps_no_other_from_being_read_and_committed(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            for topic in ("gone", "stays"):
                await client.topics.create(topic, partitions=1)
            await fill(client, "gone", "1", "2")
            await fill(client, "stays", "3", "4")
            consumer = client.consumer(
                ["gone", "stays"], group="g", auto_offset_reset="earliest", commit_interval_s=0.05
            )
            async with consumer:
                assert sorted(await take(consumer, 4)) == list("1234")
                await client.topics.delete("gone")
                # From here on they are done, and those of one topic cannot be committed.
                assert await consumer.take(1, timeout_s=0) == []
                async with asyncio.timeout(30):
                    while await offsets(client) != {"stays": 2}:
                        pass
                await until(lambda: consumer.assignment == {("stays", 0)}, "the topic to be gone")
                await fill(client, "stays", "5")
                assert await take(consumer, 1) == ["5"]
                await client.topics.create("gone", partitions=1)
                await fill(client, "gone", "6")
                assert await take(consumer, 1) == ["6"]
            assert await offsets(client) == {"gone": 1, "stays": 3}

    run(scenario())


@pytest.mark.parametrize("has_heard", [True, False])
def test_a_goodbye_commits_what_is_done_in_topics_that_are_left(
    broker: BrokerProcess, has_heard: bool
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            for topic in ("gone", "stays"):
                await client.topics.create(topic, partitions=1)
                await fill(client, topic, "1", "2")
            async with client.consumer(
                ["gone", "stays"], group="g", auto_offset_reset="earliest"
            ) as consumer:
                await take(consumer, 4)
                if not has_heard:
                    # What it hears last is that the topic is its own.
                    assert consumer._task is not None
                    consumer._task.cancel()
                    await asyncio.gather(consumer._task, return_exceptions=True)
                await client.topics.delete("gone")
                if has_heard:
                    await until(lambda: len(consumer.assignment) == 1, "the topic to be gone")
            assert await offsets(client) == {"stays": 2}

    run(scenario())


def test_a_member_that_joins_again_goes_on_with_the_topics_that_are_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        flags = ("--topic-auto-create", "off", "--group-heartbeat-interval", "100ms")
        broker = BrokerProcess(str(tmp_path), *flags).wait_until_ready()
        address = broker.url("").removeprefix("http://")
        try:
            async with AsyncClient(broker.url("")) as client:
                for topic in ("gone", "stays"):
                    await client.topics.create(topic, partitions=1)
                async with client.consumer(
                    ["gone", "stays"], group="g", auto_offset_reset="earliest"
                ) as consumer:
                    for left in ("stays", ""):
                        await client.topics.delete("gone" if left else "stays")
                        broker.process.kill()
                        broker.process.wait()
                        broker = await asyncio.to_thread(
                            BrokerProcess, str(tmp_path), "--http", address, *flags
                        )
                        if left:
                            await fill(client, left, "a")
                            assert await take(consumer, 1) == ["a"]
                            assert consumer.assignment == {("stays", 0)}
                            assert consumer.statistics().joins == 2
                        else:
                            with pytest.raises(TopicUnknown):
                                await consumer.take(1, timeout_s=30)
        finally:
            broker.process.kill()
            broker.process.wait()

    run(scenario())


def test_partitions_that_come_while_others_go_are_read_from_their_first_record(
    tmp_path: Path,
) -> None:
    async def scenario(url: str) -> None:
        async with AsyncClient(url) as client, AsyncExitStack() as stack:
            await client.topics.create("t", partitions=6)
            for partition in range(6):
                for number in range(3):
                    await client.publish("t", f"{partition}-{number}", partition=partition)
            # Neighbours move up when the first member goes: they lose and gain at once.
            members = [
                await stack.enter_async_context(
                    client.consumer(
                        "t",
                        group="g",
                        client_id=f"member{number}",
                        assignor="range",
                        auto_offset_reset="earliest",
                    )
                )
                for number in range(3)
            ]
            await until(lambda: all(len(one.assignment) == 2 for one in members), "their shares")
            await members[0].close()
            rest = members[1:]
            await until(lambda: all(len(one.assignment) == 3 for one in rest), "their shares")
            found: list[str] = []
            for one in rest:
                found += await take(one, 9)
            assert sorted(found) == [f"{p}-{n}" for p in range(6) for n in range(3)]

    with BrokerProcess(str(tmp_path), "--group-heartbeat-interval", "100ms") as broker:
        run(scenario(broker.wait_until_ready().url("")))
