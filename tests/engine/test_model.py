"""The local engine against a simple model: whatever is done to it, in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.engines import ManualHouse
from log.effort import effort
from log.making import batch, records
from millstream.log.partition import FsyncMode, PartitionId, PartitionSettings

if TYPE_CHECKING:
    from millstream.engine.pending import Pending

MODES: dict[int, FsyncMode] = {0: "every", 1: "interval", 2: "none"}

numbers = st.sampled_from(sorted(MODES))
# Some smaller than a journal file, some larger, some that skip the journal.
sizes = st.sampled_from([0, 5, 40, 300, 9_000, 66_000])
counts = st.integers(1, 4)


def settings_for(topic: str) -> PartitionSettings:
    mode: FsyncMode = "every"
    for name in MODES.values():
        if topic == name:
            mode = name
    return PartitionSettings(fsync=mode, segment_bytes=2_000, batch_bytes_max=100_000)


def id_of(number: int) -> PartitionId:
    return PartitionId(MODES[number], 0)


@dataclass(slots=True)
class Log:
    """What a partition must hold."""

    start: int = 0
    # Every value that was ever answered, by offset; and up to where it must survive a crash.
    values: list[bytes] = field(default_factory=list)
    durable: int = 0
    durable_start: int = 0


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = ManualHouse(settings_for=settings_for)
        self.logs = {number: Log() for number in MODES}
        self.made = 0
        self.asked: list[tuple[Pending[int] | Pending[list[int]], list[tuple[int, bytes]]]] = []
        for name in MODES.values():
            self.house.done(self.house.engine.create(name, 1, settings_for(name)))

    def _value(self, size: int) -> bytes:
        self.made += 1
        return b"%d:" % self.made + bytes(size)

    # ---- appending: asked for now, answered when the loop turns

    @rule(number=numbers, size=sizes, count=counts)
    def append(self, number: int, size: int, count: int) -> None:
        made = [self._value(size) for _ in range(count if size < 1000 else 1)]
        pending = self.house.engine.append(id_of(number), batch(*made))
        self.asked.append((pending, [(number, value) for value in made]))

    @rule(parts=st.lists(st.tuples(numbers, sizes), min_size=1, max_size=4))
    def append_atomic(self, parts: list[tuple[int, int]]) -> None:
        made = [(number, self._value(size)) for number, size in parts]
        entries = [(id_of(number), batch(value)) for number, value in made]
        self.asked.append((self.house.engine.append_atomic(entries), made))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.house.scheduler.turn()
        self._settle()

    @rule()
    def finish(self) -> None:
        self.house.run()
        self._settle()
        assert not self.asked

    def _settle(self) -> None:
        """Take what was answered into the model, in the order of the offsets."""
        waiting = []
        for pending, made in self.asked:
            if not pending.is_done:
                waiting.append((pending, made))
                continue
            answer = pending.result()
            if isinstance(answer, list):
                for (number, value), offset in zip(made, answer, strict=True):
                    self._took(number, offset, value)
                    # A frame of the journal: with it, all that comes before.
                    self.logs[number].durable = max(self.logs[number].durable, offset + 1)
            else:
                for at, (number, value) in enumerate(made):
                    self._took(number, answer + at, value)
        self.asked = waiting
        self.logs[0].durable = len(self.logs[0].values)

    def _took(self, number: int, offset: int, value: bytes) -> None:
        log = self.logs[number]
        assert offset == len(log.values)
        log.values.append(value)

    # ---- upkeep

    @rule(number=numbers, share=st.floats(0, 1))
    def trim(self, number: int, share: float) -> None:
        self.finish()
        log = self.logs[number]
        offset = log.start + int((len(log.values) - log.start) * share)
        self.house.done(self.house.engine.trim(id_of(number), offset))
        log.start = log.durable_start = max(log.start, offset)

    @rule(number=numbers)
    def roll(self, number: int) -> None:
        self.finish()
        partition = self.house.partition(id_of(number))
        partition.apply()
        if partition.tail:
            partition.roll(self.house.now_ms)
        self.house.upkeep.seal(partition)

    @rule()
    def checkpoint(self) -> None:
        self.finish()
        self.house.upkeep.checkpoint()
        self.house.run()
        for log in self.logs.values():
            log.durable = len(log.values)

    @rule()
    def a_second_passes(self) -> None:
        self.finish()
        self.house.scheduler.advance(1.0)
        self.logs[1].durable = len(self.logs[1].values)

    @rule(cold=st.booleans())
    def forget_pages(self, cold: bool) -> None:
        self.house.disk.cold = cold

    # ---- the end, and what comes after it

    @rule()
    def restart(self) -> None:
        self.finish()
        self.house.stop()
        self.house = self.house.again()
        # Files in their grace are taken away; there is nothing else to do.
        assert {finding.what for finding in self.house.engine.findings} <= {"removed"}
        for log in self.logs.values():
            log.durable = len(log.values)

    @rule(survival=st.sampled_from(["nothing", "all"]))
    def crash(self, survival: Literal["nothing", "all"]) -> None:
        asked, self.asked = self.asked, []
        self.house = self.house.again(self.house.disk.crash(survival))
        for number, log in self.logs.items():
            self._accept(number, log, asked)

    def _accept(
        self,
        number: int,
        log: Log,
        asked: list[tuple[Pending[int] | Pending[list[int]], list[tuple[int, bytes]]]],
    ) -> None:
        """After a crash: all that was durable, then a prefix of what was not, and nothing else."""
        start, end = self.house.engine.offsets(id_of(number))
        assert start == log.durable_start
        assert end >= log.durable
        unanswered = [value for _, made in asked for to, value in made if to == number]
        possible = log.values + unanswered
        found = self._read(number, start, end)
        if end <= len(log.values):
            assert found == log.values[start:end]
        else:
            # Of what was not answered, some may be there, in its order.
            assert found[: len(log.values) - start] == log.values[start:]
            rest = iter(possible[len(log.values) :])
            assert all(value in rest for value in found[len(log.values) - start :])
        log.values = [*log.values[:start], *found]
        log.start, log.durable = start, end

    # ---- reading

    @rule(number=numbers, share=st.floats(0, 1), bytes_max=st.integers(1, 5_000))
    def read(self, number: int, share: float, bytes_max: int) -> None:
        self.finish()
        log = self.logs[number]
        if log.start == len(log.values):
            return
        offset = min(log.start + int((len(log.values) - log.start) * share), len(log.values) - 1)
        chunk = self.house.done(self.house.engine.read(id_of(number), offset, bytes_max))
        found = records(chunk.data)
        assert found[0].offset <= offset < chunk.next_offset
        assert [record.value for record in found] == log.values[found[0].offset : chunk.next_offset]

    @precondition(lambda self: not self.asked)
    @invariant()
    def offsets_are_those_of_the_model(self) -> None:
        for number, log in self.logs.items():
            assert self.house.engine.offsets(id_of(number)) == (log.start, len(log.values))

    def teardown(self) -> None:
        self.house.disk.cold = False
        self.finish()
        for number, log in self.logs.items():
            assert self._read(number, log.start, len(log.values)) == log.values[log.start :]
        self.house.stop()

    def _read(self, number: int, start: int, end: int) -> list[bytes]:
        found: list[bytes] = []
        offset = start
        while offset < end:
            chunk = self.house.done(self.house.engine.read(id_of(number), offset, 1 << 20))
            found += [one.value or b"" for one in records(chunk.data) if one.offset >= offset]
            offset = chunk.next_offset
        return found


def test_the_engine_does_as_its_model() -> None:
    run_state_machine_as_test(EngineMachine, settings=effort(60))
