"""A real broker is killed while a query stages and commits: each record is in its topic once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from millstream.client import Client
from millstream.errors import MillstreamError, WriterUnknown
from millstream.log import batch as batches
from millstream.wire.staged import StagedEntry, join_entries

KILLS = 25 if os.environ.get("MILLSTREAM_FAULTS") == "full" else 2
TASKS, RECORDS, PARTITIONS, ENTRIES = 3, 2_000, 3, 8
# Small, so that segments end, and checkpoints are made, between kills.
FLAGS = ("--segment-bytes=2M", "--journal-bytes=4M", "--checkpoint-interval=1s")


def staged_by(batch: int, task: int) -> bytes:
    """What a task writes: more than a mebibyte, so that a commit has several steps."""
    values = [b"%d %d %d " % (batch, task, n) + b"x" * 600 for n in range(RECORDS)]
    now_ms = int(time.time() * 1000)
    return join_entries(
        StagedEntry(
            "t", n % PARTITIONS, 0,
            batches.encode([(now_ms, None, one, ()) for one in values[n::ENTRIES]]),
        )
        for n in range(ENTRIES)
    )  # fmt: skip


def last_of(client: Client) -> int:
    try:
        last = client.writers.get("w").last
    except WriterUnknown:
        return -1
    return -1 if last is None else last.batch


def is_committing(client: Client) -> bool:
    return any(one.committing is not None for one in client.writers.list())


class Query(threading.Thread):
    """Batch after batch, from where the broker says it is. It ends when the broker does."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.committed = 0
        self.trouble: BaseException | None = None

    def has_come_far(self) -> bool:
        return bool(self.committed or self.trouble)

    def run(self) -> None:
        try:
            with Client(self.url, retry_s=0.2) as client:
                self._write(client)
        except MillstreamError as error:
            if not (error.retriable or error.code == "outcome_unknown"):
                self.trouble = error
        except BaseException as error:  # noqa: BLE001  for the test to see
            self.trouble = error

    def _write(self, client: Client) -> None:
        # A commit may be under way since before the kill: it ends, or its batch comes again.
        wait_until(lambda: not is_committing(client), "the commit that the kill left")
        batch = last_of(client) + 1
        while True:
            parts = [
                client.writers.stage("w", batch, task, 0, staged_by(batch, task)).part
                for task in range(TASKS)
            ]
            # Of one task, a second attempt, which loses.
            client.writers.stage("w", batch, 0, 1, staged_by(batch, 0))
            done = client.writers.commit("w", batch, parts)
            assert done.already or done.records == TASKS * RECORDS
            self.committed += 1
            batch += 1


def everything(broker: BrokerProcess, partition: int) -> Iterator[bytes]:
    """The values of a partition."""
    path, offset = f"/v1/topics/t/partitions/{partition}/batches?bytes=4000000&offset=", 0
    while data := broker.get(f"{path}{offset}").content:
        for at, header in batches.walk(data):
            for record in batches.decode(data[at : at + header.size]):
                yield record.value or b""
            offset = header.next_offset


def check(broker: BrokerProcess, last: int) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    for partition in range(PARTITIONS):
        for value in everything(broker, partition):
            batch, task, n = map(int, value.split()[:3])
            found.setdefault((batch, task), []).append(n)
    expected = {(batch, task) for batch in range(last + 1) for task in range(TASKS)}
    assert found.keys() == expected
    for values in found.values():
        assert sorted(values) == list(range(RECORDS))


@pytest.mark.timeout(900)
def test_a_killed_broker_commits_each_batch_once(tmp_path: Path) -> None:
    random = Random(4)
    committed = 0
    queries: list[Query] = []
    for _ in range(KILLS):
        with BrokerProcess(str(tmp_path), *FLAGS) as broker:
            url = broker.wait_until_ready().url("")
            with Client(url) as client:
                if not client.topics.list():
                    client.topics.create("t", partitions=PARTITIONS)
            query = Query(url)
            query.start()
            wait_until(query.has_come_far, "a commit")
            time.sleep(random.uniform(0, 0.5))
            broker.process.kill()
            broker.process.wait(PATIENCE_SECONDS)
            # It goes on asking for a while, where nobody is.
            queries.append(query)
        committed += query.committed
    with BrokerProcess(str(tmp_path), *FLAGS) as broker, Client(broker.url("")) as client:
        broker.wait_until_ready()
        wait_until(lambda: not is_committing(client), "the last commit")
        assert last_of(client) + 1 >= committed
        check(broker, last_of(client))
    assert not [query.trouble for query in queries if query.trouble]
