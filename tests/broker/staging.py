"""Staged writes for tests, on a loop that the test turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from broker.making import House, local_house, memory_house, options
from faults.simulated_disk import SimulatedDisk
from millstream.broker.broker import BrokerOptions
from millstream.broker.staged_commits import Committed, Running
from millstream.broker.staged_values import PARTITION, StagedOptions
from millstream.broker.staged_writes import Attempt, Staged, WriterFacts
from millstream.engine.pending import Pending
from millstream.log import batch as batches
from millstream.wire.staged import StagedEntry, join_entries

# So small that a commit of a few batches has several steps.
STEP_BYTES = 300
# Of records: not so old that retention takes them.
TIMESTAMP_MS = 2_000_000_000_000


def staged_options(**more: Any) -> BrokerOptions:
    return replace(options(), staged=StagedOptions(**{"step_bytes": STEP_BYTES} | more))


def house_of(*, partitions: int = 2, **more: Any) -> House:
    house = memory_house(staged_options(**more))
    house.done(house.broker.topics.create("t", partitions))
    return house


def local_house_of(disk: SimulatedDisk | None = None, **more: Any) -> House:
    now_ms = more.pop("now_ms", None)
    through = more.pop("through", None)
    house = local_house(disk, staged_options(**more), now_ms=now_ms, through=through).start()
    if "t" not in house.broker.topics.by_name:
        house.done(house.broker.topics.create("t", 2))
    return house


def batch_of(*values: bytes, key: bytes | None = b"k", **how: Any) -> bytes:
    headers = [("ms-lane", how["lane"].encode())] if how.get("lane") else []
    return batches.encode([(TIMESTAMP_MS, key, value, headers) for value in values], **how)


def entry(
    *values: bytes, topic: str = "t", partition: int = 0, due_ms: int = 0, **how: Any
) -> StagedEntry:
    return StagedEntry(topic, partition, due_ms, batch_of(*values, **how))


def stage_soon(
    house: House,
    *entries: StagedEntry,
    writer: str = "w",
    batch: int = 0,
    task: int = 0,
    owner: str | None = None,
) -> Pending[Staged]:
    attempt = Attempt(writer, batch, task, 0, owner)
    return house.broker.staged_writes.stage(attempt, join_entries(entries))


def stage(house: House, *entries: StagedEntry, **who: Any) -> str:
    """The handle."""
    return house.done(stage_soon(house, *entries, **who)).part


def commit_soon(
    house: House, parts: Iterable[str], *, writer: str = "w", batch: int = 0, **more: Any
) -> Pending[Committed | Running]:
    return house.broker.staged_writes.commit(writer, batch, list(parts), **more)


def commit(house: House, parts: Iterable[str], **who: Any) -> Committed:
    """Up to its end."""
    one = house.done(commit_soon(house, parts, **who))
    if isinstance(one, Running):
        house.scheduler.run()
        return one.outcome.result()
    return one


def facts(house: House, writer: str = "w") -> WriterFacts:
    [found] = house.done(house.broker.staged_writes.facts([writer]))
    return found


def values(house: House, topic: str = "t") -> list[bytes | None]:
    """Of all partitions, in their order."""
    found: list[bytes | None] = []
    for number in range(house.broker.topics.get(topic).partitions):
        start, _ = house.broker.reader.offsets(topic, number)
        fetched = house.done(house.broker.reader.fetch(topic, number, start, 100_000, 1 << 30))
        found += [record.value for record in fetched.records]
    return found


def names(first: int, count: int) -> Sequence[bytes]:
    return [b"%d" % one for one in range(first, first + count)]


def staged_offsets(house: House) -> tuple[int, int]:
    """Of the log of what is staged: its start and its end."""
    start, end = house.engine.offsets(PARTITION)
    return start, end
