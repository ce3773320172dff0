"""A partition's records straight from its segment files, without the broker.

The broker says which files there are (`manifests.py`). A file is read only up to the offset that a
task wants, which was durable before the task was made. What is found there is trusted as little as
what the log itself finds: each batch is checked, and in a segment that was never compacted each
begins where the last ended. Anything that is not as it should be is for the broker to explain:
`Unusable` says how far reading went, and the reader goes on over the wire, or asks again which
files there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from millstream.log import batch as batches
from millstream.log.batch import HEADER_BYTES
from millstream.log.index import OffsetIndex
from millstream.log.segment import SEAL, SEAL_MAGIC, parse_log_name
from millstream.spark.fetching import Found
from millstream.spark.manifests import PartFiles, SegmentFile

# What is decoded and sent on while it is still in the processor's cache.
READ_BYTES = 2**20


class Unusable(Exception):
    """The files do not have what is wanted, or not yet; `offset` is where to go on."""

    def __init__(self, offset: int, why: str, *, is_missing: bool = False) -> None:
        super().__init__(why)
        self.offset = offset
        # A file is gone: there are others by now.
        self.is_missing = is_missing


def can_see(files: PartFiles) -> bool:
    """Whether this machine has that very directory: its name has the topic's unique id in it."""
    topic = os.path.basename(os.path.dirname(files.directory))
    has_id = files.uuid in topic.replace("-", "") or not files.uuid
    return has_id and os.access(files.directory, os.R_OK | os.X_OK)


def read(files: PartFiles, start: int, end: int) -> Iterator[Found]:
    """Batches with records of [start, end); the first and the last may have others too."""
    if start < files.start_offset:
        raise Unusable(start, f"the log begins at {files.start_offset}")
    position = start
    for index, segment in enumerate(files.segments):
        following = files.segments[index + 1 : index + 2]
        is_before = bool(following) and following[0].base_offset <= position
        if is_before:
            continue
        if position >= end or segment.base_offset >= end:
            return
        if segment.base_offset > position and index == 0:
            break
        for found in _segment(files.directory, segment, position, end):
            position = found.headers[-1][1].next_offset
            yield found
        if following:
            position = _after(files.directory, segment, following[0], position, end)
    if position < end:
        raise Unusable(position, f"the files end before offset {end}")


def _after(
    directory: str, segment: SegmentFile, following: SegmentFile, position: int, end: int
) -> int:
    """Compaction may have taken the last records; damage leaves a gap, which is not passed."""
    if position >= end:
        return position
    covered = _covered(directory, segment)
    if covered is None:
        covered = position
    if covered < following.base_offset:
        raise Unusable(position, f"the log has a gap at offset {covered}")
    return max(position, following.base_offset)


def _covered(directory: str, segment: SegmentFile) -> int | None:
    """One past the last offset that a sealed segment covers."""
    path = os.path.join(directory, segment.name.removesuffix(".log") + ".seal")
    try:
        with open(path, "rb") as file:
            head = file.read(SEAL.size)
    except OSError:
        return None
    if len(head) < SEAL.size:
        return None
    magic, _, next_offset, *_ = SEAL.unpack(head)
    return int(next_offset) if magic == SEAL_MAGIC else None


def _segment(directory: str, segment: SegmentFile, position: int, end: int) -> Iterator[Found]:
    path = os.path.join(directory, segment.name)
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise Unusable(position, f"{segment.name} is gone", is_missing=True) from error
    except OSError as error:
        raise Unusable(position, f"{segment.name}: {error.strerror}") from error
    try:
        place = _place(path, segment, position)
        yield from _batches(file, segment, place, position, end)
    finally:
        os.close(file)


def _place(path: str, segment: SegmentFile, position: int) -> tuple[int, int]:
    """Where in the file to begin, and which offset has to be there."""
    with suppress(OSError):
        with open(path.removesuffix(".log") + ".index", "rb") as file:
            index = OffsetIndex.decode(file.read())
        if index is not None:
            relative, at = index.floor(position - segment.base_offset)
            return at, segment.base_offset + relative
    return 0, segment.base_offset


def _batches(
    file: int, segment: SegmentFile, place: tuple[int, int], position: int, end: int
) -> Iterator[Found]:
    at, expected = place
    name = parse_log_name(segment.name)
    is_exact = name is not None and name[1] == 0
    buffer = bytearray(READ_BYTES)
    while expected < end:
        view = memoryview(buffer)
        size = os.preadv(file, [view], at)
        data = view[:size]
        scan = batches.scan(data, 0, expected, exact=is_exact)
        if not scan.batches:
            if scan.reason == "partial" and size == len(buffer):
                # A batch that is larger than the buffer; its header says how large.
                header = batches.read_header(data[:HEADER_BYTES])
                buffer = bytearray(max(header.size, 2 * len(buffer)))
                continue
            if scan.reason == "invalid":
                raise Unusable(max(position, expected), f"{segment.name} is damaged at {at}")
            # The end of what is written.
            return
        at += scan.end
        expected = scan.next_offset
        headers = [one for one in scan.batches if one[1].next_offset > position]
        if headers:
            yield Found(data[: scan.end], headers, [])
