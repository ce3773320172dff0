"""What a store has been asked, what it has answered, and hence what it must still have.

The ledger is kept while a script runs. `Promises` is what it means at one moment, when the plug
is pulled. `check_promises` opens what is left of the disk and holds it to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.manual import ManualScheduler
from faults.simulated_disk import SimulatedDisk, _walk
from millstream.clock import ManualClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.errors import MillstreamError, SequenceDuplicate
from millstream.log import batch as batches
from millstream.log.checkpoint import read_checkpoint
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.log.batch import Record
    from millstream.log.disk import Disk

ROOT = "/data"
SERIAL = "serial"

# What recovery never has to say after a power failure alone.
DAMAGE = {"damage", "gap", "journal damaged", "checkpoint ignored", "seal ignored", "seal rebuilt"}


@dataclass(slots=True, eq=False)
class Sent:
    """One batch for one partition, and what came of it."""

    id: PartitionId
    data: bytes
    records: list[Record]
    group: int = -1
    producer_id: int = -1
    offset: int = -1
    # Answered, and the answer says that it stays.
    is_durable: bool = False
    # Refused in a way that leaves nothing behind.
    is_refused: bool = False

    @property
    def next_offset(self) -> int:
        return self.offset + len(self.records)


@dataclass(slots=True)
class TopicFate:
    """A topic by its UUID, because its name may be used again."""

    name: str
    uuid: bytes
    partitions: int = 0
    must_exist: bool = False
    may_exist: bool = True
    is_compacted: bool = False


@dataclass(slots=True)
class PartitionPromise:
    """Offsets before `end` must be there, from `start` on, which is at most `start_max`."""

    start: int = 0
    start_max: int = 0
    end: int = 0


@dataclass(slots=True)
class Ledger:
    sent: dict[int, Sent] = field(default_factory=dict)
    groups: dict[int, list[Sent]] = field(default_factory=dict)
    fates: dict[bytes, TopicFate] = field(default_factory=dict)
    producer_ids: set[int] = field(default_factory=set)
    trims_asked: dict[PartitionId, int] = field(default_factory=dict)
    trims_done: dict[PartitionId, int] = field(default_factory=dict)
    shown: dict[tuple[PartitionId, int], int] = field(default_factory=dict)
    # The last acknowledged batch of each producer in each partition.
    last: dict[tuple[PartitionId, int], Sent] = field(default_factory=dict)

    def add(self, sent: Sent) -> Sent:
        for record in sent.records:
            self.sent[serial_of(record)] = sent
        return sent

    def live(self) -> Iterator[TopicFate]:
        return (fate for fate in self.fates.values() if fate.may_exist)

    def forget(self, fate: TopicFate) -> None:
        """The topic is gone for good: nothing of it may be found under its name later."""
        fate.may_exist = fate.must_exist = False
        for sent in self.sent.values():
            if sent.id.topic == fate.name:
                sent.is_durable, sent.is_refused = False, True
        for key in [key for key in self.shown if key[0].topic == fate.name]:
            del self.shown[key]
        for key in [key for key in self.last if key[0].topic == fate.name]:
            del self.last[key]
        for trims in (self.trims_asked, self.trims_done):
            for id in [id for id in trims if id.topic == fate.name]:
                del trims[id]


@dataclass(slots=True)
class Promises:
    ledger: Ledger
    partitions: dict[PartitionId, PartitionPromise]
    now_ms: int
    now_monotonic: float
    # Whether what it says of damage counts: only the plug was pulled.
    is_clean: bool = True


def serial_of(record: Record) -> int:
    (value,) = [value for name, value in record.headers if name == SERIAL]
    assert value is not None
    return int(value)


def promises_of(engine: LocalEngine, ledger: Ledger, clock: ManualClock) -> Promises:
    """As of now, for a crash now."""
    store = engine._store
    assert store is not None
    partitions: dict[PartitionId, PartitionPromise] = {}
    for id, partition in store.partitions.items():
        asked = max(ledger.trims_asked.get(id, 0), partition.start_offset)
        promise = PartitionPromise(start=ledger.trims_done.get(id, 0))
        kept = asked if partition.settings.compact else partition.retained_from(clock.wall_ms())
        promise.start_max = max(asked, kept, partition.start_offset)
        never_weak = partition.weak_to == 0 and partition.settings.fsync == "every"
        promise.end = partition.high_watermark if never_weak else partition.synced_to
        partitions[id] = promise
    return Promises(ledger, partitions, clock.wall_ms(), clock.monotonic())


def open_engine(
    disk: Disk, options: LocalOptions, now_ms: int, now_monotonic: float
) -> tuple[LocalEngine, ManualScheduler]:
    scheduler = ManualScheduler(disk, ManualClock(now_ms, now_monotonic))
    engine = LocalEngine(disk, ROOT, scheduler.clock, options, scheduler)
    engine.open()
    return engine, scheduler


def read_all(
    engine: LocalEngine, scheduler: ManualScheduler, id: PartitionId
) -> list[tuple[bytes, list[Record]]]:
    """Every visible batch with its records."""
    found: list[tuple[bytes, list[Record]]] = []
    offset = engine.offsets(id).start
    while True:
        pending = engine.read(id, offset, 1 << 20)
        scheduler.run()
        chunk = pending.result()
        if not len(chunk.data):
            return found
        for position, header in batches.walk(chunk.data):
            batch = bytes(chunk.data[position : position + header.size])
            found.append((batch, batches.decode(batch, check_crc=True)))
        offset = chunk.next_offset


def check_promises(disk: SimulatedDisk, promises: Promises, options: LocalOptions) -> None:
    """Open, compare, go on, open again, compare again."""
    checkpoint = read_checkpoint(disk, f"{ROOT}/checkpoint")
    for state in checkpoint.partitions if checkpoint else ():
        fate = promises.ledger.fates.get(state.uuid)
        if fate is not None and fate.may_exist:
            promise = promises.partitions.get(PartitionId(fate.name, state.partition))
            if promise is not None:
                promise.end = max(promise.end, state.next_offset)
    engine, scheduler = open_engine(disk, options, promises.now_ms, promises.now_monotonic)
    if promises.is_clean:
        assert not [one for one in engine.findings if one.what in DAMAGE], engine.findings
    check_topics(engine, promises.ledger)
    seen = check_partitions(engine, scheduler, promises)
    check_groups(promises.ledger, seen)
    check_producers(engine, scheduler, promises.ledger, seen)
    added = go_on(engine, scheduler)
    before = everything(engine, scheduler)
    assert all(before[id][-1][0][16:] == data[16:] for id, data in added.items())
    if disk.operations % 2:
        # The last thing it did was an atomic append to everywhere, so everything is durable.
        after = disk.crash("nothing")
    else:
        engine.close()
        after = disk
    engine, scheduler = open_engine(after, options, promises.now_ms, promises.now_monotonic)
    assert everything(engine, scheduler) == before
    if after is disk:
        check_quiet(engine)
    engine.close()


def check_all_closed(disk: SimulatedDisk) -> None:
    """No file was left open."""
    if disk._handles:
        paths = {id(node): path for path, node in _walk("", disk._root)}
        nodes = [handle.node for handle in disk._handles.values()]
        raise AssertionError(f"left open: {[paths.get(id(node), 'removed') for node in nodes]}")


def check_quiet(engine: LocalEngine) -> None:
    """After a stop in good order there is nothing to repair; files may be left to take away."""
    assert {one.what for one in engine.findings} <= {"removed"}, engine.findings


def everything(
    engine: LocalEngine, scheduler: ManualScheduler
) -> dict[PartitionId, list[tuple[bytes, list[Record]]]]:
    return {
        PartitionId(topic.name, number): read_all(
            engine, scheduler, PartitionId(topic.name, number)
        )
        for topic in engine.topics()
        for number in range(topic.partitions)
    }


def check_topics(engine: LocalEngine, ledger: Ledger) -> None:
    there = {topic.uuid: topic for topic in engine.topics()}
    for uuid, topic in there.items():
        assert uuid in ledger.fates, f"a topic that nobody made: {topic}"
        assert ledger.fates[uuid].may_exist, f"a topic that was deleted: {topic}"
    for uuid, fate in ledger.fates.items():
        if fate.must_exist:
            assert uuid in there, f"a topic is gone: {fate}"
            assert there[uuid].partitions >= fate.partitions, f"partitions are gone: {fate}"


def check_partitions(
    engine: LocalEngine, scheduler: ManualScheduler, promises: Promises
) -> dict[int, int]:
    """Compare every partition; answers the offset of each record that is there, by serial."""
    seen: dict[int, int] = {}
    for topic in engine.topics():
        fate = promises.ledger.fates[topic.uuid]
        for number in range(topic.partitions):
            id = PartitionId(topic.name, number)
            offsets = engine.offsets(id)
            promise = promises.partitions.get(id, PartitionPromise())
            if id not in promises.partitions and not fate.must_exist:
                # Its deletion was under way: it may be back, and begins where it began then.
                promise.start_max = offsets.start
            assert promise.start <= offsets.start, f"{id} starts before its trim: {offsets}"
            assert offsets.start <= promise.start_max, f"{id} lost its start: {offsets} {promise}"
            assert offsets.high_watermark >= promise.end, f"{id} lost its end: {offsets} {promise}"
            found = read_all(engine, scheduler, id)
            here = check_records(id, found, promises.ledger, fate)
            if not fate.is_compacted:
                check_no_holes(id, offsets.start, offsets.high_watermark, here)
            check_durable(id, offsets.start, here, promises.ledger, fate)
            assert seen.keys().isdisjoint(here)
            seen |= here
    return seen


def check_records(
    id: PartitionId,
    found: list[tuple[bytes, list[Record]]],
    ledger: Ledger,
    fate: TopicFate,
) -> dict[int, int]:
    """Nothing that nobody sent, nothing changed, nothing twice."""
    here: dict[int, int] = {}
    for batch, records in found:
        for record in records:
            serial = serial_of(record)
            sent = ledger.sent.get(serial)
            assert sent is not None, f"{id} has a record that was never sent: {record}"
            assert sent.id == id, f"{id} has a record of {sent.id}"
            assert not sent.is_refused, f"{id} has a record that was refused: {record}"
            assert serial not in here, f"{id} has a record twice: {record}"
            index = next(i for i, one in enumerate(sent.records) if serial_of(one) == serial)
            wanted = sent.records[index]
            assert (record.timestamp, record.key, record.value, record.headers) == (
                wanted.timestamp,
                wanted.key,
                wanted.value,
                wanted.headers,
            )
            if sent.offset >= 0:
                assert record.offset == sent.offset + index, f"{id} moved a record: {record}"
            if not fate.is_compacted:
                assert batch[16:] == sent.data[16:], f"{id} changed a batch"
            here[serial] = record.offset
    return here


def check_no_holes(id: PartitionId, start: int, end: int, here: dict[int, int]) -> None:
    offsets = sorted(offset for offset in here.values() if offset >= start)
    assert offsets == list(range(start, end)), f"{id} has a hole: {start} to {end}: {offsets}"


def check_durable(
    id: PartitionId, start: int, here: dict[int, int], ledger: Ledger, fate: TopicFate
) -> None:
    newest: dict[bytes | None, int] = {}
    for sent in ledger.sent.values():
        if sent.id == id and sent.offset >= 0:
            for at, record in enumerate(sent.records):
                newest[record.key] = max(newest.get(record.key, -1), sent.offset + at)
    for serial, sent in ledger.sent.items():
        if sent.id != id or not sent.is_durable or sent.next_offset <= start or serial in here:
            continue
        for at, record in enumerate(sent.records):
            if serial_of(record) != serial or sent.offset + at < start:
                continue
            if fate.is_compacted:
                is_superseded = newest[record.key] > sent.offset + at
                later = [offset for offset in here.values() if offset > sent.offset + at]
                assert is_superseded or record.value is None, f"{id} lost {record} {later}"
            else:
                raise AssertionError(f"{id} lost offset {sent.offset + at}: {record}")
    if not fate.is_compacted:
        for (shown_id, offset), serial in ledger.shown.items():
            if shown_id == id and offset >= start:
                assert here.get(serial) == offset, f"{id} lost what a reader saw at {offset}"


def check_groups(ledger: Ledger, seen: dict[int, int]) -> None:
    for parts in ledger.groups.values():
        there = set()
        for sent in parts:
            fate = next((f for f in ledger.live() if f.name == sent.id.topic), None)
            if fate is None or not fate.must_exist or fate.is_compacted or sent.is_refused:
                continue
            if ledger.trims_asked.get(sent.id, 0) or fate.name.startswith("kept"):
                continue
            there.add(serial_of(sent.records[0]) in seen)
        assert len(there) < 2, f"an atomic append is there in part: {[s.id for s in parts]}"


def check_producers(
    engine: LocalEngine, scheduler: ManualScheduler, ledger: Ledger, seen: dict[int, int]
) -> None:
    """A repeat of an acknowledged batch is recognised, and ids are new."""
    there = {topic.name for topic in engine.topics()}
    for (id, _), sent in ledger.last.items():
        is_there = sent.is_durable or serial_of(sent.records[0]) in seen
        if id.topic not in there or not is_there:
            continue
        pending = engine.append(id, sent.data)
        scheduler.run()
        if not isinstance(pending.error, SequenceDuplicate):
            assert pending.result() == sent.offset, f"{id} took a batch of a producer twice"
    if ledger.fates:
        given = engine.producer_id()
        scheduler.run()
        assert given.result() not in ledger.producer_ids


def go_on(engine: LocalEngine, scheduler: ManualScheduler) -> dict[PartitionId, bytes]:
    """Append to every partition, alone and all together."""
    added: dict[PartitionId, bytes] = {}
    ids = [PartitionId(t.name, n) for t in engine.topics() for n in range(t.partitions)]
    for round_, size in enumerate((10, 900, 30)):
        ends = {id: engine.offsets(id).high_watermark for id in ids}
        for id in ids:
            record = (scheduler.clock.wall_ms(), b"%d" % round_, b"on" * size, [(SERIAL, b"-1")])
            added[id] = batches.encode([record])
        if round_ < 2:
            pendings = [engine.append(id, added[id]) for id in ids]
            scheduler.run()
            answers = [pending.result() for pending in pendings]
        else:
            together = engine.append_atomic(list(added.items()))
            scheduler.run()
            answers = together.result()
        assert answers == [ends[id] for id in ids]
    return added


def refuse(sent: list[Sent], error: BaseException | None) -> None:
    """Only errors that say that nothing was kept make a refusal."""
    assert isinstance(error, MillstreamError), error
    if error.code not in ("outcome_unknown", "storage_failed"):
        for one in sent:
            one.is_refused = True
