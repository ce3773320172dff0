"""Staged writes as values, and as records of their internal topics.

What is staged lies in `__staged`: batches whose records are entries.

    key    1  `b`: a batch for a partition. `s`: schedules, a batch for the topic of schedules
          16  UUID of the topic
           4  partition, big-endian; -1 for schedules
           8  when schedules are due, else 0
              the topic's name
    value     the batch as it goes there, byte for byte

One record batch of `__staged` holds entries of one part, up to about a mebibyte: that is what one
step of a commit copies. Who wrote what, and which batch of a writer is committed, is the view of
writers, in `__writers`:

    b"w" writer   →  the last batch that is committed
    b"c" writer   →  the batch that is being committed, and its parts
    b"p" writer   →  how far that is
    b"s" part     →  what was staged as this part, and where it lies              all JSON
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from millstream.errors import ParameterInvalid, WriterNameInvalid
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.wire.staged import WRITER_NAME

PARTITION = PartitionId("__staged", 0)
SETTINGS = PartitionSettings(
    fsync="every",
    segment_bytes=64 * 1024 * 1024,
    retention_age_ms=None,
    retention_bytes=None,
    batch_bytes_max=64 * 1024 * 1024,
)
# A step is one journal frame, which has at most 64 MiB: there must be room for one batch, and for
# what is forgotten with the last step.
ENTRY_BYTES_MAX = 48 * 1024 * 1024
FORGOTTEN_AT_ONCE = 10_000
# So long a writer is known after its final batch: longer than anybody repeats that commit, whose
# answer may have been lost. And so many of these; each is a few hundred bytes of memory.
FINAL_KEPT_MS = 60 * 60 * 1000
FINALS_MAX = 10_000
# Numbers of batches are 63 bits.
BATCH_MAX = 2**63 - 1

LAST, COMMITTING, PROGRESS, PART = b"w", b"c", b"p", b"s"
FOR_PARTITION, FOR_SCHEDULES = b"b", b"s"

_ENTRY = struct.Struct(">c16siq")
_WRITER = re.compile(WRITER_NAME)


@dataclass(frozen=True, slots=True)
class StagedOptions:
    """As the settings have them."""

    writers_max: int = 10_000
    # Of all writers together; of one commit.
    parts_max: int = 100_000
    commit_parts_max: int = 10_000
    bytes_max: int = 64 * 1024**3
    retention_ms: int = 24 * 60 * 60 * 1000
    # Commits that copy, and requests that are checked and stored, at the same time: a request takes
    # three times its body meanwhile. Others wait in line.
    commits_at_once: int = 4
    stages_at_once: int = 16
    # Of one step: a few milliseconds of the disk. A batch that is larger goes alone.
    step_bytes: int = 1024 * 1024
    # Fewer bytes than these are not worth cutting the log, or moving anything in it.
    cut_bytes: int = 16 * 1024 * 1024
    move_bytes: int = 256 * 1024 * 1024


class TopicRef(msgspec.Struct, frozen=True, array_like=True):
    """A topic as it was when something was staged for it."""

    uuid: bytes
    name: str


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A batch of `__staged`: its base offset, how many records are in its entries, its bytes."""

    offset: int
    records: int
    bytes: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request has staged."""

    writer: str
    batch: int
    task: int
    attempt: int
    staged_ms: int
    records: int
    scheduled: int
    # Of the batches as they were sent.
    bytes: int
    topics: list[TopicRef]
    places: list[Place]


class Last(msgspec.Struct, frozen=True, array_like=True):
    """The last batch that a writer has committed."""

    batch: int
    records: int
    # Records that were not copied, by why.
    skipped: dict[str, int]
    committed_ms: int
    # For whom; None when nobody said so.
    owner: str | None = None
    # Whether the writer will not write again, and is forgotten after a while.
    is_final: bool = False


class Committing(msgspec.Struct, frozen=True, array_like=True):
    """What a writer is committing. Once this is on disk, it will be committed."""

    batch: int
    parts: list[str]
    started_ms: int
    owner: str | None = None
    is_final: bool = False


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a commit is: so many batches of `__staged` are copied."""

    at: int = 0
    records: int = 0
    skipped: dict[str, int] = {}


class EntryKey(NamedTuple):
    """Where an entry is to go."""

    kind: bytes
    uuid: bytes
    partition: int
    due_ms: int
    topic: str

    def encode(self) -> bytes:
        return _ENTRY.pack(*self[:4]) + self.topic.encode()


def read_key(key: bytes) -> EntryKey:
    kind, uuid, partition, due_ms = _ENTRY.unpack_from(key)
    return EntryKey(kind, uuid, partition, due_ms, key[_ENTRY.size :].decode())


def check_writer(name: str) -> None:
    if _WRITER.fullmatch(name) is None:
        shown = name.encode(errors="replace").decode()[:60]
        raise WriterNameInvalid(
            f"{shown!r} is no name of a writer; take 1 to 249 letters, digits, dots, underscores "
            "and hyphens",
            writer=shown,
        )


def check_owner(owner: str | None) -> None:
    if owner is not None and _WRITER.fullmatch(owner) is None:
        raise ParameterInvalid(
            "owner is 1 to 249 letters, digits, dots, underscores and hyphens", parameter="owner"
        )
