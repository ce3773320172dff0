"""A disk on which the n-th call of one operation fails."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from millstream.log.disk import Access, Disk

OPERATIONS = (
    "open",
    "close",
    "size",
    "size_of",
    "read",
    "read_cached",
    "can_send",
    "write",
    "truncate",
    "sync",
    "rename",
    "unlink",
    "make_directory",
    "remove_directory",
    "list_directory",
    "sync_directory",
    "lock",
)


class FailingDisk:
    """Hands everything to `inner`; a call that fails does not reach it.

    - `nth` counts from 1; with 0 nothing fails, and `calls` says how many calls there were;
    - `short`, for `write` only: the n-th one takes half of its bytes and says so, as on a device
      that is full, and it is the next one that fails;
    - `sticky`: once it failed, the operation goes on failing until `heal`.
    """

    def __init__(
        self,
        inner: Disk,
        operation: str,
        nth: int,
        error: int,
        *,
        short: bool = False,
        sticky: bool = False,
    ) -> None:
        if operation not in OPERATIONS:
            raise ValueError(f"a disk has no operation {operation!r}")
        if short and operation != "write":
            raise ValueError(f"{operation} cannot be short")
        self.calls = dict.fromkeys(OPERATIONS, 0)
        self._inner = inner
        self._operation = operation
        self._error = error
        self._sticky = sticky
        self._short_at = nth if short else 0
        self._fail_at = nth + 1 if short and nth else nth
        self._mutex = threading.Lock()

    def heal(self) -> None:
        """Nothing fails from now on."""
        self._short_at = self._fail_at = 0

    def break_now(self) -> None:
        """The next call of the operation is the one that fails."""
        self._fail_at = self.calls[self._operation] + 1

    def open(self, path: str, access: Access) -> int:
        self._count("open")
        return self._inner.open(path, access)

    def close(self, file: int) -> None:
        # The kernel frees the descriptor whatever `close` answers; so do we, or a test that looks
        # for leaks would find one that is ours.
        try:
            self._count("close")
        finally:
            self._inner.close(file)

    def size(self, file: int) -> int:
        self._count("size")
        return self._inner.size(file)

    def size_of(self, path: str) -> int | None:
        self._count("size_of")
        return self._inner.size_of(path)

    def read(self, file: int, size: int, position: int) -> bytes:
        self._count("read")
        return self._inner.read(file, size, position)

    def read_cached(self, file: int, size: int, position: int) -> bytes | bytearray | None:
        self._count("read_cached")
        return self._inner.read_cached(file, size, position)

    def can_send(self, file: int, size: int, position: int) -> bool:
        self._count("can_send")
        return self._inner.can_send(file, size, position)

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        if self._count("write") == self._short_at:
            data = b"".join(buffers)
            # A device that takes nothing at all says so with an error, never with a zero.
            return self._inner.write(file, [data[: max(1, len(data) // 2)]], position)
        return self._inner.write(file, buffers, position)

    def truncate(self, file: int, size: int) -> None:
        self._count("truncate")
        self._inner.truncate(file, size)

    def sync(self, file: int) -> None:
        self._count("sync")
        self._inner.sync(file)

    def rename(self, source: str, target: str) -> None:
        self._count("rename")
        self._inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self._count("unlink")
        self._inner.unlink(path)

    def make_directory(self, path: str) -> None:
        self._count("make_directory")
        self._inner.make_directory(path)

    def remove_directory(self, path: str) -> None:
        self._count("remove_directory")
        self._inner.remove_directory(path)

    def list_directory(self, path: str) -> list[str]:
        self._count("list_directory")
        return self._inner.list_directory(path)

    def sync_directory(self, path: str) -> None:
        self._count("sync_directory")
        self._inner.sync_directory(path)

    def lock(self, path: str, owner: str) -> int | None:
        self._count("lock")
        return self._inner.lock(path, owner)

    def _count(self, operation: str) -> int:
        """Which call of its operation this is; raises when it is one that fails."""
        # Syncs and cold reads come from threads.
        with self._mutex:
            self.calls[operation] += 1
            count = self.calls[operation]
        if operation == self._operation and self._fails(count):
            raise OSError(self._error, os.strerror(self._error))
        return count

    def _fails(self, count: int) -> bool:
        if self._fail_at == 0:
            return False
        return count >= self._fail_at if self._sticky else count == self._fail_at
