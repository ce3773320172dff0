"""Looking into a data directory without changing a byte of it: what the offline tools share.

The tools look through an overlay on which the journal's frames are written into their segments,
as the next start would do: a segment is then judged as that start will find it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream.errors import BatchInvalid, FormatUnsupported, PartitionUnknown, StoreUnreadable
from millstream.log import batch as batches
from millstream.log import journal as journals
from millstream.log.batch import Header
from millstream.log.checkpoint import Checkpoint, read_copies
from millstream.log.disk import Disk, SystemDisk, read_file, write_all
from millstream.log.journal import Damage, Kind
from millstream.log.overlay import OverlayDisk
from millstream.log.partition import PartitionId
from millstream.log.recovery import Evidence, Found, find_batch, resolve_generations
from millstream.log.segment import SCAN_BYTES, parse_log_name, read_seal, stem
from millstream.log.store import (
    FORMAT,
    Topic,
    list_topics,
    store_locked,
    topic_directory,
    topic_unknown,
)

_FORMAT_LINE = re.compile(rb"millstream [0-9]+\n")


# ---- the directory


@contextmanager
def reading(disk: SystemDisk, root: str) -> Iterator[None]:
    """Keep brokers away while a tool reads; refuse when one runs."""
    check_root(disk, root)
    path = f"{root}/lock"
    if disk.size_of(path) is None:
        yield
        return
    try:
        lock = disk.share_lock(path)
    except OSError as error:
        raise unreadable(root, error) from error
    if lock is None:
        raise store_locked(disk, root)
    try:
        yield
    finally:
        disk.close(lock)


def check_root(disk: Disk, root: str) -> None:
    """Raise unless this is a data directory that this version knows."""
    try:
        names = disk.list_directory(root)
        known = read_file(disk, f"{root}/format") if "format" in names else None
    except OSError as error:
        raise unreadable(root, error) from error
    if known is None and "topics" not in names:
        raise FormatUnsupported(
            f"{root} is not a data directory: it has no `format` file and no `topics`", path=root
        )
    if known is not None and known != FORMAT and _FORMAT_LINE.fullmatch(known):
        raise FormatUnsupported(
            f"{root} was written by another version of Millstream: its `format` file says "
            f"{known.decode().strip()!r}, and this version reads {FORMAT.decode().strip()!r}",
            path=root,
        )


def unreadable(root: str, error: OSError) -> StoreUnreadable:
    where = error.filename or root
    why = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        text = f"there is no {where}"
    elif isinstance(error, PermissionError):
        text = f"{where}: {why}; run this as the user that the broker runs as"
    else:
        text = f"{where}: {why}"
    return StoreUnreadable(text, path=root)


# ---- what the checkpoint and the journal say


@dataclass(slots=True)
class Survey:
    """A data directory as the next start would find it."""

    root: str
    # The journal's frames are written into the segments here, partition by partition.
    disk: OverlayDisk
    copies: tuple[Checkpoint | None, Checkpoint | None]
    evidence: dict[tuple[bytes, int], Evidence] = field(default_factory=dict)
    frames: int = 0
    damages: list[Damage] = field(default_factory=list)
    # The position of a frame that was being written when the broker ended.
    torn: int | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.copies[0] or self.copies[1]

    def topics(self) -> Iterator[tuple[Topic, list[int]]]:
        return list_topics(self.disk, self.root)


def survey(disk: Disk, root: str) -> Survey:
    overlay = OverlayDisk(disk)
    found = Survey(root, overlay, read_copies(overlay, f"{root}/checkpoint"))
    checkpoint = found.checkpoint
    directory = f"{root}/journal"
    if checkpoint is not None:
        for state in checkpoint.partitions:
            found.evidence[state.uuid, state.partition] = Evidence(state)
    if overlay.size_of(directory) is None:
        return found
    start = checkpoint.journal_position if checkpoint else None
    ended = start or 0
    for frame in journals.read_frames(overlay, directory, start):
        if isinstance(frame, Damage):
            found.damages.append(frame)
            continue
        found.frames += 1
        ended = frame.end
        for entry in frame.entries:
            if entry.kind is Kind.PRODUCER_IDS:
                continue
            known = found.evidence.setdefault((entry.uuid, entry.partition), Evidence())
            if entry.kind is Kind.TRIM:
                known.start_offset = max(known.start_offset, entry.offset)
            else:
                known.entries.append(entry)
    found.torn = journals.find_torn(overlay, directory, ended)
    return found


# ---- one partition


@dataclass(slots=True)
class PartitionFiles:
    """A partition's files, and what is known about them from elsewhere."""

    id: PartitionId
    uuid: bytes
    directory: str
    evidence: Evidence
    # First offset, and the one before which everything was durable once.
    start_offset: int
    durable_to: int
    names: list[str]
    # Segments that count, in order; those that do not, with why; those before the start.
    segments: list[Found]
    obsolete: list[tuple[Found, str]]
    trimmed: list[Found]


def find_partition(found: Survey, name: str) -> PartitionFiles:
    """The files of the partition that a user named, as TOPIC/PARTITION."""
    topic_name, slash, digits = name.rpartition("/")
    if not slash or not digits.isascii() or not digits.isdecimal():
        raise PartitionUnknown(
            f"{name!r} is not a partition: name a topic and a number, such as orders/0",
            partition=name,
        )
    for topic, numbers in found.topics():
        if topic.name == topic_name:
            if int(digits) in numbers:
                return partition_files(found, topic, int(digits))
            raise PartitionUnknown(
                f"topic {topic.name} has partitions 0 to {len(numbers) - 1}; there is no {digits}",
                topic=topic.name,
                partition=int(digits),
            )
    raise topic_unknown(topic_name)


def partition_files(found: Survey, topic: Topic, number: int) -> PartitionFiles:
    disk = found.disk
    directory = f"{found.root}/topics/{topic_directory(topic.name, topic.uuid)}/{number}"
    evidence = found.evidence.get((topic.uuid, number), Evidence())
    state = evidence.state
    durable_to = state.next_offset if state else 0
    kept, _ = resolve_generations(list_segments(disk, directory))
    for entry in evidence.entries:
        durable_to = max(durable_to, batches.read_header(entry.data).next_offset)
        if not any(one.covers(entry.offset) for one in kept):
            _write(disk, f"{directory}/{stem(entry.segment)}.log", entry.data, entry.place)
    kept, obsolete = resolve_generations(list_segments(disk, directory))
    start = max(evidence.start_offset, state.start_offset if state else 0)
    trimmed: list[Found] = []
    while len(kept) > 1 and kept[1].base_offset <= start:
        trimmed.append(kept.pop(0))
    return PartitionFiles(
        id=PartitionId(topic.name, number),
        uuid=topic.uuid,
        directory=directory,
        evidence=evidence,
        start_offset=start,
        durable_to=durable_to,
        names=disk.list_directory(directory),
        segments=kept,
        obsolete=obsolete,
        trimmed=trimmed,
    )


def list_segments(disk: Disk, directory: str) -> list[Found]:
    """The log files, each with its seal when that fits."""
    found: list[Found] = []
    for name in disk.list_directory(directory):
        parsed = parse_log_name(name)
        if parsed is not None:
            path = f"{directory}/{name}"
            size = disk.size_of(path) or 0
            seal = read_seal(disk, path[: -len(".log")])
            found.append(Found(*parsed, size, seal if seal and seal.size == size else None))
    return sorted(found, key=lambda one: (one.base_offset, one.generation))


def _write(disk: Disk, path: str, data: memoryview, position: int) -> None:
    file = disk.open(path, "create")
    try:
        write_all(disk, file, [data], position)
    finally:
        disk.close(file)


# ---- one log file


class Batch(NamedTuple):
    """A batch that is whole and right from outside; its records are not opened yet."""

    position: int
    header: Header
    data: memoryview


class Broken(NamedTuple):
    """Bytes that are no batch, up to the next good one, or to the end of the file."""

    position: int
    data: memoryview
    # The offset that should be here, the one that the next good batch has (-1: there is none).
    offset: int
    resumes_with: int
    reason: str


def was_durable(disk: Disk, files: PartitionFiles, found: Found, broken: Broken) -> bool:
    """Whether these bytes were durable once; if not, they are a tail that a crash tore."""
    path = f"{files.directory}/{stem(found.base_offset, found.generation)}.seal"
    return broken.offset < files.durable_to or disk.size_of(path) is not None


def walk_log(disk: Disk, path: str, base_offset: int, *, exact: bool) -> Iterator[Batch | Broken]:
    """Every byte of a log file, as batches and what lies broken between them.

    `exact` asks for offsets without gaps, which a log has unless it was compacted.
    """
    file = disk.open(path, "read")
    try:
        size = disk.size(file)
        position, next_offset, want = 0, base_offset, SCAN_BYTES
        while position < size:
            data = disk.read(file, min(want, size - position), position)
            view = memoryview(data)
            found = batches.scan(data, 0, next_offset, exact=exact)
            for at, header in found.batches:
                yield Batch(position + at, header, view[at : at + header.size])
            position += found.end
            next_offset = found.next_offset
            want = SCAN_BYTES
            claimed = _claimed_bytes(view[found.end :])
            is_short = found.reason == "partial" and position + len(data) - found.end < size
            if found.reason == "end" or (is_short and found.batches):
                continue
            if is_short and position + claimed <= size:
                want = max(claimed, SCAN_BYTES)
                continue
            rest = disk.read(file, size - position, position)
            at, resumes_with = find_batch(rest, next_offset)
            bad = memoryview(rest)[: at if at > 0 else len(rest)]
            reason = _reason(memoryview(rest), next_offset, exact=exact)
            yield Broken(position, bad, next_offset, resumes_with, reason)
            position += len(bad)
            next_offset = resumes_with
    finally:
        disk.close(file)


def _claimed_bytes(view: memoryview) -> int:
    """What a cut-off batch says that it takes; more than any file has when it says nonsense."""
    try:
        return batches.read_header(view).size
    except BatchInvalid:
        return 2**63 if len(view) >= batches.HEADER_BYTES else 2 * batches.HEADER_BYTES


def _reason(view: memoryview, next_offset: int, *, exact: bool) -> str:
    """Why there is no good batch at the start of these bytes."""
    if not any(view):
        return "there are only zeroes"
    try:
        header = batches.read_header(view)
        if header.size > len(view):
            return f"a batch of {header.size} bytes begins here, and {len(view)} are left"
        batches.verify(view[: header.size], bytes_max=header.size, exact_count=exact)
    except BatchInvalid as error:
        return error.message.removesuffix("; send it again")
    return f"a batch begins with offset {header.base_offset}, and {next_offset} would be next"
