"""A random script of everything that an engine can be asked, written into a ledger as it runs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, TypeVar

from faults.chance import ChancyDisk, ChancyScheduler
from faults.ledger import (
    ROOT,
    SERIAL,
    Ledger,
    Promises,
    Sent,
    TopicFate,
    check_all_closed,
    check_quiet,
    promises_of,
    refuse,
    serial_of,
)
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.slices import SLICE_S
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import MillstreamError
from millstream.log import batch as batches
from millstream.log.batch import Record
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.segment import Intervals
from millstream.log.store import StoreOptions

if TYPE_CHECKING:
    from faults.simulated_disk import SimulatedDisk
    from millstream.engine.pending import Pending
    from millstream.log.disk import Disk
    from millstream.log.segment import Chunk
    from millstream.log.store import Topic

T = TypeVar("T")

BYPASS_BYTES = 700
TOPICS = ("every", "interval", "none", "compact", "kept")
KEYS = [b"a", b"b", b"c", b"d"]


def settings_for(topic: str) -> PartitionSettings:
    """What a topic's name says; small enough that everything happens often."""
    return PartitionSettings(
        fsync="interval" if topic == "interval" else "none" if topic == "none" else "every",
        segment_bytes=1500,
        segment_age_ms=40_000,
        intervals=Intervals(index_bytes=256, time_ms=100),
        retention_bytes=3000 if topic == "kept" else None,
        compact=topic == "compact",
        tombstone_age_ms=5_000,
    )


def options(slice_s: float = SLICE_S) -> LocalOptions:
    return LocalOptions(
        store=StoreOptions(settings_for=settings_for, journal_file_bytes=4096),
        upkeep=UpkeepSettings(
            fsync_interval_s=1.0,
            checkpoint_interval_s=6.0,
            journal_bytes=10_000,
            retention_interval_s=3.0,
            compaction_interval_s=4.0,
            file_delete_delay_s=2.0,
            slice_s=slice_s,
        ),
        bypass_bytes=BYPASS_BYTES,
    )


class Script:
    """`run` does so many steps. Whoever wants to crash it sets `disk.on_operation`.

    With `around`, the engine gets a disk around that one, on which calls fail. Then answers may
    be errors of ours, and the engine may stop writing; a restart comes in the middle all the same.
    With slices of 0 seconds, other calls of the loop come between any two steps of upkeep.
    """

    def __init__(
        self,
        seed: int,
        around: Callable[[SimulatedDisk], Disk] | None = None,
        slice_s: float = SLICE_S,
    ) -> None:
        self.random = Random(seed)
        self._options = options(slice_s)
        self.disk = ChancyDisk()
        self.outer: Disk = self.disk if around is None else around(self.disk)
        self.may_fail = around is not None
        self.scheduler = ChancyScheduler(self.outer, random=Random(seed + 1))
        self.disk.breathe = self.scheduler.breathe
        self.clock = self.scheduler.clock
        self.ledger = Ledger()
        self.engine = self._engine()
        self._closed = Promises(self.ledger, {}, self.clock.wall_ms(), self.clock.monotonic())
        self._serial = 0
        self._groups = 0
        self._sequences: dict[tuple[PartitionId, int], int] = {}
        self._altered = settings_for("interval")
        self._steps: list[tuple[int, Callable[[], None]]] = [
            (30, self.append),
            (6, self.append_big),
            (12, self.append_atomic),
            (10, self.append_idempotent),
            (3, self.append_repeated),
            (3, self.trim),
            (5, self.read),
            (2, self.take_producer_id),
            (2, self.create),
            (2, self.delete),
            (1, self.add_partitions),
            (1, self.alter),
            (6, self.wait),
        ]

    def open(self) -> None:
        self._open()
        for name in TOPICS:
            self._create(name, 2 if name in ("every", "interval") else 1)
        self.scheduler.run()

    def run(self, steps: int) -> None:
        calls = [call for _, call in self._steps]
        weights = [weight for weight, _ in self._steps]
        for step in range(steps):
            if step == steps // 2:
                self.restart()
            if self._partitions():
                self.scheduler.soon(self.random.choices(calls, weights)[0])
            for _ in range(self.random.choice((0, 0, 1, 2, 6, 20))):
                self.scheduler.turn()
        self.scheduler.run()
        assert self.may_fail or self.engine.health().ok, self.engine.health()

    def restart(self) -> None:
        """Stop in good order, and go on with what is there."""
        self.scheduler.run()
        assert self.may_fail or self.engine.health().ok, self.engine.health()
        self._closed = self.promises()
        self.engine.close()
        self.scheduler.run()
        check_all_closed(self.disk)
        self.engine = self._engine()
        self._open()
        if not self.may_fail:
            check_quiet(self.engine)

    def promises(self) -> Promises:
        if self.engine._store is None:
            # Between close and open; what counted before counts still.
            return self._closed
        return promises_of(self.engine, self.ledger, self.clock)

    # ---- the steps

    def append(self) -> None:
        id = self._partition()
        self._send(self._batch(id, self.random.randint(1, 3), self.random.randint(0, 60)))

    def append_big(self) -> None:
        self._send(self._batch(self._partition(), 1, BYPASS_BYTES + self.random.randint(0, 500)))

    def append_atomic(self) -> None:
        parts = [
            self._batch(self._partition(), self.random.randint(1, 2), self.random.randint(0, 90))
            for _ in range(self.random.randint(2, 4))
        ]
        self._groups += 1
        group = self.ledger.groups[self._groups] = []
        for sent in parts:
            sent.group = self._groups
            group.append(self.ledger.add(sent))

        def answered(done: Pending[list[int]]) -> None:
            if done.error is not None:
                refuse(parts, done.error)
                return
            for sent, offset in zip(parts, done.result(), strict=True):
                sent.offset, sent.is_durable = offset, True

        self.engine.append_atomic([(sent.id, sent.data) for sent in parts]).then(answered)

    def append_idempotent(self) -> None:
        id = self._partition()
        producer_id = 100 + self.random.randint(0, 1)
        sequence = self._sequences.get((id, producer_id), 0)
        sent = self._batch(id, self.random.randint(1, 2), 20, producer_id, sequence)
        self._sequences[id, producer_id] = sequence + len(sent.records)
        self._send(sent)

    def append_repeated(self) -> None:
        """The last acknowledged batch of a producer once more, as after a lost answer."""
        if not self.ledger.last:
            return
        (id, _), sent = self.random.choice(list(self.ledger.last.items()))

        def answered(done: Pending[int]) -> None:
            if done.error is None:
                assert done.result() == sent.offset, f"{id} took a batch twice"

        self.engine.append(id, sent.data).then(answered)

    def trim(self) -> None:
        id = self._partition()
        if id.topic == "compact":
            return
        offsets = self.engine.offsets(id)
        offset = self.random.randint(offsets.start, offsets.high_watermark)
        asked = self.ledger.trims_asked
        asked[id] = max(asked.get(id, 0), offset)

        def answered(done: Pending[None]) -> None:
            if done.error is None:
                trimmed = self.ledger.trims_done
                trimmed[id] = max(trimmed.get(id, 0), offset)

        self.engine.trim(id, offset).then(answered)

    def read(self) -> None:
        id = self._partition()
        offsets = self.engine.offsets(id)
        offset = self.random.randint(offsets.start, offsets.high_watermark)

        def answered(done: Pending[Chunk]) -> None:
            if done.error is not None:
                refuse([], done.error)
                return
            partition = self.engine._store and self.engine._store.partitions.get(id)
            is_kept = partition and partition.weak_to == 0 and partition.settings.fsync == "every"
            for position, header in batches.walk(done.result().data):
                batch = done.result().data[position : position + header.size]
                for record in batches.decode(batch, check_crc=True):
                    serial = serial_of(record)
                    assert self.ledger.sent[serial].id == id
                    if is_kept:
                        self.ledger.shown[id, record.offset] = serial

        self.engine.read(id, offset, 500).then(answered)

    def take_producer_id(self) -> None:
        def answered(done: Pending[int]) -> None:
            if not self._failed(done):
                assert done.result() not in self.ledger.producer_ids, "an id was given twice"
                self.ledger.producer_ids.add(done.result())

        self.engine.producer_id().then(answered)

    def create(self) -> None:
        name = f"temporary-{self.random.randint(0, 1)}"
        if not any(fate.name == name for fate in self.ledger.live()):
            self._create(name, self.random.randint(1, 2))

    def delete(self) -> None:
        fates = [f for f in self.ledger.live() if f.name.startswith("temporary") and f.must_exist]
        if not fates:
            return
        fate = self.random.choice(fates)
        fate.must_exist = False

        def answered(done: Pending[None]) -> None:
            if self._failed(done):
                return
            self.ledger.forget(fate)
            for key in [key for key in self._sequences if key[0].topic == fate.name]:
                del self._sequences[key]

        self.engine.delete(fate.name).then(answered)

    def add_partitions(self) -> None:
        fates = [f for f in self.ledger.live() if f.must_exist and 0 < f.partitions < 4]
        if not fates:
            return
        fate = self.random.choice(fates)

        def answered(done: Pending[Topic]) -> None:
            if done.error is None:
                fate.partitions = max(fate.partitions, done.result().partitions)

        self.engine.alter(fate.name, partitions=fate.partitions + 1).then(answered)

    def alter(self) -> None:
        """The mode `interval` becomes `every`, and back."""
        every = settings_for("every")
        self._altered = settings_for("interval") if self._altered == every else every
        self.engine.alter("interval", settings=self._altered).then(self._check_failed)

    def wait(self) -> None:
        """Time passes: upkeep has its turns. Not now: this step runs on the loop."""
        self.clock.advance(self.random.choice((0.2, 1.0, 2.5)))
        due = [timer for timer in self.scheduler._timers if timer[0] <= self.clock.monotonic()]
        self.scheduler._timers = [t for t in self.scheduler._timers if t not in due]
        for _, _, timer in sorted(due, key=lambda timer: timer[:2]):
            if not timer.is_cancelled:
                timer.call()

    # ---- inside

    def _engine(self) -> LocalEngine:
        return LocalEngine(self.outer, ROOT, self.clock, self._options, self.scheduler)

    def _open(self) -> None:
        """Once more when it failed: the disk is mended then, and nothing was spoilt."""
        try:
            self.engine.open()
        except MillstreamError:
            assert self.may_fail
            check_all_closed(self.disk)
            self.engine.open()

    def _failed(self, done: Pending[T]) -> bool:
        """Whether it failed, with an error of ours, on a disk on which it may."""
        if done.error is None:
            return False
        assert self.may_fail, done.error
        refuse([], done.error)
        return True

    def _check_failed(self, done: Pending[T]) -> None:
        self._failed(done)

    def _create(self, name: str, partitions: int) -> None:
        uuid = self.random.randbytes(16)
        fate = TopicFate(name, uuid, is_compacted=settings_for(name).compact)
        self.ledger.fates[uuid] = fate

        def answered(done: Pending[Topic]) -> None:
            if not self._failed(done):
                fate.partitions = done.result().partitions
                fate.must_exist = True

        self.engine.create(name, partitions, settings_for(name), uuid).then(answered)

    def _partition(self) -> PartitionId:
        return self.random.choice(self._partitions())

    def _partitions(self) -> list[PartitionId]:
        there = [fate for fate in self.ledger.live() if fate.must_exist]
        topics = {topic.name: topic for topic in self.engine.topics()}
        return [
            PartitionId(fate.name, number)
            for fate in there
            if fate.name in topics
            for number in range(min(fate.partitions, topics[fate.name].partitions))
        ]

    def _batch(
        self, id: PartitionId, count: int, size: int, producer_id: int = -1, sequence: int = -1
    ) -> Sent:
        records: list[Record] = []
        for at in range(count):
            self._serial += 1
            is_tombstone = id.topic == "compact" and self.random.random() < 0.15
            records.append(
                Record(
                    offset=at,
                    timestamp=self.clock.wall_ms(),
                    key=self.random.choice(KEYS),
                    value=None if is_tombstone else self.random.randbytes(size),
                    headers=((SERIAL, b"%d" % self._serial),),
                )
            )
        epoch = 0 if producer_id >= 0 else -1
        data = batches.encode(
            records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
        )
        return Sent(id, data, records, producer_id=producer_id)

    def _send(self, sent: Sent) -> None:
        self.ledger.add(sent)
        was_every = self._is_every(sent.id)

        def answered(done: Pending[int]) -> None:
            if done.error is not None:
                refuse([sent], done.error)
                return
            sent.offset = done.result()
            sent.is_durable = was_every and self._is_every(sent.id)
            if sent.producer_id >= 0:
                self.ledger.last[sent.id, sent.producer_id] = sent

        self.engine.append(sent.id, sent.data).then(answered)

    def _is_every(self, id: PartitionId) -> bool:
        partition = self.engine._store and self.engine._store.partitions.get(id)
        return bool(partition and partition.settings.fsync == "every")
