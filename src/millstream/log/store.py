"""The data directory: which partitions there are, the lock, the checkpoint, quarantine.

    format       `millstream 1`; a newer version is refused
    lock         held while a broker runs, with its process id
    checkpoint   see checkpoint.py
    journal/     see journal.py
    topics/<topic>@<uuid>/<partition>/   see segment.py
    quarantine/  what recovery could not read; never deleted

A topic appears, and goes, by one rename of its directory: `topics/new-…` and `topics/gone-…` are
topics that are being made or taken away, and have no `@` in their names.
"""

from __future__ import annotations

import math
import os
import re
import uuid as uuids
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from crc32c import crc32c

from millstream.errors import (
    FormatUnsupported,
    PartitionCountInvalid,
    PartitionUnknown,
    StorageFailed,
    StoreLocked,
    TopicExists,
    TopicNameInvalid,
    TopicUnknown,
)
from millstream.log import journal as journals
from millstream.log.checkpoint import (
    Capture,
    Checkpoint,
    PartitionState,
    capture,
    read_checkpoint,
    write_checkpoint,
)
from millstream.log.disk import (
    Disk,
    close_file,
    never,
    read_file,
    require_synced,
    write_all,
    write_file,
)
from millstream.log.growth import Growth, remove_tree
from millstream.log.journal import Damage, Journal, Kind
from millstream.log.partition import Partition, PartitionId, PartitionSettings, SyncJob
from millstream.log.recovery import Evidence, Finding, Recovery
from millstream.log.segment import Flushed, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator

SettingsFor: TypeAlias = Callable[[str], PartitionSettings]

FORMAT = b"millstream 1\n"
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
# A partition costs a directory and an open file; more than this in one topic is a mistake.
PARTITIONS_MAX = 10_000
# Ids are given out from blocks of this size, so that most need no append.
PRODUCER_ID_BLOCK = 1000
UUID_DIGITS = re.compile(r"[0-9a-f]{32}")
# File systems take names of 255 bytes. Beside the `@` and the UUID, this much of a topic's name
# fits; of a longer one all but the rest, which is the name of an empty directory inside.
TOPIC_NAME_ROOM = 255 - 33
CUT_MARK = "~"
REST_PREFIX = "+"


class Topic(NamedTuple):
    """A topic as the log knows it."""

    name: str
    uuid: bytes
    partitions: int


@dataclass(slots=True)
class StoreOptions:
    """What opening a store takes beside the disk and the directory."""

    settings_for: SettingsFor = field(default=lambda _topic: PartitionSettings())
    journal_file_bytes: int = 16 * 1024 * 1024
    producer_expiry_ms: int = 7 * 24 * 60 * 60 * 1000
    is_thorough: bool = False


class FlushJob(NamedTuple):
    """The new entries of an active segment's indexes, for their files."""

    segment: Segment
    before: Flushed
    path: str
    entries: bytes
    entries_at: int
    times: bytes
    times_at: int


@dataclass(slots=True)
class CheckpointJob:
    """What a checkpoint does on disk, apart from the loop's state, so that a thread can.

    1. sync the segments, their names and their indexes, 2. make the checksums of what is new,
    3. replace the checkpoint. After that, and not before, the journal may be cut.
    """

    disk: Disk
    path: str
    checkpoint: Checkpoint
    syncs: list[SyncJob] = field(default_factory=list)
    flushes: list[FlushJob] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    # How many partitions it has by now, those that have not changed included.
    captured: int = 0

    def run(self, has_failed: Callable[[], bool] = never) -> None:
        """`has_failed`: see `SyncFailed`."""
        for flush in self.flushes:
            _extend(self.disk, flush.path + ".index", flush.entries, flush.entries_at)
            _extend(self.disk, flush.path + ".timeindex", flush.times, flush.times_at)
        for sync in self.syncs:
            sync.run()
        for captured in self.captures:
            captured.finish(self.disk)
            self.checkpoint.partitions.append(captured.state)
        require_synced(has_failed)
        write_checkpoint(self.disk, self.path, self.checkpoint)

    def abandon(self) -> None:
        """It failed: the next one has to do all of it."""
        for flush in self.flushes:
            flush.segment.flushed = flush.before
        for sync in self.syncs:
            sync.abandon()
            sync.partition.changed = True
        for captured in self.captures:
            captured.segment.release()


class Store:
    """An open data directory. `open_store` makes one; one process at a time has it."""

    __slots__ = (
        "_lock",
        "_replayed_from",
        "_states",
        "disk",
        "findings",
        "journal",
        "leader_epoch",
        "next_producer_id",
        "options",
        "partitions",
        "root",
        "topics",
    )

    def __init__(self, disk: Disk, root: str, options: StoreOptions, lock: int) -> None:
        self.disk = disk
        self.root = root
        self.options = options
        self._lock = lock
        self.topics: dict[str, Topic] = {}
        self.partitions: dict[PartitionId, Partition] = {}
        self.findings: list[Finding] = []
        self.leader_epoch = 0
        self.next_producer_id = 0
        # The position in the journal that the last checkpoint names.
        self._replayed_from = -1
        # The checkpoint's entries as last written: only changed partitions make new ones.
        self._states: dict[tuple[bytes, int], PartitionState] = {}
        self.journal = Journal(
            disk, f"{root}/journal", position=0, file_bytes=options.journal_file_bytes
        )

    def partition(self, id: PartitionId) -> Partition:
        found = self.partitions.get(id)
        if found is not None:
            return found
        raise partition_unknown(id, self.topic(id.topic))

    # ---- topics

    def new_topic(
        self, name: str, uuid: bytes, partitions: int, settings: PartitionSettings, now_ms: int
    ) -> Growth:
        """What it takes to make a topic; see growth.py."""
        check_topic_name(name)
        check_partition_count(partitions)
        if name in self.topics:
            raise TopicExists(f"there is a topic {name} already", topic=name)
        return self._growth(Topic(name, uuid, 0), partitions, settings, now_ms)

    def more_partitions(self, name: str, partitions: int, now_ms: int) -> Growth:
        """What it takes to give a topic more partitions, up to so many."""
        topic = self.topic(name)
        check_partition_count(partitions)
        if partitions < topic.partitions:
            raise PartitionCountInvalid(
                f"topic {name} has {topic.partitions} partitions; it cannot have fewer",
                topic=name,
                partitions=partitions,
            )
        settings = self.partitions[PartitionId(name, 0)].settings
        return self._growth(topic, partitions, settings, now_ms)

    def _growth(
        self, topic: Topic, partitions: int, settings: PartitionSettings, now_ms: int
    ) -> Growth:
        is_long = len(topic.name) > TOPIC_NAME_ROOM
        return Growth(
            self.disk,
            topic,
            partitions,
            root=f"{self.root}/topics",
            building=f"new-{topic.uuid.hex()}",
            directory=topic_directory(topic.name, topic.uuid),
            rest=REST_PREFIX + topic.name[TOPIC_NAME_ROOM - 1 :] if is_long else None,
            new_partition=lambda number: self._new_partition(topic, number, settings),
            now_ms=now_ms,
        )

    def take_in(self, growth: Growth) -> Topic:
        """Partitions were made: from now on they are there. Those, too, that were made before
        the next one failed."""
        topic = growth.topic
        for partition in growth.made:
            self.partitions[partition.id] = partition
        if growth.made:
            topic = topic._replace(partitions=topic.partitions + len(growth.made))
            self.topics[topic.name] = topic
        return topic

    def create_topic(
        self, name: str, uuid: bytes, partitions: int, settings: PartitionSettings, now_ms: int
    ) -> Topic:
        """All of it at once, for who has no loop that waits."""
        growth = self.new_topic(name, uuid, partitions, settings, now_ms)
        growth.run()
        return self.take_in(growth)

    def alter_topic(self, name: str, settings: PartitionSettings) -> Topic:
        topic = self.topic(name)
        for number in range(topic.partitions):
            self.partitions[PartitionId(name, number)].settings = settings
        return topic

    def forget_topic(self, name: str) -> str:
        """Take a topic out of the store in one step. Its files are under the path that is given
        back, for `remove_topic_files`; after a crash the next start takes them away."""
        topic = self.topic(name)
        gone = f"{self.root}/topics/gone-{topic.uuid.hex()}"
        self.disk.rename(self._topic_path(topic.name, topic.uuid), gone)
        del self.topics[name]
        for number in range(topic.partitions):
            self.partitions.pop(PartitionId(name, number)).close()
            self._states.pop((topic.uuid, number), None)
        try:
            self.disk.sync_directory(f"{self.root}/topics")
        except OSError as error:
            raise StorageFailed(f"whether {name} is deleted is not known: {error}") from error
        return gone

    def remove_topic_files(self, path: str) -> None:
        remove_tree(self.disk, path)

    def topic(self, name: str) -> Topic:
        topic = self.topics.get(name)
        if topic is None:
            raise topic_unknown(name)
        return topic

    def _topic_path(self, name: str, uuid: bytes) -> str:
        return f"{self.root}/topics/{topic_directory(name, uuid)}"

    def _new_partition(self, topic: Topic, number: int, settings: PartitionSettings) -> Partition:
        return Partition(
            self.disk,
            f"{self._topic_path(topic.name, topic.uuid)}/{number}",
            id=PartitionId(topic.name, number),
            uuid=topic.uuid,
            settings=settings,
            leader_epoch=self.leader_epoch,
        )

    # ---- checkpoints

    @property
    def has_changed(self) -> bool:
        """Whether a checkpoint would say anything new, or let files go that wait for one."""
        return self.journal.position != self._replayed_from or any(
            partition.changed or partition.doomed for partition in self.partitions.values()
        )

    def begin_checkpoint(self) -> CheckpointJob:
        """A checkpoint without partitions: `capture` adds them, one by one, to its end.

        They need not be captured at the same moment. The checkpoint names the journal's position
        of now, when all that frames before it mean is in the partitions. A partition that is
        captured later has some frames in it that are replayed all the same, and that writes the
        same bytes to the same places. So it must be the other way round for none of them: call
        this before the first capture, when no append is under way.
        """
        return CheckpointJob(
            self.disk,
            f"{self.root}/checkpoint",
            Checkpoint(self.leader_epoch, self.journal.position, self.next_producer_id, []),
        )

    def capture(self, partition: Partition, job: CheckpointJob, now_ms: int) -> None:
        """Add a partition as it is now. All its reservations must have been written."""
        job.captured += 1
        if not partition.changed:
            state = self._states[partition.uuid, partition.id.number]
            job.checkpoint.partitions.append(state)
            return
        partition.producers.expire(now_ms - self.options.producer_expiry_ms)
        flush = _begin_flush(partition.active)
        if flush is not None:
            job.flushes.append(flush)
            if flush.entries_at == 0 or flush.times_at == 0:
                partition.names_made += 1
        job.syncs.append(partition.begin_sync())
        job.captures.append(capture(partition))
        # The file stays open until the thread has read it.
        partition.active.hold()
        partition.changed = False

    def finish_checkpoint(self, job: CheckpointJob) -> Iterator[None]:
        """The job is done: take its results over, a partition a step. When all are taken over,
        the journal may be cut."""
        for sync, captured in zip(job.syncs, job.captures, strict=True):
            sync.finish()
            state = captured.state
            self._states[state.uuid, state.partition] = state
            if captured.segment.loaded is not None and not captured.segment.sealed:
                captured.segment.loaded.checks = captured.checks
            captured.segment.release()
            yield
        self._replayed_from = job.checkpoint.journal_position

    def cut_journal(self) -> bool:
        """Let go of one file that the last checkpoint covers; False when there is none."""
        return self.journal.cut(self._replayed_from)

    def checkpoint(self, now_ms: int) -> None:
        """All of it at once. No append may be under way, and everything must be written."""
        job = self.begin_checkpoint()
        try:
            for partition in self.partitions.values():
                self.capture(partition, job, now_ms)
            job.run()
        except BaseException:
            job.abandon()
            raise
        for _ in self.finish_checkpoint(job):
            pass
        while self.cut_journal():
            pass

    # ---- the end

    def close(self) -> None:
        """Close every file and give up the lock. Not a checkpoint: that comes before."""
        for partition in self.partitions.values():
            partition.close()
        self.journal.close()
        close_file(self.disk, self._lock)


def open_store(disk: Disk, root: str, now_ms: int, options: StoreOptions) -> Store:
    """Lock, read the checkpoint, replay the journal, recover every partition, checkpoint.

    The order is what makes it safe to be interrupted: the old checkpoint and journal stay until
    the new checkpoint, which has the new leader epoch, is in place.
    """
    lock = _prepare(disk, root)
    store = Store(disk, root, options, lock)
    try:
        _recover(store, now_ms)
    except BaseException:
        store.close()
        raise
    return store


def _recover(store: Store, now_ms: int) -> None:
    disk, root = store.disk, store.root
    checkpoint = read_checkpoint(disk, f"{root}/checkpoint")
    if checkpoint is None and disk.size_of(f"{root}/checkpoint") is not None:
        store.findings.append(Finding("", "checkpoint ignored", "both copies are damaged"))
    evidence = _gather(store, checkpoint)
    max_epoch = checkpoint.leader_epoch if checkpoint else -1
    for topic, numbers in list_topics(disk, root):
        if any((topic.uuid, number) not in evidence for number in numbers):
            # Somebody who was killed made them, and may not have come to syncing their names.
            disk.sync_directory(store._topic_path(topic.name, topic.uuid))
        for number in numbers:
            partition = store._new_partition(topic, number, store.options.settings_for(topic.name))
            known = evidence.get((topic.uuid, number), Evidence())
            known.is_thorough = store.options.is_thorough or checkpoint is None
            known.is_start_known = checkpoint is not None
            store.partitions[partition.id] = partition
            recovery = Recovery(partition, known, f"{root}/quarantine")
            recovery.run(now_ms)
            store.findings.extend(recovery.findings)
            if not recovery.has_changed and known.state is not None:
                partition.changed = False
                store._states[topic.uuid, number] = known.state
            if checkpoint is None:
                max_epoch = max(max_epoch, recovery.max_epoch)
        store.topics[topic.name] = topic._replace(partitions=len(numbers))
    if checkpoint is None:
        # Nothing else tells which ids were given, so those that were used have to.
        used = [max(one.producers.by_id, default=-1) for one in store.partitions.values()]
        floor = max(used, default=-1) + PRODUCER_ID_BLOCK
        store.next_producer_id = max(store.next_producer_id, floor)
    store.leader_epoch = max_epoch + 1
    for partition in store.partitions.values():
        partition.leader_epoch = store.leader_epoch
    store.checkpoint(now_ms)
    for partition in store.partitions.values():
        partition.sweep(math.inf).run()
    for name in disk.list_directory(f"{root}/journal"):
        if name.endswith((".journal", ".new")):
            disk.unlink(f"{root}/journal/{name}")


def _gather(store: Store, checkpoint: Checkpoint | None) -> dict[tuple[bytes, int], Evidence]:
    """What the checkpoint and the journal say of each partition."""
    evidence: dict[tuple[bytes, int], Evidence] = {}
    directory = f"{store.root}/journal"
    start = None
    if checkpoint is not None:
        start = checkpoint.journal_position
        store.next_producer_id = checkpoint.next_producer_id
        for state in checkpoint.partitions:
            evidence[state.uuid, state.partition] = Evidence(state)
    ended = start or 0
    _sync_journal(store.disk, directory)
    for frame in journals.read_frames(store.disk, directory, start):
        if isinstance(frame, Damage):
            detail = f"frames between positions {frame.start} and {frame.end} cannot be read"
            store.findings.append(Finding("", "journal damaged", detail))
            _quarantine_journal(store, frame)
            continue
        ended = frame.end
        for entry in frame.entries:
            if entry.kind is Kind.PRODUCER_IDS:
                store.next_producer_id = max(store.next_producer_id, entry.offset)
                continue
            known = evidence.setdefault((entry.uuid, entry.partition), Evidence())
            if entry.kind is Kind.TRIM:
                known.start_offset = max(known.start_offset, entry.offset)
            else:
                known.entries.append(entry)
    torn = journals.find_torn(store.disk, directory, ended)
    if torn is not None:
        detail = f"the frame at position {torn} is not whole"
        store.findings.append(Finding("", "journal tail cut", detail))
    # Behind every byte that a frame could be in, so that no position is ever used twice.
    ends = [
        name.first + (store.disk.size_of(name.path) or 0)
        for name in journals.journal_files(store.disk, directory)
    ]
    position = max([checkpoint.journal_position if checkpoint else 0, *ends])
    store.journal = Journal(
        store.disk, directory, position=position, file_bytes=store.options.journal_file_bytes
    )
    return evidence


def _sync_journal(disk: Disk, directory: str) -> None:
    """After a kill, the last frame may be in the page cache alone. It must not be written to one
    segment and then, after a power failure, be gone before it is written to the next."""
    for name in journals.journal_files(disk, directory):
        file = disk.open(name.path, "write")
        try:
            disk.sync(file)
        finally:
            close_file(disk, file)
    disk.sync_directory(directory)


def _quarantine_journal(store: Store, damage: Damage) -> None:
    for name in journals.journal_files(store.disk, f"{store.root}/journal"):
        data = read_file(store.disk, name.path) or b""
        start = max(damage.start - name.first, 0)
        end = min(damage.end - name.first, len(data))
        if start < end and any(data[start:end]):
            path = f"{store.root}/quarantine/journal.{name.first + start:020d}"
            write_file(store.disk, path, data[start:end])


# ---- the directory


def _prepare(disk: Disk, root: str) -> int:
    """Make the directories that are not there, check the format, take the lock."""
    _make_path(disk, root)
    format_path = f"{root}/format"
    known = read_file(disk, format_path)
    names = disk.list_directory(root)
    if known is None and any(name in names for name in ("topics", "journal", "checkpoint")):
        known = b""
    if known is not None and known != FORMAT:
        raise FormatUnsupported(
            f"{root} is not a data directory that this version can read: its `format` file says "
            f"{known[:40].decode(errors='replace')!r}, expected {FORMAT.decode()!r}",
            path=root,
        )
    lock = disk.lock(f"{root}/lock", f"{os.getpid()}\n")
    if lock is None:
        raise store_locked(disk, root)
    try:
        if known is None:
            write_file(disk, format_path, FORMAT)
        for name in ("journal", "topics", "quarantine"):
            if name not in names:
                disk.make_directory(f"{root}/{name}")
        disk.sync_directory(root)
        # Whether a topic is there, or gone, must not change any more once we go by it.
        disk.sync_directory(f"{root}/topics")
        for name in disk.list_directory(f"{root}/topics"):
            if name.startswith(("new-", "gone-")) and "@" not in name:
                remove_tree(disk, f"{root}/topics/{name}")
    except BaseException:
        close_file(disk, lock)
        raise
    return lock


def list_topics(disk: Disk, root: str) -> Iterator[tuple[Topic, list[int]]]:
    for name in disk.list_directory(f"{root}/topics"):
        topic, at, digits = name.rpartition("@")
        if not at or not UUID_DIGITS.fullmatch(digits):
            continue
        path = f"{root}/topics/{name}"
        inside = disk.list_directory(path)
        if topic.endswith(CUT_MARK):
            rest = [one[len(REST_PREFIX) :] for one in inside if one.startswith(REST_PREFIX)]
            topic = "".join([topic[:-1], *rest])
        numbers = sorted(int(one) for one in inside if one.isdecimal())
        # Partitions are added in order; what follows a gap was never answered for.
        whole = [number for at_, number in enumerate(numbers) if at_ == number]
        yield Topic(topic, bytes.fromhex(digits), len(whole)), whole


def store_locked(disk: Disk, root: str) -> StoreLocked:
    pid = (read_file(disk, f"{root}/lock") or b"").decode(errors="replace").strip()
    return StoreLocked(
        f"{root} is in use: a broker runs on it already, with process id {pid or 'unknown'}, or "
        "`mill log` is reading it; wait or stop it, or choose another data directory",
        path=root,
        pid=pid,
    )


def topic_directory(name: str, uuid: bytes) -> str:
    """The name of a topic's directory."""
    if len(name) > TOPIC_NAME_ROOM:
        name = name[: TOPIC_NAME_ROOM - 1] + CUT_MARK
    return f"{name}@{uuid.hex()}"


def check_topic_name(name: str) -> None:
    if not TOPIC_NAME.fullmatch(name) or name in (".", ".."):
        raise TopicNameInvalid(
            f"{name[:260]!r} is not a topic name: 1 to 249 of letters, digits, `.`, `_` and `-`, "
            "and not `.` or `..` alone",
            topic=name[:260],
        )


def check_partition_count(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise PartitionCountInvalid(
            f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}",
            partitions=partitions,
        )


def topic_unknown(name: str) -> TopicUnknown:
    return TopicUnknown(f"there is no topic {name[:260]}", topic=name[:260])


def partition_unknown(id: PartitionId, topic: Topic) -> PartitionUnknown:
    return PartitionUnknown(
        f"topic {id.topic} has partitions 0 to {topic.partitions - 1}; there is no {id.number}",
        topic=id.topic,
        partition=id.number,
    )


def new_uuid() -> bytes:
    return uuids.uuid4().bytes


def _make_path(disk: Disk, path: str) -> None:
    """The name of one that is there already is synced too: who made it may have been killed."""
    parent = os.path.dirname(path)
    if parent == path:
        return
    if disk.size_of(path) is None:
        _make_path(disk, parent)
        disk.make_directory(path)
    with suppress(PermissionError):
        disk.sync_directory(parent)


# ---- indexes of active segments


def _begin_flush(segment: Segment) -> FlushJob | None:
    """What the index files lack. They count from here on, unless the checkpoint fails."""
    loaded, done = segment.loaded, segment.flushed
    assert loaded is not None
    if len(loaded.index) == done.index_count and len(loaded.times) == done.time_count:
        return None
    index = loaded.index.encode(done.index_count)
    times = loaded.times.encode(done.time_count)
    segment.flushed = Flushed(
        len(loaded.index),
        crc32c(index, done.index_crc),
        len(loaded.times),
        crc32c(times, done.time_crc),
    )
    return FlushJob(
        segment, done, segment.path, index, 8 * done.index_count, times, 12 * done.time_count
    )


def _extend(disk: Disk, path: str, content: bytes, position: int) -> None:
    file = disk.open(path, "create")
    try:
        write_all(disk, file, [content], position)
        disk.sync(file)
    finally:
        close_file(disk, file)
