"""Dead letters through the client, against a running broker."""

from __future__ import annotations

import asyncio

import pytest

from broker_process import BrokerProcess
from listeners.letters import bury
from listeners.v1_client import V1
from millstream.client import AsyncClient, Client
from millstream.errors import DeadLetterUnknown, RedriveUnknown, TopicUnknown


@pytest.fixture
def v1(broker: BrokerProcess) -> V1:
    v1 = V1(broker)
    v1.good("POST", "/topics", {"name": "orders", "partitions": 2})
    bury(v1, "orders", "a", "b", key=b"\xff")
    bury(v1, "orders", "c", reason="rejected", error="bored", partition=1)
    return v1


def test_they_are_read_with_how_they_died(broker: BrokerProcess, v1: V1) -> None:
    with Client(broker.url("")) as client:
        letters = list(client.dead_letters.read("orders"))
        assert [one.record.text for one in letters] == ["a", "b", "c"]
        last = letters[-1]
        assert (last.partition, last.offset, last.reason, last.error) == (1, 0, "rejected", "bored")
        assert (last.origin.topic, last.record.topic, last.redrives) == ("orders", "orders", 0)
        assert last.record.headers == (("mine", b"1"),)
        assert client.dead_letters.get("orders", 1, 0) == last
        by_key = client.dead_letters.read("orders", key=b"\xff", until_ms=10_000)
        assert [one.record.text for one in by_key] == ["a", "b"]
        assert client.dead_letters.count("orders") == 3
        [count] = client.dead_letters.counts()
        assert (count.topic, count.dead_letters) == ("orders", 3)


def test_they_are_deleted(broker: BrokerProcess, v1: V1) -> None:
    with Client(broker.url("")) as client:
        assert client.dead_letters.delete("orders", [(0, 0), (1, 0)]) == 2
        with pytest.raises(DeadLetterUnknown):
            client.dead_letters.delete("orders", [(0, 0)])
        with pytest.raises(DeadLetterUnknown):
            client.dead_letters.get("orders", 0, 0)
        assert [one.record.text for one in client.dead_letters.read("orders")] == ["b"]
        client.dead_letters.purge("orders")
        assert client.dead_letters.count("orders") == 0


def test_those_that_are_gone_are_told(broker: BrokerProcess, v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", "b", "c")
    with Client(broker.url("")) as client:
        assert list(client.dead_letters.gone(topic)) == []
        client.dead_letters.delete(topic, [(0, 1), (0, 2)])
        runs = [(run.partition, run.first, run.last) for run in client.dead_letters.gone(topic)]
    assert runs == [(0, 1, 2)]


def test_they_are_put_back(broker: BrokerProcess, v1: V1) -> None:
    with Client(broker.url("")) as client:
        letters = client.dead_letters
        dry = letters.wait(letters.redrive("orders", is_dry_run=True, reason="rejected").id)
        assert (dry.matched, dry.moved, dry.examples[0].to) == (1, 0, "orders")
        job = letters.redrive("orders", reason="rejected", text="bored")
        done = letters.wait(job.id)
        assert (done.state, done.moved, done.skipped) == ("done", 1, {})
        assert letters.redrive_facts(job.id) == done
        assert [one.id for one in letters.redrives("orders")] == [job.id, dry.id]
        assert [one.text for one in client.read("orders")] == ["c"]


def test_one_that_runs_can_be_cancelled(broker: BrokerProcess, v1: V1) -> None:
    async def work() -> None:
        async with AsyncClient(broker.url("")) as client:
            job = await client.dead_letters.redrive("orders", rate=1)
            cancelled = await client.dead_letters.cancel(job.id)
            assert (cancelled.state, cancelled.rest_seconds) == ("cancelled", None)
            assert (await client.dead_letters.wait(job.id)).is_over
            with pytest.raises(RedriveUnknown):
                await client.dead_letters.cancel("none")
            with pytest.raises(TopicUnknown):
                await client.dead_letters.redrive("nowhere")

    asyncio.run(work())
