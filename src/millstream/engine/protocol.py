"""Where records live, as the broker sees it: the seam behind which a cluster may stand.

The broker calls an engine from one event loop. Whatever waits for a disk or a network answers a
`Pending`. Offsets are given by the engine, rise within a partition, and may have gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from millstream.engine.pending import Pending
    from millstream.log.batch import Data, Header
    from millstream.log.partition import PartitionId, PartitionSettings
    from millstream.log.producers import Producer
    from millstream.log.segment import Chunk
    from millstream.log.store import Topic
    from millstream.log.stored import StoredChunk
    from millstream.log.view_snapshot import ViewSnapshot

    # One batch of an atomic append, with its header when somebody vouches for it.
    Part: TypeAlias = tuple[PartitionId, Data] | tuple[PartitionId, Data, Header | None]


class Offsets(NamedTuple):
    """The first offset there is, and the one that the next visible record will have."""

    start: int
    high_watermark: int


class Extent(NamedTuple):
    """How much of a partition there is: bytes and files; and who leads it, counted by starts."""

    bytes: int
    segments: int
    leader_epoch: int


class SegmentFile(NamedTuple):
    """A file of a partition: in it are batches, one after the other."""

    name: str
    base_offset: int
    # Whole batches; what lies behind them is not to be read.
    bytes: int
    # One that is sealed does not grow.
    is_sealed: bool


class Files(NamedTuple):
    """The files that hold a partition, as of now."""

    # Of the topic; each partition has a folder in it, by its number.
    directory: str
    start: int
    high_watermark: int
    leader_epoch: int
    segments: list[SegmentFile]


class Health(NamedTuple):
    ok: bool
    reason: str | None


class Metric(NamedTuple):
    """A plain number, read when somebody asks. `labels` is empty for a total."""

    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the broker may rely on."""

    # Atomic appends over partitions.
    atomic: bool
    # Survives a restart of this process.
    durable: bool
    # Every shard of every view belongs to this broker.
    exclusive: bool


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Recover, then take calls."""
        ...

    async def stop(self) -> None:
        """Finish what was taken, then give everything up. Calls after it fail."""
        ...

    def topics(self) -> list[Topic]: ...

    def append(self, id: PartitionId, batch: Data, header: Header | None = None) -> Pending[int]:
        """Append one batch; its base offset, once it is as durable as the topic's mode says. Its
        bytes must stay as they are until they are written, which may be later.

        Without a header nobody vouches for the batch: it is verified and opened, and what would
        not open for a reader is refused. Who passes a header vouches that the batch is right:
        with what `verify` gave, for bytes that are to stay unopened, or with what `read_header`
        says of a batch that `encode` made. It is then taken as it is, but on compacted topics,
        where compaction will have to open it.
        """
        ...

    def append_atomic(self, entries: Sequence[Part]) -> Pending[list[int]]:
        """Append batches to several partitions: after any crash all are there, or none.

        An entry is a partition and a batch, and may have a header as `append` does.
        """
        ...

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Chunk]:
        """Whole batches from the one that holds the offset; empty at the high watermark."""
        ...

    def locate(self, id: PartitionId, offset: int, bytes_max: int) -> StoredChunk | None:
        """What `read` would give, as bytes that lie in a file, for who has the kernel send them
        from there. None where they have to be read, whatever the reason: `read` says it."""
        ...

    def wait(self, id: PartitionId, offset: int) -> Pending[None]:
        """Done when there is something to read at the offset. `forget` ends the wait."""
        ...

    def forget(self, id: PartitionId, waiting: Pending[None]) -> None: ...

    def offsets(self, id: PartitionId) -> Offsets: ...

    def extent(self, id: PartitionId) -> Extent: ...

    def files(self, id: PartitionId) -> Files | None:
        """What a reader of files has to know; None where records are in none."""
        ...

    def leader_epoch(self, id: PartitionId) -> int:
        """Who leads the partition, counted by starts."""
        ...

    def epoch_end(self, id: PartitionId, epoch: int) -> tuple[int, int]:
        """The newest epoch up to this one that has records, and the offset where it ended: by it
        a client finds out whether what it read is still there. (-1, -1) when there is none."""
        ...

    def find(self, id: PartitionId, timestamp: int) -> Pending[tuple[int, int] | None]:
        """Offset and time of the first record at or after a time; None when all are older."""
        ...

    def create(
        self,
        name: str,
        partitions: int,
        settings: PartitionSettings,
        uuid: bytes | None = None,
    ) -> Pending[Topic]:
        """Make a topic. The engine keeps its name, UUID and partitions; settings are the
        broker's to keep, and it gives them again with `alter` after a start."""
        ...

    def alter(
        self,
        name: str,
        *,
        settings: PartitionSettings | None = None,
        partitions: int | None = None,
    ) -> Pending[Topic]:
        """Change a topic's settings, or give it more partitions."""
        ...

    def hold(self, first_kept: Callable[[PartitionId], int | None]) -> None:
        """From now on ask before retention: what lies from an offset on is kept. None is no
        opinion. A trim does not ask."""
        ...

    def trim(self, id: PartitionId, offset: int) -> Pending[None]:
        """Remove everything before an offset, for good."""
        ...

    def delete(self, name: str) -> Pending[None]: ...

    def load_view(self, id: PartitionId, view: str) -> Pending[ViewSnapshot | None]:
        """The newest value of each key of a partition as of some offset, from a cache that the
        engine may keep beside its log. None without one."""
        ...

    def save_view(self, id: PartitionId, view: str) -> Pending[int | None]:
        """Bring that cache up to date, as far as that is cheap; None when nothing is new."""
        ...

    def claim(self, shard: str) -> Pending[None]:
        """Done when this broker owns a shard of a view."""
        ...

    def producer_id(self) -> Pending[int]:
        """An id that nobody has, or had."""
        ...

    def producer(self, id: PartitionId, producer_id: int) -> Producer | None:
        """What a partition knows of an idempotent producer."""
        ...

    def set_producer(self, id: PartitionId, producer_id: int, known: Producer | None) -> None:
        """Somebody else checks this producer's sequences from now on (None), or did so until now.
        Not durable: after a start the partition knows what its batches say."""
        ...

    def forget_producers(self, id: PartitionId, before: int) -> None:
        """Producers whose last batch lies before an offset may go on at any sequence. As
        `set_producer`, this is not durable."""
        ...

    def health(self) -> Health: ...

    def metrics(self) -> list[Metric]: ...
