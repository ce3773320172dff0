"""Members of a group: nothing is skipped, whoever comes, goes or dies."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess
from client.scripted import LossyProxy, Request, run, until
from millstream.client import AsyncClient, Consumer, Received
from millstream.errors import MemberUnknown, ParameterInvalid, TopicUnknown


async def fill(client: AsyncClient, topic: str, count: int, start: int = 0) -> None:
    async with client.producer(batch_records=20) as producer:
        for number in range(start, start + count):
            await producer.send(topic, b"%d" % number)


async def collect(consumer: Consumer, found: list[Received]) -> None:
    async for record in consumer:
        found.append(record)  # noqa: PERF401  looked at while it grows


def numbers(found: list[Received]) -> Counter[int]:
    return Counter(int(record.text) for record in found)


def once(count: int) -> Counter[int]:
    return Counter(range(count))


def test_a_consumer_gets_everything_commits_and_leaves(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=3)
            await fill(client, "t", 1200)
            found: list[Received] = []
            async with client.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
                assert consumer.assignment == {("t", 0), ("t", 1), ("t", 2)}
                async for record in consumer:
                    found.append(record)
                    if len(found) == 1200:
                        break
            assert numbers(found) == once(1200)
            for partition in range(3):
                offsets = [one.offset for one in found if one.partition == partition]
                assert offsets == list(range(len(offsets)))
            group = await client.groups.describe("g")
            assert (group.state, group.members) == ("empty", [])
            assert (await client.groups.lag("g")).messages == 0

    run(scenario())


def test_a_record_whose_handler_fails_is_delivered_again(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 10)

            async def fail_at_four() -> None:
                failing = client.consumer("t", group="g", auto_offset_reset="earliest")
                async with failing:
                    async for record in failing:
                        if record.text == "4":
                            raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail_at_four()
            async with client.consumer("t", group="g") as consumer:
                assert (await anext(consumer)).text == "4"

    run(scenario())


def test_in_manual_mode_only_commit_commits(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 10)
            async with client.consumer(
                "t", group="g", commit="manual", auto_offset_reset="earliest"
            ) as consumer:
                assert [one.text for one in await consumer.take(3)] == ["0", "1", "2"]
                await consumer.commit()
                assert [one.text for one in await consumer.take(3)] == ["3", "4", "5"]
            (committed,) = await client.groups.offsets("g")
            assert committed.offset == 3

    run(scenario())


def test_what_was_taken_before_a_session_ended_is_not_said_to_be_committed(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 10)
            async with client.consumer(
                "t", group="g", commit="manual", auto_offset_reset="earliest"
            ) as consumer:
                assert len(await consumer.take(3)) == 3
                member = {"member_id": consumer.statistics().member_id}
                await client._transport.ask(
                    "POST", "/v1/groups/g/leave", json.dumps(member).encode()
                )
                await until(lambda: consumer.statistics().joins == 2, "a new session")
                for _ in range(3):
                    with pytest.raises(MemberUnknown):
                        await consumer.commit()
                assert [one.text for one in await consumer.take(2)] == ["0", "1"]
                await consumer.commit()
                await consumer.commit()
            (committed,) = await client.groups.offsets("g")
            assert committed.offset == 2

    run(scenario())


def test_commits_happen_by_themselves_while_the_handler_goes_on(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 3)
            async with client.consumer(
                "t", group="g", auto_offset_reset="earliest", commit_interval_s=0.05
            ) as consumer:
                for _ in range(3):
                    await anext(consumer)
                # Two are done; the third is still in hand.
                while not (found := await client.groups.offsets("g")) or found[0].offset < 2:
                    pass
                assert found[0].offset == 2

    run(scenario())


def test_heartbeats_go_on_while_the_handler_is_busy(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 2)
            async with client.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
                await anext(consumer)
                # The silence of a member starts anew with each of its heartbeats.
                heartbeats, before_ms = 0, 0
                while heartbeats < 5:
                    (member,) = (await client.groups.describe("g")).members
                    assert member.member_id == consumer.statistics().member_id
                    heartbeats += member.idle_ms < before_ms
                    before_ms = member.idle_ms
                assert (await anext(consumer)).text == "1"
                assert consumer.statistics().joins == 1

    with BrokerProcess(str(tmp_path), "--group-heartbeat-interval", "100ms") as broker:
        run(scenario(broker.wait_until_ready().url("")))


def test_members_share_and_hand_over_without_loss_or_repeat(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with AsyncClient(url) as client, AsyncExitStack() as stack:
            await client.topics.create("t", partitions=8)
            filling = asyncio.ensure_future(fill(client, "t", 4000))
            found: list[Received] = []
            works = []
            consumers = []
            for _ in range(3):
                consumer = await stack.enter_async_context(
                    client.consumer("t", group="g", auto_offset_reset="earliest", poll_records=50)
                )
                consumers.append(consumer)
                works.append(asyncio.ensure_future(collect(consumer, found)))
                goal = len(found) + 200
                await until(lambda: len(found) >= goal, "records")  # noqa: B023  read at once
            await until(lambda: _are_shared(consumers, 8), "each partition to have one owner")
            await consumers[0].close()
            await until(lambda: _are_shared(consumers[1:], 8), "the others to take over")
            await filling
            await until(lambda: len(numbers(found)) == 4000, "all records")
            await asyncio.gather(*(consumer.close() for consumer in consumers))
            await asyncio.gather(*works)
            assert numbers(found) == once(4000)
            assert (await client.groups.lag("g")).messages == 0

    with BrokerProcess(str(tmp_path), "--group-heartbeat-interval", "100ms") as broker:
        run(scenario(broker.wait_until_ready().url("")))


def _are_shared(consumers: list[Consumer], partitions: int) -> bool:
    """Each partition has one owner, and each member its share."""
    owned = [one for consumer in consumers for one in consumer.assignment]
    least = partitions // len(consumers)
    is_even = all(least <= len(consumer.assignment) <= least + 1 for consumer in consumers)
    return is_even and len(owned) == len(set(owned)) == partitions


def test_a_partition_is_given_up_only_when_its_record_is_done(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.topics.create("t", partitions=2)
            for partition in (0, 1):
                for number in range(3):
                    await client.publish("t", str(number), partition=partition)
            async with client.consumer("t", group="g", auto_offset_reset="earliest") as first:
                held = await first.take(1)
                async with client.consumer("t", group="g", auto_offset_reset="earliest") as second:
                    # The newcomer gets the one partition that nobody works on, or none.
                    await until(lambda: len(first.assignment) == 1, "the first to give way")
                    both = {(one.topic, one.partition) for one in held}
                    if both & first.assignment:
                        # What is in hand stays here.
                        assert len(await second.take(1, timeout_s=30)) == 1
                    else:
                        assert await second.take(1, timeout_s=0.2) == []
                        await first.take(1, timeout_s=0.1)
                        (record,) = await second.take(1, timeout_s=30)
                        assert (record.partition, record.offset) == (held[0].partition, 1)

    with BrokerProcess(str(tmp_path), "--group-heartbeat-interval", "100ms") as broker:
        run(scenario(broker.wait_until_ready().url("")))


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_consumer_goes_on_after_the_broker_was_away(tmp_path: Path, end: str) -> None:
    async def scenario() -> None:
        flags = ("--group-heartbeat-interval", "100ms")
        broker = BrokerProcess(str(tmp_path), *flags).wait_until_ready()
        try:
            async with AsyncClient(broker.url("")) as client:
                await client.topics.create("t", partitions=3)
                await fill(client, "t", 500)
                found: list[Received] = []
                async with client.consumer(
                    "t", group="g", auto_offset_reset="earliest", commit_interval_s=0.05
                ) as consumer:
                    work = asyncio.ensure_future(collect(consumer, found))
                    await until(lambda: len(numbers(found)) == 500, "the first half")
                    address = broker.url("").removeprefix("http://")
                    broker.process.kill() if end == "kill" else broker.process.terminate()
                    broker.process.wait()
                    broker = await asyncio.to_thread(
                        BrokerProcess, str(tmp_path), "--http", address, *flags
                    )
                    await fill(client, "t", 500, 500)
                    await until(lambda: len(numbers(found)) == 1000, "the second half")
                    assert consumer.statistics().joins == 2
                    await consumer.close()
                    await work
                assert (await client.groups.lag("g")).messages == 0
        finally:
            broker.process.kill()
            broker.process.wait()

    run(scenario())


def test_answers_to_polls_that_get_lost_skip_nothing(broker: BrokerProcess) -> None:
    seen = 0

    def plan(request: Request) -> str | None:
        nonlocal seen
        if "/poll" not in request.path:
            return None
        seen += 1
        return {0: "answer", 1: "half", 2: "request"}.get(seen % 5)

    async def scenario() -> None:
        port = int(broker.url("").rpartition(":")[2])
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=2)
            await fill(client, "t", 600)
        async with LossyProxy(port, plan) as proxy, AsyncClient(proxy.url) as client:
            found: list[Received] = []
            async with client.consumer(
                "t", group="g", auto_offset_reset="earliest", poll_records=20
            ) as consumer:
                async for record in consumer:
                    found.append(record)
                    if len(found) == 600:
                        break
            assert numbers(found) == once(600)
            assert len(proxy.lost) > 5

    run(scenario())


def test_a_goodbye_says_the_generation_and_is_taken_although_it_is_stale(
    broker: BrokerProcess,
) -> None:
    said: list[dict[str, object]] = []

    def plan(request: Request) -> None:
        if request.path.endswith("/leave"):
            said.append(json.loads(request.body))

    async def scenario() -> None:
        port = int(broker.url("").rpartition(":")[2])
        async with LossyProxy(port, plan) as proxy, AsyncClient(proxy.url) as client:
            await client.topics.create("t", partitions=1)
            async with client.consumer("t", group="g") as consumer:
                member_id, generation = consumer.statistics()[:2]
            assert said == [{"member_id": member_id, "generation": generation}]
            said.clear()
            async with client.consumer("t", group="g") as consumer:
                member_id, generation = consumer.statistics()[:2]
                # As if the group had gone on without it.
                assert consumer._newest is not None
                consumer._newest = consumer._newest._replace(generation=generation - 1)
            assert said == [
                {"member_id": member_id, "generation": generation - 1},
                {"member_id": member_id},
            ]
            assert (await client.groups.describe("g")).members == []

    run(scenario())


def test_a_slow_handler_lets_no_more_than_the_buffer_pile_up(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=1)
            await fill(client, "t", 1000)
            async with client.consumer(
                "t", group="g", auto_offset_reset="earliest", poll_records=50, buffer_records=100
            ) as consumer:
                await anext(consumer)
                await until(lambda: consumer.statistics().buffered >= 100, "a full buffer")
                for _ in range(100):
                    await client.topics.describe("t")
                assert consumer.statistics().buffered < 150

    run(scenario())


@pytest.mark.parametrize(
    "options",
    [
        {"commit": "Auto"},
        {"commit": True},
        {"commit": None},
        {"commit_interval_s": -1},
        {"commit_interval_s": 0},
        {"commit_interval_s": math.nan},
        {"poll_records": 0},
        {"buffer_records": 0},
        {"patience_s": -1},
    ],
)
def test_a_consumer_that_cannot_work_is_not_made(options: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with AsyncClient() as client:
            with pytest.raises(ParameterInvalid) as caught:
                client.consumer("t", group="g", **options)
            (name,) = options
            assert caught.value.fields["parameter"] == name
            assert caught.value.message.startswith(f"{name} is ")

    run(scenario())


def test_what_cannot_be_mended_is_told(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            with pytest.raises(TopicUnknown):
                async with client.consumer("none", group="g"):
                    raise AssertionError
            await client.topics.create("t", partitions=1)
            async with client.consumer("t", group="g", poll_records=501) as consumer:
                with pytest.raises(ParameterInvalid, match="poll_records is 501") as caught:
                    await anext(consumer)
                assert caught.value.fields["parameter"] == "poll_records"
            async with client.consumer("t", group="g") as consumer:
                await consumer.close()
                assert [record async for record in consumer] == []
                assert await consumer.take(5) == []

    run(scenario())
