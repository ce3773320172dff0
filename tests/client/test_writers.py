"""Staged writes through the client, against a running broker."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, plain_environment
from client.scripted import ScriptedServer, answer, run
from millstream.client import AsyncClient, Client
from millstream.errors import (
    BatchCommitted,
    PartitionUnknown,
    StagedPartUnknown,
    StagedTopicGone,
    WriterAhead,
    WriterUnknown,
)
from millstream.log import batch as batches
from millstream.wire.staged import StagedEntry, join_entries

PAGE = Path(__file__).parent.parent.parent / "docs" / "writers.md"


def body(*values: str, topic: str = "t", partition: int = 0) -> bytes:
    data = batches.encode([(1, None, value.encode(), ()) for value in values])
    return join_entries([StagedEntry(topic, partition, 0, data)])


def test_a_batch_appears_once(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=2)
        parts = [
            client.writers.stage("w", 3, task, 0, body(f"{task}", partition=task)).part
            for task in range(2)
        ]
        assert client.writers.get("w").staged_parts == 2
        first = client.writers.commit("w", 3, parts)
        assert (first.batch, first.records, first.already, first.skipped) == (3, 2, False, {})
        again = client.writers.commit("w", 3, ["whatever"])
        assert (again.records, again.already) == (2, True)
        assert client.writers.commit("w", 1, []).records is None
        assert sorted(one.text for one in client.read("t")) == ["0", "1"]
        facts = client.writers.get("w")
        assert facts.last is not None
        assert (facts.last.batch, facts.last.records, facts.committing) == (3, 2, None)
        assert [one.writer for one in client.writers.list()] == ["w"]


def test_another_owner_does_not_pass_for_the_first(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        part = client.writers.stage("w", 0, 0, 0, body("a"), owner="one").part
        client.writers.commit("w", 0, [part], owner="one")
        with pytest.raises(WriterAhead):
            client.writers.stage("w", 0, 0, 0, body("b"), owner="other")
        with pytest.raises(WriterAhead, match="for the owner one"):
            client.writers.commit("w", 0, [], owner="other")
        last = client.writers.get("w").last
        assert last is not None
        assert last.owner == "one"


def test_a_final_batch_can_be_committed_again(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        part = client.writers.stage("w", 0, 0, 0, body("a")).part
        assert not client.writers.commit("w", 0, [part], forget=True).already
        assert client.writers.commit("w", 0, [part], forget=True).already
        last = client.writers.get("w").last
        assert last is not None
        assert last.final


def test_batches_are_aborted_and_writers_forgotten(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        staged = client.writers.stage("w", 0, 0, 0, body("a", "b"))
        assert (staged.records, staged.bytes) == (2, len(body("a", "b")) - 15)
        assert client.writers.abort("w", 0) == 1
        with pytest.raises(StagedPartUnknown):
            client.writers.commit("w", 0, [staged.part])
        client.writers.commit("w", 0, [])
        with pytest.raises(BatchCommitted):
            client.writers.abort("w", 0)
        client.writers.forget("w")
        with pytest.raises(WriterUnknown):
            client.writers.get("w")
        assert client.writers.list() == []


def test_the_page_about_writers_says_what_happens(broker: BrokerProcess) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [(program, printed)] = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program.replace("Client()", f'Client("{broker.url("")}")')],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment(),
        check=False,
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_what_is_wrong_is_told(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        with pytest.raises(PartitionUnknown) as raised:
            client.writers.stage("w", 0, 0, 0, body("a", partition=5))
        assert raised.value.fields["entry"] == 0
        part = client.writers.stage("w", 0, 0, 0, body("a")).part
        client.topics.delete("t")
        with pytest.raises(StagedTopicGone):
            client.writers.commit("w", 0, [part])


def test_many_tasks_stage_at_once(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.topics.create("t", partitions=4)
            staged = await asyncio.gather(
                *(
                    client.writers.stage("w", 0, task, 0, body(f"{task}", partition=task % 4))
                    for task in range(50)
                )
            )
            done = await client.writers.commit("w", 0, [one.part for one in staged])
            assert done.records == 50
            found = [one.text async for one in client.read("t")]
            assert sorted(found) == sorted(map(str, range(50)))

    asyncio.run(main())


def test_a_commit_that_takes_long_is_asked_for_again() -> None:
    running = {"writer": "w", "batch": 0, "state": "committing", "done": 1, "of": 9}
    over = {"writer": "w", "batch": 0, "state": "committed", "records": 5, "already": False}
    lost = None
    script = [
        answer(202, msgspec.json.encode(running)),
        lost,
        answer(409, b'{"error": "commit_running", "message": "wait"}'),
        answer(200, msgspec.json.encode(over)),
    ]

    async def main() -> None:
        async with ScriptedServer(script) as server, AsyncClient(server.url) as client:
            assert (await client.writers.commit("w", 0, ["a"])).records == 5
            assert len({one.body for one in server.requests}) == 1
            assert len(server.requests) == 4

    run(main())
