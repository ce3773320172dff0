"""Staged writes against a model of sets: repeated, late and wrong requests, over crashes."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.staging import (
    commit,
    commit_soon,
    entry,
    facts,
    local_house_of,
    stage,
    stage_soon,
    values,
)
from faults.simulated_disk import SimulatedDisk
from log.effort import effort
from millstream.broker.staged_commits import Committed, Running
from millstream.errors import (
    BatchCommitted,
    MillstreamError,
    StagedPartUnknown,
    WriterUnknown,
)
from millstream.wire.staged import NO_PART

WRITERS = st.sampled_from(["w", "v"])
BATCHES = st.integers(0, 4)
WAYS = st.sampled_from(["nothing", "all", "prefix"])
RETENTION_S = 600
OPTIONS: dict[str, Any] = {
    "cut_bytes": 500,
    "move_bytes": 2_000,
    "retention_ms": RETENTION_S * 1000,
}


class Part(NamedTuple):
    writer: str
    batch: int
    values: tuple[bytes, ...]
    staged_s: float


class Writes(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = local_house_of(**OPTIONS)
        self.serial = 0
        self.now_s = 0.0
        # By handle: what is staged. Of each writer: its last batch, and all that it has committed.
        self.parts: dict[str, Part] = {}
        self.last: dict[str, int] = {}
        self.committed: list[bytes] = []
        # Handles that once were good, and are not any more.
        self.stale: list[str] = []

    def fresh(self, count: int) -> tuple[bytes, ...]:
        self.serial += count
        return tuple(b"%d" % one for one in range(self.serial - count, self.serial))

    def of_batch(self, writer: str, batch: int) -> list[str]:
        return [id for id, one in self.parts.items() if (one.writer, one.batch) == (writer, batch)]

    def forget(self, ids: list[str]) -> None:
        for id in ids:
            del self.parts[id]
            self.stale.append(id)

    # ---- requests

    @rule(writer=WRITERS, batch=BATCHES, count=st.integers(1, 12))
    def stage(self, writer: str, batch: int, count: int) -> None:
        ones = self.fresh(count)
        id = stage(
            self.house,
            *[entry(one, partition=n % 2) for n, one in enumerate(ones)],
            writer=writer,
            batch=batch,
        )
        if batch <= self.last.get(writer, -1):
            assert id == NO_PART
        else:
            self.parts[id] = Part(writer, batch, ones, self.now_s)

    @rule(writer=WRITERS, batch=BATCHES, data=st.data())
    def commit(self, writer: str, batch: int, data: st.DataObject) -> None:
        known = self.of_batch(writer, batch)
        named = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        done = commit(self.house, named, writer=writer, batch=batch)
        if batch <= self.last.get(writer, -1):
            assert done.already
            return
        count = sum(len(self.parts[id].values) for id in named)
        assert (done.already, done.records) == (False, count)
        self.took(writer, batch, named)

    def took(self, writer: str, batch: int, named: list[str]) -> None:
        self.committed += [value for id in named for value in self.parts[id].values]
        self.last[writer] = batch
        self.forget(
            [id for id, one in self.parts.items() if one.writer == writer and one.batch <= batch]
        )

    @precondition(lambda self: self.stale or self.parts)
    @rule(writer=WRITERS, batch=BATCHES, data=st.data())
    def commit_what_is_not_its_own(self, writer: str, batch: int, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([*self.stale, *self.parts]))
        if id in self.of_batch(writer, batch):
            return
        asked = commit_soon(self.house, [id], writer=writer, batch=batch)
        self.house.scheduler.run()
        if batch <= self.last.get(writer, -1):
            assert isinstance(asked.result(), Committed)
        else:
            assert isinstance(asked.error, StagedPartUnknown)

    @rule(writer=WRITERS, batch=BATCHES)
    def abort(self, writer: str, batch: int) -> None:
        asked = self.house.broker.staged_writes.abort(writer, batch)
        self.house.scheduler.run()
        if batch <= self.last.get(writer, -1):
            assert isinstance(asked.error, BatchCommitted)
            return
        known = self.of_batch(writer, batch)
        assert asked.result() == len(known)
        self.forget(known)

    @rule(writer=WRITERS)
    def forget_writer(self, writer: str) -> None:
        asked = self.house.broker.staged_writes.forget(writer)
        self.house.scheduler.run()
        known = [id for id, one in self.parts.items() if one.writer == writer]
        if writer not in self.last and not known:
            assert isinstance(asked.error, WriterUnknown)
            return
        asked.result()
        self.last.pop(writer, None)
        self.forget(known)

    # ---- time, crashes

    @rule(seconds=st.sampled_from([1.0, 70.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.scheduler.advance(seconds)
        self.now_s += seconds
        # They are looked for each minute.
        late_s = self.now_s - RETENTION_S - 61
        self.forget([id for id, one in self.parts.items() if one.staged_s < late_s])
        self.expire()

    def expire(self) -> None:
        """What is just due may be there or not."""
        maybe = [id for id, one in self.parts.items() if self.now_s - one.staged_s >= RETENTION_S]
        there = self.house.broker.staged_writes._view.parts
        self.forget([id for id in maybe if id not in there])

    @rule(way=WAYS)
    def restart(self, way: str) -> None:
        self.house.scheduler.run()
        self.crash(way)

    @rule(writer=WRITERS, turns=st.integers(0, 120), way=WAYS, is_late=st.booleans())
    def crash_during_a_commit(self, writer: str, turns: int, way: str, is_late: bool) -> None:
        batch = self.last.get(writer, -1) + 1
        ones = self.fresh(20)
        entries = [entry(one, partition=n % 2) for n, one in enumerate(ones)]
        id = stage(self.house, *entries, writer=writer, batch=batch)
        self.parts[id] = Part(writer, batch, ones, self.now_s)
        asked = commit_soon(self.house, [id], writer=writer, batch=batch).result()
        assert isinstance(asked, Running)
        if is_late:
            stage_soon(self.house, entry(b"late"), writer=writer, batch=batch)
        for _ in range(turns):
            self.house.scheduler.turn()
        was_told = asked.outcome.is_done
        self.crash(way)
        self.house.scheduler.run()
        if self.last_of(writer) != batch:
            # It was not begun, for all that is on disk: who wanted it asks again.
            assert not was_told
            commit(self.house, [id], writer=writer, batch=batch)
        self.took(writer, batch, [id])

    def crash(self, way: str) -> None:
        disk = self.house.scheduler.disk
        assert isinstance(disk, SimulatedDisk)
        now_ms = self.house.scheduler.clock.now_ms
        self.house = local_house_of(
            disk.crash(way),  # type: ignore[arg-type]
            now_ms=now_ms,
            **OPTIONS,
        )
        self.house.scheduler.run()
        self.expire()

    # ---- what must hold

    def last_of(self, writer: str) -> int:
        try:
            found = facts(self.house, writer)
        except MillstreamError:
            return -1
        return -1 if found.last_batch is None else found.last_batch

    @invariant()
    def each_record_is_there_once(self) -> None:
        assert sorted(one or b"" for one in values(self.house)) == sorted(self.committed)

    @invariant()
    def writers_are_as_in_the_model(self) -> None:
        self.house.scheduler.run()
        for writer in ("w", "v"):
            assert self.last_of(writer) == self.last.get(writer, -1)
        view = self.house.broker.staged_writes._view
        assert view.parts.keys() == self.parts.keys()
        assert view.bytes == sum(one.bytes for one in view.parts.values())


Writes.TestCase.settings = effort(30, steps=25)
TestWrites = Writes.TestCase
