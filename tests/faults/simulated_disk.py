"""A disk in memory that knows what is durable and what is only written.

    what the program does        what becomes durable
    write, truncate              nothing, until `sync` of that file: its bytes and its size
    create, rename, unlink,      nothing, until `sync_directory` of every directory that the
    make/remove directory        change touches: both, for a rename from one into another

`crash` answers the disk as it is after the power failed. It leaves this disk as it was, so one run
of a script can be crashed before each of its operations, from `on_operation`, in every way.

What may survive of bytes is any combination of sectors. It is a little harsher than a real device:
two writes into one sector survive independently, and a truncation may be lost while later writes
are kept.

What may survive of names: changes of one name survive in their order, changes of different names
in any. A rename changes two names in one step, hence it survives whole or not at all, and never
without what happened to either name before. A name inside a directory whose own name did not
survive is gone. A rename between directories of which only one was synced may still be lost: a
program has to sync both.
"""

from __future__ import annotations

import errno
import os
import threading
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from millstream.log.disk import BUFFERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from millstream.log.disk import Access

Survival: TypeAlias = Literal["nothing", "all", "prefix", "middle", "subset", "zeroes"]
SURVIVALS: tuple[Survival, ...] = get_args(Survival)

# Smaller than a page, so that the small batches of a test are torn as large ones would be.
SECTOR_BYTES = 512

# No real descriptor is as high: a file of this disk that reaches `os` by mistake is an error there.
FIRST_FILE = 1_000_000_000

# What `stat` says of a directory on ext4.
DIRECTORY_BYTES = 4096


class PlugPulled(BaseException):
    """The machine is off. Not an `Exception`: no code may catch a power failure and go on."""


class SimulatedDisk:
    """A `Disk`; at first there is only the directory `/`.

    - `operations`: how many operations have changed the disk, or synced it, so far;
    - `on_operation(index, name)` is called before each of them, and may call `crash` or `copy`;
    - `stop_at`: the operation with this index is not done: it raises `PlugPulled`, and so does
      all that comes later, but `close`. With `torn`, half of the bytes are in the page cache
      when that operation is a write;
    - `cold`: whether `read_cached` has to say None, or a function of its arguments that tells.
    """

    def __init__(
        self, *, stop_at: int | None = None, torn: bool = False, sector_bytes: int = SECTOR_BYTES
    ) -> None:
        self.operations = 0
        self.on_operation: Callable[[int, str], None] | None = None
        self.stop_at = stop_at
        self.torn = torn
        self.pulled = False
        self.cold: bool | Callable[[int, int, int], bool] = False
        self._sector_bytes = sector_bytes
        self._root = _Directory()
        self._renamings: list[_Renaming] = []
        self._handles: dict[int, _Handle] = {}
        self._locks: dict[_File, int] = {}
        self._next_file = FIRST_FILE
        # Syncs and cold reads come from threads. Reentrant, because `on_operation` may crash us.
        self._mutex = threading.RLock()

    # ---- the operations of `Disk`

    def open(self, path: str, access: Access) -> int:
        with self._mutex:
            self._require_power()
            directory, name = self._place(path)
            node = directory.entries.get(name)
            if isinstance(node, _Directory):
                raise _error(errno.EISDIR, path)
            if node is None:
                if access != "create":
                    raise _error(errno.ENOENT, path)
                self._begin("create")
                node = _File()
                self._rename(_Change(directory, name, node))
            file = self._next_file
            self._next_file += 1
            self._handles[file] = _Handle(node, access != "read")
            return file

    def close(self, file: int) -> None:
        # Quiet after the plug was pulled: what unwinds then closes its files, and changes nothing.
        with self._mutex:
            handle = self._handle(file)
            del self._handles[file]
            if self._locks.get(handle.node) == file:
                del self._locks[handle.node]

    def size(self, file: int) -> int:
        self._require_power()
        return len(self._handle(file).node.content)

    def size_of(self, path: str) -> int | None:
        self._require_power()
        try:
            node = self._find(path)
        except FileNotFoundError:
            return None
        return DIRECTORY_BYTES if isinstance(node, _Directory) else len(node.content)

    def read(self, file: int, size: int, position: int) -> bytes:
        self._require_power()
        if position < 0:
            raise _error(errno.EINVAL)
        return bytes(self._handle(file).node.content[position : position + size])

    def read_cached(self, file: int, size: int, position: int) -> bytes | bytearray | None:
        if self.cold if isinstance(self.cold, bool) else self.cold(file, size, position):
            self._require_power()
            self._handle(file)
            return None
        return self.read(file, size, position)

    def can_send(self, file: int, size: int, position: int) -> bool:
        # The system knows none of its files.
        del file, size, position
        return False

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        with self._mutex:
            self._require_power()
            handle = self._handle(file)
            if not handle.writable:
                raise _error(errno.EBADF)
            if position < 0 or len(buffers) > BUFFERS_MAX:
                raise _error(errno.EINVAL)
            data = b"".join(buffers)
            if self.torn and self.operations == self.stop_at:
                handle.node.change(_Write(position, data[: len(data) // 2]))
            self._begin("write")
            handle.node.change(_Write(position, data))
            return len(data)

    def truncate(self, file: int, size: int) -> None:
        with self._mutex:
            self._require_power()
            handle = self._handle(file)
            if not handle.writable or size < 0:
                raise _error(errno.EINVAL)
            self._begin("truncate")
            handle.node.change(_Write(size, None))

    def sync(self, file: int) -> None:
        with self._mutex:
            self._require_power()
            handle = self._handle(file)
            self._begin("sync")
            handle.node.sync()

    def rename(self, source: str, target: str) -> None:
        with self._mutex:
            self._require_power()
            from_directory, from_name = self._place(source)
            to_directory, to_name = self._place(target)
            node = from_directory.entries.get(from_name)
            if node is None:
                raise _error(errno.ENOENT, source)
            replaced = to_directory.entries.get(to_name)
            if isinstance(node, _Directory) and self._is_inside(target, node):
                raise _error(errno.EINVAL, target)
            if isinstance(replaced, _Directory) and self._is_inside(source, replaced):
                raise _error(errno.ENOTEMPTY, target)
            if replaced is not None and replaced is not node:
                _check_replaceable(node, replaced, target)
            self._begin("rename")
            if replaced is not node:
                self._rename(
                    _Change(to_directory, to_name, node), _Change(from_directory, from_name, None)
                )

    def unlink(self, path: str) -> None:
        with self._mutex:
            self._require_power()
            directory, name = self._place(path)
            if isinstance(self._find(path), _Directory):
                raise _error(errno.EISDIR, path)
            self._begin("unlink")
            self._rename(_Change(directory, name, None))

    def make_directory(self, path: str) -> None:
        with self._mutex:
            self._require_power()
            if not path.strip("/"):
                raise _error(errno.EEXIST, path)
            directory, name = self._place(path)
            if name in directory.entries:
                raise _error(errno.EEXIST, path)
            self._begin("make_directory")
            self._rename(_Change(directory, name, _Directory()))

    def remove_directory(self, path: str) -> None:
        with self._mutex:
            self._require_power()
            directory, name = self._place(path)
            if self._directory(path).entries:
                raise _error(errno.ENOTEMPTY, path)
            self._begin("remove_directory")
            self._rename(_Change(directory, name, None))

    def list_directory(self, path: str) -> list[str]:
        with self._mutex:
            self._require_power()
            return sorted(self._directory(path).entries)

    def sync_directory(self, path: str) -> None:
        with self._mutex:
            self._require_power()
            directory = self._directory(path)
            self._begin("sync_directory")
            synced = []
            for index, renaming in enumerate(self._renamings):
                renaming.unsynced.discard(directory)
                if not renaming.unsynced:
                    synced.append(index)
            self._make_durable(synced)

    def lock(self, path: str, owner: str) -> int | None:
        with self._mutex:
            file = self.open(path, "create")
            node = self._handle(file).node
            if node in self._locks:
                self.close(file)
                return None
            self._locks[node] = file
            self.truncate(file, 0)
            self.write(file, [owner.encode()], 0)
            return file

    # ---- the power

    def crash(
        self, survival: Survival, random: Random | None = None, *, names: Survival | None = None
    ) -> SimulatedDisk:
        """The disk after a power failure at this moment, as a new one on which all is durable.

        Of the unsynced writes of each file survive
        - `nothing`, or `all`;
        - `prefix`: the first few, the last of them cut at any byte;
        - `middle`: a run of sectors that leaves out the first;
        - `subset`: any sectors;
        - `zeroes`: the sizes, but none of the bytes.

        After `middle` and `subset` the size may be that of the file before the crash, filled up
        with zeroes. `names` chooses for directory entries; without it they survive as bytes do,
        and all of them with `zeroes`.
        """
        random = random or Random(0)
        with self._mutex:
            entries: dict[_Directory, dict[str, _Node]] = {}
            for index in _surviving_names(self._renamings, names or survival, random):
                for change in self._renamings[index].changes:
                    if change.directory not in entries:
                        entries[change.directory] = dict(change.directory.durable)
                    change.apply(entries[change.directory])

            def survivor(node: _Node) -> _Node:
                if isinstance(node, _File):
                    return _File(_surviving_bytes(node, survival, random, self._sector_bytes))
                kept = entries.get(node, node.durable)
                return _Directory({name: survivor(child) for name, child in kept.items()})

            after = SimulatedDisk(sector_bytes=self._sector_bytes)
            root = survivor(self._root)
            assert isinstance(root, _Directory)
            after._root = root
            return after

    def copy(self) -> SimulatedDisk:
        """The same files, as durable as here, in a machine that has opened and locked none."""
        with self._mutex:
            copies: dict[_Node, _Node] = {}
            twin = SimulatedDisk(sector_bytes=self._sector_bytes)
            twin.operations = self.operations
            twin._root = _copy_directory(self._root, copies)
            twin._renamings = [
                _Renaming(
                    tuple(
                        _Change(
                            _copy_directory(change.directory, copies),
                            change.name,
                            None if change.node is None else _copy_node(change.node, copies),
                        )
                        for change in renaming.changes
                    ),
                    {_copy_directory(directory, copies) for directory in renaming.unsynced},
                )
                for renaming in self._renamings
            ]
            return twin

    # ---- for tests: not operations, never counted, and what they write is durable

    def files(self) -> dict[str, bytes]:
        """Every file as a program would read it now, by its path."""
        with self._mutex:
            return {
                path: bytes(node.content)
                for path, node in _walk("", self._root)
                if isinstance(node, _File)
            }

    def put(self, path: str, content: bytes) -> None:
        """Make a file, with the directories above it, or replace what it contains."""
        with self._mutex:
            parent, _, name = path.rpartition("/")
            directory = self._put_directory(parent)
            node = directory.entries.get(name)
            if isinstance(node, _Directory):
                raise _error(errno.EISDIR, path)
            if node is None:
                node = _File()
            self._put_entry(directory, name, node)
            node.change(_Write(0, None))
            node.change(_Write(0, content))
            node.sync()

    def dump(self, directory: str, path: str = "/") -> None:
        """Copy what is under a path of this disk into a real directory."""
        os.makedirs(directory, exist_ok=True)
        for inside, node in _walk("", self._directory(path)):
            if isinstance(node, _Directory):
                os.makedirs(directory + inside, exist_ok=True)
            else:
                with open(directory + inside, "wb") as file:
                    file.write(node.content)

    def load(self, directory: str, path: str = "/") -> None:
        """Copy what is in a real directory to under a path of this disk."""
        path = path.rstrip("/")
        self._put_directory(path)
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            if entry.is_dir():
                self.load(entry.path, f"{path}/{entry.name}")
            else:
                with open(entry.path, "rb") as file:
                    self.put(f"{path}/{entry.name}", file.read())

    # ---- inside

    def _require_power(self) -> None:
        if self.pulled:
            raise PlugPulled("the machine is off")

    def _begin(self, name: str) -> None:
        """Called when nothing but the plug can stop the operation any more."""
        if self.stop_at is not None and self.operations >= self.stop_at:
            self.pulled = True
            raise PlugPulled(f"before operation {self.operations}, {name}")
        if self.on_operation is not None:
            self.on_operation(self.operations, name)
        self.operations += 1

    def _handle(self, file: int) -> _Handle:
        handle = self._handles.get(file)
        if handle is None:
            raise _error(errno.EBADF)
        return handle

    def _find(self, path: str) -> _Node:
        assert path.startswith("/"), path
        node: _Node = self._root
        for name in path.split("/"):
            if name:
                if not isinstance(node, _Directory):
                    raise _error(errno.ENOTDIR, path)
                child = node.entries.get(name)
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

    def _is_inside(self, path: str, directory: _Directory) -> bool:
        parent = path.rstrip("/").rpartition("/")[0]
        while parent:
            if self._find(parent) is directory:
                return True
            parent = parent.rpartition("/")[0]
        return False

    def _rename(self, *changes: _Change) -> None:
        for change in changes:
            change.apply(change.directory.entries)
        self._renamings.append(_Renaming(changes, {change.directory for change in changes}))

    def _make_durable(self, chosen: Sequence[int]) -> None:
        done = set(_with_predecessors(self._renamings, chosen))
        rest = []
        for index, renaming in enumerate(self._renamings):
            if index not in done:
                rest.append(renaming)
                continue
            for change in renaming.changes:
                change.apply(change.directory.durable)
        self._renamings = rest

    def _put_directory(self, path: str) -> _Directory:
        directory = self._root
        for name in path.split("/"):
            if name:
                node = directory.entries.get(name) or _Directory()
                if not isinstance(node, _Directory):
                    raise _error(errno.ENOTDIR, path)
                self._put_entry(directory, name, node)
                directory = node
        return directory

    def _put_entry(self, directory: _Directory, name: str, node: _Node) -> None:
        if directory.entries.get(name) is None:
            self._rename(_Change(directory, name, node))
        slot = (directory, name)
        self._make_durable(
            [index for index, each in enumerate(self._renamings) if slot in each.slots]
        )


class _Write(NamedTuple):
    """Bytes at a position; without bytes, a truncation to it."""

    position: int
    data: bytes | None

    def apply(self, image: bytearray) -> None:
        position, data = self
        if len(image) < position:
            image.extend(bytes(position - len(image)))
        if data is None:
            del image[position:]
        else:
            image[position : position + len(data)] = data


class _File:
    """`durable` is immutable, so that disks after a crash share it with this one."""

    __slots__ = ("_written", "durable", "unsynced")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.unsynced: list[_Write] = []
        # None until the first write: most files of a disk after a crash are only read.
        self._written: bytearray | None = None

    @property
    def content(self) -> bytes | bytearray:
        return self.durable if self._written is None else self._written

    def change(self, write: _Write) -> None:
        if write.data == b"":
            # An empty write does not even move the end of the file.
            return
        if self._written is None:
            self._written = bytearray(self.durable)
        write.apply(self._written)
        self.unsynced.append(write)

    def sync(self) -> None:
        if self.unsynced:
            self.durable = bytes(self.content)
            self.unsynced = []

    def copy(self) -> _File:
        twin = _File(self.durable)
        if self.unsynced:
            twin._written = bytearray(self.content)
            twin.unsynced = list(self.unsynced)
        return twin


class _Directory:
    __slots__ = ("durable", "entries")

    def __init__(self, entries: dict[str, _Node] | None = None) -> None:
        self.entries: dict[str, _Node] = entries or {}
        self.durable: dict[str, _Node] = dict(self.entries)


_Node: TypeAlias = _File | _Directory


class _Handle(NamedTuple):
    node: _File
    writable: bool


class _Change(NamedTuple):
    """A name now means another node, or none."""

    directory: _Directory
    name: str
    node: _Node | None

    def apply(self, entries: dict[str, _Node]) -> None:
        if self.node is None:
            entries.pop(self.name, None)
        else:
            entries[self.name] = self.node


class _Renaming:
    """Changes of names that happen in one step, and the directories that were not synced since."""

    __slots__ = ("changes", "slots", "unsynced")

    def __init__(self, changes: tuple[_Change, ...], unsynced: set[_Directory]) -> None:
        self.changes = changes
        self.unsynced = unsynced
        self.slots: set[tuple[_Directory, str] | None] = {
            (change.directory, change.name) for change in changes
        }
        if len(unsynced) > 1 and isinstance(changes[0].node, _Directory):
            # A directory got another parent. Out of their order, two of these could put two
            # directories into each other, so all of them share one more slot.
            self.slots.add(None)


def _with_predecessors(renamings: Sequence[_Renaming], chosen: Sequence[int]) -> list[int]:
    """The chosen ones and those that they build upon: the earlier changes of the same names."""
    wanted = set(chosen)
    slots: set[tuple[_Directory, str] | None] = set()
    kept = []
    for index in range(len(renamings) - 1, -1, -1):
        renaming = renamings[index]
        if index in wanted or not slots.isdisjoint(renaming.slots):
            slots |= renaming.slots
            kept.append(index)
    kept.reverse()
    return kept


def _surviving_names(
    renamings: Sequence[_Renaming], survival: Survival, random: Random
) -> Sequence[int]:
    everything = range(len(renamings))
    if survival == "nothing" or not renamings:
        return []
    if survival in {"all", "zeroes"}:
        return everything
    if survival == "prefix":
        # What a file system with a journal does.
        return everything[: random.randint(0, len(renamings))]
    chosen = _run(everything, random) if survival == "middle" else _subset(everything, random)
    return _with_predecessors(renamings, chosen)


def _surviving_bytes(file: _File, survival: Survival, random: Random, sector_bytes: int) -> bytes:
    unsynced = file.unsynced
    if survival == "nothing" or not unsynced:
        return file.durable
    if survival == "all":
        return bytes(file.content)
    if survival == "prefix":
        kept = _cut(unsynced, random)
    elif survival == "zeroes":
        kept = [
            write if write.data is None else _Write(write.position + len(write.data), b"")
            for write in unsynced
        ]
    else:
        pieces = [piece for write in unsynced for piece in _sectors(write, sector_bytes)]
        kept = _run(pieces, random) if survival == "middle" else _subset(pieces, random)
        if random.random() < 0.5:
            kept = [*kept, _Write(len(file.content), b"")]
    image = bytearray(file.durable)
    for write in kept:
        write.apply(image)
    return bytes(image)


def _cut(unsynced: Sequence[_Write], random: Random) -> Sequence[_Write]:
    last = random.randrange(len(unsynced))
    position, data = unsynced[last]
    if data is None:
        return unsynced[: last + random.randint(0, 1)]
    return [*unsynced[:last], _Write(position, data[: random.randint(0, len(data))])]


def _sectors(write: _Write, sector_bytes: int) -> Iterator[_Write]:
    position, data = write
    if data is None:
        yield write
        return
    start = 0
    while start < len(data):
        end = start + sector_bytes - (position + start) % sector_bytes
        yield _Write(position + start, data[start:end])
        start = end


_Item = TypeVar("_Item")


def _run(items: Sequence[_Item], random: Random) -> Sequence[_Item]:
    first = random.randint(min(1, len(items) - 1), len(items) - 1)
    return items[first : random.randint(first + 1, len(items))]


def _subset(items: Sequence[_Item], random: Random) -> Sequence[_Item]:
    # The share differs from crash to crash: nearly all and nearly nothing are likely, too.
    share = random.random()
    return [item for item in items if random.random() < share]


def _walk(path: str, directory: _Directory) -> Iterator[tuple[str, _Node]]:
    for name, node in sorted(directory.entries.items()):
        yield f"{path}/{name}", node
        if isinstance(node, _Directory):
            yield from _walk(f"{path}/{name}", node)


def _copy_node(node: _Node, copies: dict[_Node, _Node]) -> _Node:
    if isinstance(node, _Directory):
        return _copy_directory(node, copies)
    if node not in copies:
        copies[node] = node.copy()
    return copies[node]


def _copy_directory(directory: _Directory, copies: dict[_Node, _Node]) -> _Directory:
    twin = copies.get(directory)
    if twin is None:
        # Known before its entries are copied: what is durable and what is written may name each
        # other in a circle.
        twin = copies[directory] = _Directory()
        for name, node in directory.entries.items():
            twin.entries[name] = _copy_node(node, copies)
        for name, node in directory.durable.items():
            twin.durable[name] = _copy_node(node, copies)
    assert isinstance(twin, _Directory)
    return twin


def _check_replaceable(node: _Node, replaced: _Node, path: str) -> None:
    if isinstance(replaced, _File):
        if isinstance(node, _Directory):
            raise _error(errno.ENOTDIR, path)
    elif isinstance(node, _File):
        raise _error(errno.EISDIR, path)
    elif replaced.entries:
        raise _error(errno.ENOTEMPTY, path)


def _error(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path)
