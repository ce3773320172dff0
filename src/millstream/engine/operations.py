"""What the committer takes: appends, atomic appends, and notes that are no batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from millstream.engine.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millstream.log.batch import Data, Header
    from millstream.log.partition import Partition


class Append:
    """One batch for one partition."""

    __slots__ = ("data", "header", "offset", "partition", "pending", "size")

    def __init__(self, partition: Partition, data: Data, header: Header) -> None:
        self.partition = partition
        self.data = data
        self.header = header
        self.size = len(data)
        self.pending: Pending[int] = Pending()
        self.offset = -1

    def partitions(self) -> Iterable[Partition]:
        return (self.partition,)

    def succeed(self) -> None:
        self.pending.succeed(self.offset)

    def fail(self, error: BaseException) -> None:
        self.pending.fail(error)


class Atomic:
    """Batches that are appended together or not at all."""

    __slots__ = ("parts", "pending", "size")

    def __init__(self, parts: list[Append]) -> None:
        self.parts = parts
        self.size = sum(part.size for part in parts)
        self.pending: Pending[list[int]] = Pending()

    def partitions(self) -> Iterable[Partition]:
        return [part.partition for part in self.parts]

    def succeed(self) -> None:
        self.pending.succeed([part.offset for part in self.parts])

    def fail(self, error: BaseException) -> None:
        self.pending.fail(error)


class Note:
    """A change that is no batch: a new start of a partition, a block of producer ids."""

    __slots__ = ("apply", "entry", "partition", "pending", "size")

    def __init__(
        self, entry: tuple[bytes], apply: Callable[[], None], partition: Partition | None
    ) -> None:
        self.entry = entry
        self.apply = apply
        self.partition = partition
        self.size = len(entry[0])
        self.pending: Pending[None] = Pending()

    def partitions(self) -> Iterable[Partition]:
        return () if self.partition is None else (self.partition,)

    def succeed(self) -> None:
        self.apply()
        self.pending.succeed(None)

    def fail(self, error: BaseException) -> None:
        self.pending.fail(error)


Operation: TypeAlias = Append | Atomic | Note
