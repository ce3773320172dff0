"""Disks that tell what happens on them, or refuse it."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from faults.simulated_disk import SimulatedDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from millstream.log.disk import Access


class WatchedDisk(SimulatedDisk):
    """Keeps the names of the files that are written and synced, in order.

    - `broken` is the error that every sync gets; `full` that every write gets;
    - `on_sync` is called before each sync of a file, with its path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: int | None = None
        self.full: int | None = None
        self.on_sync: Callable[[str], None] | None = None
        self.synced: list[str] = []
        self.written: list[str] = []
        self._paths: dict[int, str] = {}

    def open(self, path: str, access: Access) -> int:
        file = super().open(path, access)
        self._paths[file] = path
        return file

    def close(self, file: int) -> None:
        super().close(file)
        self._paths.pop(file)

    def sync(self, file: int) -> None:
        path = self._paths[file]
        if self.on_sync is not None:
            self.on_sync(path)
        if self.broken is not None:
            raise OSError(self.broken, os.strerror(self.broken))
        super().sync(file)
        self.synced.append(path)

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        if self.full is not None:
            raise OSError(self.full, os.strerror(self.full))
        self.written.append(self._paths[file])
        return super().write(file, buffers, position)

    def clear(self) -> None:
        self.synced.clear()
        self.written.clear()

    def open_paths(self, suffix: str = "") -> list[str]:
        return [path for path in self._paths.values() if path.endswith(suffix)]


NO_ROOM = errno.ENOSPC
FAILED = errno.EIO
