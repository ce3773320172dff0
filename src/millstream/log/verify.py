"""Checking a data directory, every byte of it, without changing any.

`verify` gives what it notices, file by file. It must have the directory to itself: see
`offline.reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.disk import Disk, read_file
from millstream.log.journal import JournalFile, journal_files
from millstream.log.offline import PartitionFiles, Survey, partition_files, survey
from millstream.log.recovery import SIDECARS, quarantine_name
from millstream.log.segment import parse_log_name, stem
from millstream.log.store import FORMAT, REST_PREFIX, Topic, list_topics, topic_directory
from millstream.log.verify_segment import Remark, SegmentCheck, Severity, Tally

__all__ = ["Remark", "Severity", "Tally", "log_bytes", "verify"]

ROOT_NAMES = frozenset(
    ("format", "lock", "checkpoint", "journal", "topics", "quarantine", "views", "snapshots")
)


def verify(
    disk: Disk, root: str, tally: Tally, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Remark]:
    """Everything that is wrong or worth knowing. `progress` gets bytes of logs as they are read."""
    found = survey(disk, root)
    yield from _check_root(found)
    yield from _check_checkpoint(found)
    yield from _check_journal(found)
    quarantine = _names(found, "quarantine")
    for name in quarantine:
        size = found.disk.size_of(f"{root}/quarantine/{name}") or 0
        yield Remark("info", f"quarantine/{name}", None, None, f"{size} bytes were put aside")
    yield from _check_topics(found)
    for topic, numbers in found.topics():
        for number in numbers:
            tally.partitions += 1
            files = partition_files(found, topic, number)
            yield from _check_partition(found, files, frozenset(quarantine), tally, progress)


def log_bytes(disk: Disk, root: str) -> int:
    """How much `progress` will be told of, about."""
    total = 0
    for topic, numbers in list_topics(disk, root):
        for number in numbers:
            directory = f"{root}/topics/{topic_directory(topic.name, topic.uuid)}/{number}"
            total += sum(
                disk.size_of(f"{directory}/{name}") or 0
                for name in disk.list_directory(directory)
                if parse_log_name(name)
            )
    return total


def _names(found: Survey, directory: str) -> list[str]:
    path = f"{found.root}/{directory}"
    return found.disk.list_directory(path) if found.disk.size_of(path) is not None else []


# ---- the files at the top


def _check_root(found: Survey) -> Iterator[Remark]:
    known = read_file(found.disk, f"{found.root}/format")
    if known != FORMAT:
        says = "is missing" if known is None else f"says {known[:40].decode(errors='replace')!r}"
        text = f"the file {says}, expected {FORMAT.decode()!r}; without it no broker starts here"
        yield Remark("error", "format", None, None, text)
    names = found.disk.list_directory(found.root)
    yield from (
        Remark("warning", name, None, None, "the directory is missing: the next start makes it")
        for name in ("journal", "topics", "quarantine")
        if name not in names
    )
    for name in names:
        if name.removesuffix(".new") not in ROOT_NAMES:
            yield _unknown(name)
        elif name.endswith(".new"):
            yield Remark("info", name, None, None, "left over from a write that did not finish")


def _check_checkpoint(found: Survey) -> Iterator[Remark]:
    if found.disk.size_of(f"{found.root}/checkpoint") is None:
        text = (
            "the file is missing: the next start reads every byte, and records that were trimmed "
            "but not yet removed come back"
        )
        yield Remark("error", "checkpoint", None, None, text)
        return
    size = found.disk.size_of(f"{found.root}/checkpoint") or 0
    damaged = [at for at, copy in enumerate(found.copies) if copy is None]
    if len(damaged) == 2:
        text = "both copies are damaged: the next start reads every byte"
        yield Remark("error", "checkpoint", 0, None, text)
    elif damaged:
        text = f"copy {damaged[0] + 1} of 2 is damaged; the other one counts"
        yield Remark("error", "checkpoint", damaged[0] * (size // 2), None, text)


def _check_journal(found: Survey) -> Iterator[Remark]:
    directory = f"{found.root}/journal"
    names = _names(found, "journal")
    files = journal_files(found.disk, directory) if names else []
    for damage in found.damages:
        text = f"frames between positions {damage.start} and {damage.end} cannot be read"
        yield _in_journal("error", files, damage.start, text)
    if found.torn is not None:
        text = "a torn last frame, of appends that were never answered: the next start drops it"
        yield _in_journal("warning", files, found.torn, text)
    for evidence in found.evidence.values():
        for entry in evidence.entries:
            try:
                batches.verify(entry.data, bytes_max=len(entry.data))
            except BatchInvalid as error:
                text = f"a frame is whole but has a wrong batch in it: {error.message}"
                yield Remark("error", "journal", None, entry.offset, text)
    known = {file.path.rpartition("/")[2] for file in files} | {"spare"}
    for name in names:
        if name.endswith(".new"):
            text = "left over from a write that did not finish"
            yield Remark("info", f"journal/{name}", None, None, text)
        elif name not in known:
            yield _unknown(f"journal/{name}")


def _in_journal(
    severity: Severity, files: list[JournalFile], position: int, message: str
) -> Remark:
    """A remark on a position, which counts from the first file that there ever was."""
    file = max((one for one in files if one.first <= position), default=files[0])
    place = f"journal/{file.path.rpartition('/')[2]}"
    return Remark(severity, place, max(position - file.first, 0), None, message)


def _unknown(place: str) -> Remark:
    return Remark("info", place, None, None, "not a file of Millstream's; it is left alone")


# ---- topics


def _check_topics(found: Survey) -> Iterator[Remark]:
    """Directories that are there and should not be, and the other way round."""
    opened: dict[tuple[bytes, int], str] = {}
    directories = _names(found, "topics")
    named: dict[str, str] = {}
    for topic, numbers in found.topics() if directories else ():
        directory = topic_directory(topic.name, topic.uuid)
        directories.remove(directory)
        if topic.name in named:
            text = f"there are two topics of this name: see topics/{named[topic.name]} too"
            yield Remark("error", f"topics/{directory}", None, None, text)
        named[topic.name] = directory
        opened |= {(topic.uuid, number): directory for number in numbers}
        yield from _check_topic(found, topic, numbers)
    for name in directories:
        if name.startswith(("new-", "gone-")):
            text = "a topic that was being made or deleted: the next start takes it away"
            yield Remark("warning", f"topics/{name}", None, None, text)
        else:
            yield _unknown(f"topics/{name}")
    topics = {topic.uuid: topic.name for topic, _ in found.topics()} if named else {}
    for uuid, number in found.evidence:
        if uuid in topics and (uuid, number) not in opened:
            text = "the partition's directory is missing, and its records with it"
            yield Remark("error", f"{topics[uuid]}/{number}", None, None, text)


def _check_topic(found: Survey, topic: Topic, numbers: list[int]) -> Iterator[Remark]:
    directory = f"topics/{topic_directory(topic.name, topic.uuid)}"
    expected = {str(number) for number in numbers}
    for name in _names(found, directory):
        if name in expected or name.startswith(REST_PREFIX):
            continue
        if name.isdecimal():
            text = f"partitions before it are missing, so it is not opened; make {len(numbers)}"
            yield Remark("error", f"{topic.name}/{name}", None, None, text)
        else:
            yield _unknown(f"{directory}/{name}")


# ---- partitions


def _check_partition(
    found: Survey,
    files: PartitionFiles,
    quarantine: frozenset[str],
    tally: Tally,
    progress: Callable[[int], None],
) -> Iterator[Remark]:
    yield from _check_names(files)
    checkpoint = found.checkpoint
    state = files.evidence.state
    end, epoch = files.start_offset, -1
    for at, one in enumerate(files.segments):
        place = f"{files.id}/{stem(one.base_offset, one.generation)}.log"
        if one.base_offset > end:
            is_named = state is not None and state.segment == one.base_offset
            is_known = is_named or one.seal is not None or one.base_offset < files.durable_to
            yield _gap(files, end, one.base_offset, quarantine, is_known=is_known)
        elif at and one.base_offset < end:
            text = f"begins at offset {one.base_offset}, but the segment before ends at {end}"
            yield Remark("error", place, 0, one.base_offset, text)
            continue
        is_last = at == len(files.segments) - 1
        follows = files.durable_to if is_last else files.segments[at + 1].base_offset
        check = SegmentCheck(
            found.disk,
            files,
            one,
            epoch=epoch,
            epoch_max=checkpoint.leader_epoch if checkpoint else None,
            tally=tally,
            progress=progress,
        )
        try:
            yield from check.run(is_last=is_last, follows=follows)
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
            yield Remark("error", place, None, one.base_offset, text)
        end, epoch = check.next_offset, check.epoch
    if end < files.durable_to:
        yield _gap(files, end, files.durable_to, quarantine, is_known=True)


def _gap(
    files: PartitionFiles, first: int, after: int, quarantine: frozenset[str], *, is_known: bool
) -> Remark:
    name = quarantine_name(files.id, files.uuid, first)
    missing = f"offsets {first} to {after - 1} are missing"
    place = str(files.id)
    if not is_known:
        text = f"{missing}, and nothing says that what follows was durable: it is set aside"
        return Remark("warning", place, None, first, f"{text} at the next start")
    if name in quarantine:
        text = f"{missing}, known since an earlier repair or start: see quarantine/{name}"
        return Remark("warning", place, None, first, text)
    return Remark("error", place, None, first, missing)


def _check_names(files: PartitionFiles) -> Iterator[Remark]:
    stems = {name[: -len(".log")] for name in files.names if parse_log_name(name)}
    for name in files.names:
        place = f"{files.id}/{name}"
        if parse_log_name(name):
            continue
        if name.endswith(".new"):
            text = "left over from a write that did not finish: the next start removes it"
            yield Remark("warning", place, None, None, text)
        elif name.endswith(SIDECARS):
            if name.rpartition(".")[0] not in stems:
                text = "left over without its log: the next start removes it"
                yield Remark("warning", place, None, None, text)
        else:
            yield _unknown(place)
    for one, why in files.obsolete:
        place = f"{files.id}/{stem(one.base_offset, one.generation)}.log"
        yield Remark("info", place, None, None, f"{why}: the next start removes it")
    for one in files.trimmed:
        place = f"{files.id}/{stem(one.base_offset, one.generation)}.log"
        text = "before the start of the log: the next start removes it"
        yield Remark("info", place, None, None, text)
