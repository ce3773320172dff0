"""The file operations that the log uses, in one place, so that a test can break them.

The log never touches `os` but through a `Disk`. There are three: `SystemDisk` here, and in the
tests one that keeps what is durable apart from what is only written, and one that makes the n-th
call fail. What the log relies on, and nothing more:

- `sync` makes the file's bytes and size durable, not its name; `sync_directory` makes names
  durable: creations, renames, removals;
- `rename` is atomic: after a crash the target is the old file or the new one;
- bytes that were written and not synced may survive in any combination of blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from millstream.log.residency import residency

if TYPE_CHECKING:
    from typing_extensions import Buffer

Access: TypeAlias = Literal["read", "write", "create"]

# The kernel takes at most this many buffers in one call (IOV_MAX on Linux and macOS).
BUFFERS_MAX = 1024


class Disk(Protocol):
    """Paths are absolute strings; a file is the small integer that `open` gave."""

    def open(self, path: str, access: Access) -> int:
        """`read` and `write` need the file to exist; `create` makes it or takes it as it is."""
        ...

    def close(self, file: int) -> None: ...

    def size(self, file: int) -> int: ...

    def size_of(self, path: str) -> int | None:
        """The size of the file at a path, or None when there is none."""
        ...

    def read(self, file: int, size: int, position: int) -> bytes:
        """Fewer bytes than asked mean the end of the file."""
        ...

    def read_cached(self, file: int, size: int, position: int) -> bytes | bytearray | None:
        """As `read`, but None when the answer would have to wait for the device."""
        ...

    def can_send(self, file: int, size: int, position: int) -> bool:
        """Whether the file is one of the system's, whose kernel can send these bytes to a socket
        without waiting for the device. A disk that cannot tell says no."""
        ...

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        """How many bytes were written: it may be fewer than given. Use `write_all`."""
        ...

    def truncate(self, file: int, size: int) -> None: ...

    def sync(self, file: int) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None: ...

    def list_directory(self, path: str) -> list[str]: ...

    def sync_directory(self, path: str) -> None: ...

    def lock(self, path: str, owner: str) -> int | None:
        """Take the lock file and write its owner into it; None when somebody else holds it."""
        ...


# From this size on, filling a buffer with zeroes that are read over costs more than the call
# that makes one without.
UNFILLED_BYTES = 64 * 1024


class SyncFailed(OSError):
    """Bytes that were written may be lost, and asking again would not tell: the kernel reports
    such an error once. Whatever its number, it is no passing lack of room.

    It may have been another sync of the same file that was told. So a job that says for good what
    is durable asks, after its own syncs, whether one has failed anywhere.
    """


def never() -> bool:
    return False


def require_synced(has_failed: Callable[[], bool]) -> None:
    if has_failed():
        raise SyncFailed(errno.EIO, "a sync failed elsewhere")


def sync_written(disk: Disk, file: int) -> None:
    """Sync a file of which the bytes are nowhere else."""
    try:
        disk.sync(file)
    except OSError as error:
        raise SyncFailed(error.errno, f"sync: {error.strerror}") from error


def close_file(disk: Disk, file: int) -> None:
    """Whatever `close` answers, the file is closed; and what must be durable was synced."""
    with suppress(OSError):
        disk.close(file)


def write_all(disk: Disk, file: int, buffers: Sequence[Buffer], position: int) -> int:
    """Write every byte of the buffers, whatever the single calls take; answers how many."""
    total = 0
    for first in range(0, len(buffers), BUFFERS_MAX):
        some = buffers[first : first + BUFFERS_MAX] if len(buffers) > BUFFERS_MAX else buffers
        length = sum([memoryview(buffer).nbytes for buffer in some])
        written = disk.write(file, some, position + total)
        while written < length:
            # A short write: the device took what it could. What remains is one flat buffer, and
            # an error from the next call is the reason why it was short.
            flat = b"".join(some)
            more = disk.write(file, [memoryview(flat)[written:]], position + total + written)
            if more == 0:
                raise OSError(errno.EIO, "the device accepts no bytes")
            written += more
        total += length
    return total


def write_file(disk: Disk, path: str, content: bytes) -> None:
    """Replace a small file in one step: after any crash it is the old one or the new one.

    1. write beside it, 2. sync the bytes, 3. rename over it, 4. sync the directory.
    """
    temporary = path + ".new"
    write_synced(disk, temporary, content)
    disk.rename(temporary, path)
    disk.sync_directory(os.path.dirname(path))


def write_synced(disk: Disk, path: str, content: bytes) -> None:
    """Write a file and sync its bytes. Nothing tells whether a crash left it whole, so something
    else must: a rename that comes after, or a checksum elsewhere."""
    file = disk.open(path, "create")
    try:
        disk.truncate(file, 0)
        write_all(disk, file, [content], 0)
        disk.sync(file)
    finally:
        close_file(disk, file)


def read_file(disk: Disk, path: str) -> bytes | None:
    """The whole of a small file, or None when there is none."""
    if disk.size_of(path) is None:
        return None
    file = disk.open(path, "read")
    try:
        return disk.read(file, disk.size(file), 0)
    finally:
        close_file(disk, file)


class SystemDisk:
    """The machine's own file system. Without `follows_links` a file that is a symbolic link is not
    opened, which is ELOOP: for folders into which others may put files."""

    __slots__ = (
        "_has_nowait",
        "_open_flags",
        "_reserve",
        "_reserve_lock",
        "_residency",
        "_unfilled",
    )

    def __init__(self, *, follows_links: bool = True) -> None:
        self._open_flags = os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
        self._reserve = -1
        self._reserve_lock = threading.Lock()
        # RWF_NOWAIT is Linux's; elsewhere every read may wait, and `read_cached` just reads.
        self._has_nowait = hasattr(os, "RWF_NOWAIT")
        self._residency = residency()
        # A bytearray whose bytes are whatever was in memory: `preadv` says how many are ours.
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
        self._unfilled: Callable[[None, int], bytearray] = make(
            ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
        )

    def open(self, path: str, access: Access) -> int:
        flags = {
            # A pipe that somebody put there would be waited for until it has a writer.
            "read": os.O_RDONLY | os.O_NONBLOCK,
            "write": os.O_RDWR,
            "create": os.O_RDWR | os.O_CREAT,
        }[access]
        return os.open(path, flags | self._open_flags, 0o640)

    def close(self, file: int) -> None:
        os.close(file)

    def size(self, file: int) -> int:
        return os.fstat(file).st_size

    def size_of(self, path: str) -> int | None:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return None

    def read(self, file: int, size: int, position: int) -> bytes:
        data = os.pread(file, size, position)
        while len(data) < size:
            more = os.pread(file, size - len(data), position + len(data))
            if not more:
                break
            data += more
        return data

    def read_cached(self, file: int, size: int, position: int) -> bytes | bytearray | None:
        if not self._has_nowait:
            return self.read(file, size, position)
        buffer = self._unfilled(None, size) if size >= UNFILLED_BYTES else bytearray(size)
        try:
            count = os.preadv(file, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                self._has_nowait = False
                return self.read(file, size, position)
            raise
        if count < size:
            # The end of the file, or the edge of what is cached: only a plain read can tell.
            if position + count < os.fstat(file).st_size:
                return None
            del buffer[count:]
        return buffer

    def can_send(self, file: int, size: int, position: int) -> bool:
        return self._residency is not None and self._residency.has_all(file, size, position)

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        return os.pwritev(file, buffers, position)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        if sys.platform == "darwin":
            # There fsync leaves bytes in the drive's cache; F_FULLFSYNC does not.
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(file)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.mkdir(path, 0o750)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def list_directory(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def sync_directory(self, path: str) -> None:
        file = self._open_directory(path)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _open_directory(self, path: str) -> int:
        """A lack of descriptors must not make a sync fail, because after that nobody could say
        what is durable: for this one there is another in reserve."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with self._reserve_lock:
            try:
                file = os.open(path, flags)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or self._reserve < 0:
                    raise
                os.close(self._reserve)
                self._reserve = -1
                file = os.open(path, flags)
            if self._reserve < 0:
                with suppress(OSError):
                    self._reserve = os.dup(file)
            return file

    def lock(self, path: str, owner: str) -> int | None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, owner.encode(), 0)
        except OSError as error:
            # A lock that stayed behind would keep away the next try too.
            os.close(file)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return file

    def share_lock(self, path: str) -> int | None:
        """Keep others from taking the lock, without writing; None when somebody holds it. For
        tools that only read, hence not an operation of the log."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return file
