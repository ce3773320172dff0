"""What the committer takes: appends, atomic appends, and notes that are no batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from millstream.engine.appends import Append, Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millstream.log.partition import Partition


__all__ = ["Append", "Atomic", "Note", "Operation"]


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
