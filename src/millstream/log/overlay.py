"""A disk whose changes stay in memory, over one that is only read.

A dry run is the real code on this disk: it locks, writes, renames and unlinks, and when it is
forgotten nothing has happened. Only blocks that were written take memory, so a large file with a
short change costs little.

Names are a tree of nodes that is filled in as it is walked. A node knows where its content lies on
the inner disk, hence a rename moves the node and copies nothing.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from millstream.log.disk import Access, Disk

BLOCK_BYTES = 64 * 1024
# What `stat` says of a directory that only exists here.
DIRECTORY_BYTES = 4096


@dataclass(slots=True, eq=False)
class _File:
    """`shown` bytes of the inner file count, as far as no block of ours covers them; what lies
    between them and `size` is zeroes."""

    inner: str | None
    shown: int = 0
    size: int = 0
    blocks: dict[int, bytearray] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Directory:
    """`entries` are those that were walked, made or, with None, taken away."""

    inner: str | None
    entries: dict[str, _Node | None] = field(default_factory=dict)


_Node: TypeAlias = _File | _Directory


@dataclass(slots=True)
class _Handle:
    node: _File
    is_writable: bool
    inner_file: int | None = None


class OverlayDisk:
    """A `Disk`. The inner one is listed and read, and must not change meanwhile."""

    __slots__ = ("_handles", "_inner", "_locks", "_next_file", "_root")

    def __init__(self, inner: Disk) -> None:
        self._inner = inner
        self._root = _Directory("/")
        self._handles: dict[int, _Handle] = {}
        self._locks: dict[_File, int] = {}
        self._next_file = 0

    # ---- files

    def open(self, path: str, access: Access) -> int:
        directory, name = self._place(path)
        node = self._child(directory, name)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        if node is None:
            if access != "create":
                raise _error(errno.ENOENT, path)
            node = directory.entries[name] = _File(None)
        handle = _Handle(node, access != "read")
        if node.inner is not None:
            # At once, not at the first read: what may not be read is refused here, as on any disk.
            handle.inner_file = self._inner.open(node.inner, "read")
        self._next_file += 1
        self._handles[self._next_file] = handle
        return self._next_file

    def close(self, file: int) -> None:
        handle = self._handle(file)
        del self._handles[file]
        if self._locks.get(handle.node) == file:
            del self._locks[handle.node]
        if handle.inner_file is not None:
            self._inner.close(handle.inner_file)

    def size(self, file: int) -> int:
        return self._handle(file).node.size

    def size_of(self, path: str) -> int | None:
        try:
            node = self._find(path)
        except FileNotFoundError:
            return None
        if isinstance(node, _File):
            return node.size
        return self._inner.size_of(node.inner) if node.inner is not None else DIRECTORY_BYTES

    def read(self, file: int, size: int, position: int) -> bytes:
        if position < 0:
            raise _error(errno.EINVAL)
        handle = self._handle(file)
        end = min(position + size, handle.node.size)
        if not handle.node.blocks:
            return self._beneath(handle, position, end)
        parts: list[bytes | bytearray] = []
        while position < end:
            number, start = divmod(position, BLOCK_BYTES)
            stop = min(end, (number + 1) * BLOCK_BYTES)
            block = handle.node.blocks.get(number)
            if block is None:
                parts.append(self._beneath(handle, position, stop))
            else:
                parts.append(block[start : start + stop - position])
            position = stop
        return b"".join(parts)

    def read_cached(self, file: int, size: int, position: int) -> bytes | bytearray | None:
        return self.read(file, size, position)

    def can_send(self, file: int, size: int, position: int) -> bool:
        # Its files are numbers of its own.
        del file, size, position
        return False

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        handle = self._handle(file)
        if not handle.is_writable:
            raise _error(errno.EBADF)
        if position < 0:
            raise _error(errno.EINVAL)
        data = memoryview(b"".join(buffers))
        done = 0
        while done < len(data):
            number, start = divmod(position + done, BLOCK_BYTES)
            piece = data[done : done + BLOCK_BYTES - start]
            self._block(handle, number)[start : start + len(piece)] = piece
            done += len(piece)
        if done:
            handle.node.size = max(handle.node.size, position + done)
        return done

    def truncate(self, file: int, size: int) -> None:
        handle = self._handle(file)
        if not handle.is_writable or size < 0:
            raise _error(errno.EINVAL)
        node = handle.node
        node.shown = min(node.shown, size)
        for number in [one for one in node.blocks if (one + 1) * BLOCK_BYTES > size]:
            keep = size - number * BLOCK_BYTES
            if keep <= 0:
                del node.blocks[number]
            else:
                node.blocks[number][keep:] = bytes(BLOCK_BYTES - keep)
        node.size = size

    def sync(self, file: int) -> None:
        self._handle(file)

    # ---- names

    def rename(self, source: str, target: str) -> None:
        from_directory, from_name = self._place(source)
        to_directory, to_name = self._place(target)
        node = self._child(from_directory, from_name)
        if node is None:
            raise _error(errno.ENOENT, source)
        if isinstance(node, _Directory) and target.startswith(source.rstrip("/") + "/"):
            raise _error(errno.EINVAL, target)
        if source.startswith(target.rstrip("/") + "/"):
            raise _error(errno.ENOTEMPTY, target)
        replaced = self._child(to_directory, to_name)
        if replaced is node:
            return
        if isinstance(replaced, _Directory):
            if isinstance(node, _File):
                raise _error(errno.EISDIR, target)
            if self._names(replaced):
                raise _error(errno.ENOTEMPTY, target)
        elif replaced is not None and isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, target)
        to_directory.entries[to_name] = node
        from_directory.entries[from_name] = None

    def unlink(self, path: str) -> None:
        directory, name = self._place(path)
        node = self._child(directory, name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, _Directory):
            raise _error(errno.EISDIR, path)
        directory.entries[name] = None

    def make_directory(self, path: str) -> None:
        if not path.strip("/"):
            raise _error(errno.EEXIST, path)
        directory, name = self._place(path)
        if self._child(directory, name) is not None:
            raise _error(errno.EEXIST, path)
        directory.entries[name] = _Directory(None)

    def remove_directory(self, path: str) -> None:
        directory, name = self._place(path)
        if self._names(self._directory(path)):
            raise _error(errno.ENOTEMPTY, path)
        directory.entries[name] = None

    def list_directory(self, path: str) -> list[str]:
        return self._names(self._directory(path))

    def sync_directory(self, path: str) -> None:
        self._directory(path)

    def lock(self, path: str, owner: str) -> int | None:
        """A lock among users of this overlay. Who must keep a broker out takes the real one."""
        file = self.open(path, "create")
        node = self._handle(file).node
        if node in self._locks:
            self.close(file)
            return None
        self._locks[node] = file
        self.truncate(file, 0)
        self.write(file, [owner.encode()], 0)
        return file

    # ---- inside

    def _handle(self, file: int) -> _Handle:
        handle = self._handles.get(file)
        if handle is None:
            raise _error(errno.EBADF)
        return handle

    def _beneath(self, handle: _Handle, position: int, end: int) -> bytes:
        """The inner file's bytes, as far as they still count, then zeroes."""
        shown = max(min(end, handle.node.shown) - position, 0)
        data = b""
        if shown and handle.inner_file is not None:
            data = self._inner.read(handle.inner_file, shown, position)
        return data + bytes(max(end - position - len(data), 0))

    def _block(self, handle: _Handle, number: int) -> bytearray:
        block = handle.node.blocks.get(number)
        if block is None:
            start = number * BLOCK_BYTES
            block = bytearray(self._beneath(handle, start, start + BLOCK_BYTES))
            handle.node.blocks[number] = block
        return block

    def _child(self, directory: _Directory, name: str) -> _Node | None:
        if name not in directory.entries and directory.inner is not None:
            directory.entries[name] = self._look(os.path.join(directory.inner, name))
        return directory.entries.get(name)

    def _look(self, path: str) -> _Node | None:
        """What the inner disk has at a path. Only listing tells a directory from a file."""
        size = self._inner.size_of(path)
        if size is None:
            return None
        try:
            self._inner.list_directory(path)
        except NotADirectoryError:
            return _File(path, size, size)
        except PermissionError:
            # One that may be walked through and not listed, such as other people's homes.
            return _Directory(path)
        return _Directory(path)

    def _names(self, directory: _Directory) -> list[str]:
        names = set(self._inner.list_directory(directory.inner) if directory.inner else ())
        for name, node in directory.entries.items():
            if node is None:
                names.discard(name)
            else:
                names.add(name)
        return sorted(names)

    def _find(self, path: str) -> _Node:
        node: _Node = self._root
        for name in path.split("/"):
            if name:
                if not isinstance(node, _Directory):
                    raise _error(errno.ENOTDIR, path)
                child = self._child(node, name)
                if child is None:
                    raise _error(errno.ENOENT, path)
                node = child
        return node

    def _directory(self, path: str) -> _Directory:
        node = self._find(path)
        if not isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
        return node

    def _place(self, path: str) -> tuple[_Directory, str]:
        """The directory that has or would have the path's last name, and that name."""
        parent, _, name = path.rstrip("/").rpartition("/")
        if not name:
            raise _error(errno.EBUSY, path)
        return self._directory(parent + "/"), name


def _error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)
