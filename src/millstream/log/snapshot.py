"""Snapshots of volatile queues: files that hold what a queue held at one instant.

A binary file is a header and pieces, each with a CRC-32C; numbers are big-endian:

    header  magic      8s   MSQUEUE\\n
            version    u32  1
            crc        u32  of the rest of the header
            count      u64  messages
            bytes      u64  of all messages
            capacity   u64  the queue's limits, for a queue that is made anew
            bytes_max  u64
            name       u16 length, then the queue's name
    piece   count      u32  messages in this piece
            bytes      u32  of their bodies
            crc        u32  of the rest of the piece, beginning with the CRC before it
            stamps     u64 each
            lengths    u32 each
            bodies     one after the other

Columns, because a piece is then made and read by a handful of calls, whatever the number of
messages: a thread that does this beside the event loop holds the GIL for a millisecond at a time.
Each CRC begins with the one before, so that a piece that is missing or out of place is noticed.

A file whose name ends with `.json` is for people: one object, a message a line. It has no
checksum, because people may edit it. It can only be read in one go, which would hold the GIL: a
large one is read by a child process (`snapshot_child.py`), which hands it on in the binary form.
"""

from __future__ import annotations

import base64
import errno
import re
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec
from crc32c import crc32c

from millstream.errors import MillstreamError, SnapshotFailed, SnapshotInvalid, SnapshotUnknown
from millstream.log.disk import Disk, close_file, write_all

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"MSQUEUE\n"
VERSION = 1
START = struct.Struct(">8sII")
FACTS = struct.Struct(">QQQQH")
PIECE = struct.Struct(">II")
CRC = struct.Struct(">I")
# Bytes of stamp and length.
ENTRY_BYTES = 12

# A piece ends when it has so many messages, or so many bytes, so that neither many small messages
# nor a few large ones keep the GIL for long.
PIECE_MESSAGES = 4096
PIECE_BYTES = 1 << 20
# A default queue in base64, and then some.
JSON_BYTES_MAX = 512 << 20
# Up to here JSON is read in half a millisecond, which is less than a child process costs.
JSON_INLINE_BYTES = 256 << 10
# Stamps are twice a time in microseconds.
ENQUEUED_AT_MAX = 2**62

# Leaves room for the suffix of the temporary file within the 255 bytes that a name may have.
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,250}")
# How a child's answer begins.
CHILD_READS, CHILD_REFUSES = b"+", b"-"
TEMPORARY = ".new"
SET_ASIDE = ".refused"


class Facts(NamedTuple):
    """What a snapshot says of itself before its messages."""

    queue_name: str
    messages: int
    bytes: int
    # 0 when the file does not say.
    capacity: int
    bytes_max: int


class Snapshot(NamedTuple):
    """A queue at one instant: bodies and stamps side by side, oldest first."""

    facts: Facts
    bodies: list[bytes]
    stamps: list[int]


# Raises when there is no room for what a file holds.
RoomCheck: TypeAlias = Callable[[Facts], None]


class SnapshotFolder:
    """The files. Calls wait for the disk: they belong into a thread."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path

    def names(self) -> list[str]:
        """Snapshots that are there; leftovers of a crash and what was set aside do not count."""
        try:
            found = self._disk.list_directory(self._path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(self._path.rpartition("/")[2], "listed", error) from error
        return [
            name
            for name in found
            if FILE_NAME.fullmatch(name) and not name.endswith((TEMPORARY, SET_ASIDE))
        ]

    def write(self, name: str, snapshot: Snapshot) -> int:
        """Replace a file in one step; answers its size. After any crash it is the old or the new.

        1. write beside it, 2. sync the bytes, 3. rename over it, 4. sync the directory.
        """
        path = self._file(name)
        pieces = _json_pieces(snapshot) if name.endswith(".json") else binary_pieces(snapshot)
        try:
            self._make_folder()
            size = self._write_beside(path + TEMPORARY, pieces)
            self._disk.rename(path + TEMPORARY, path)
            self._disk.sync_directory(self._path)
        except (OSError, SnapshotInvalid) as error:
            with suppress(OSError):
                self._disk.unlink(path + TEMPORARY)
            raise _failed(name, "written", error) from error
        return size

    def read(self, name: str, check_room: RoomCheck) -> Snapshot:
        """The whole of a file that is right in every byte; else SnapshotInvalid."""
        path = self._file(name)
        try:
            file = self._disk.open(path, "read")
        except FileNotFoundError as error:
            raise SnapshotUnknown(f"there is no snapshot {name!r}", file=name) from error
        except OSError as error:
            raise _failed(name, "opened", error) from error
        try:
            reader = _Reader(self._disk, file, name)
            read = read_json if name.endswith(".json") else read_binary
            return read(reader, check_room)
        except OSError as error:
            raise _failed(name, "read", error) from error
        finally:
            close_file(self._disk, file)

    def size(self, name: str) -> int:
        """Of a file, in bytes; 0 when it is not there."""
        return self._disk.size_of(self._file(name)) or 0

    def remove(self, name: str) -> None:
        try:
            self._disk.unlink(self._file(name))
            self._disk.sync_directory(self._path)
        except OSError as error:
            raise _failed(name, "removed", error) from error

    def set_aside(self, name: str) -> str:
        """Keep a file that was refused, under another name; answers that name."""
        try:
            self._disk.rename(self._file(name), self._file(name) + SET_ASIDE)
            self._disk.sync_directory(self._path)
        except OSError as error:
            raise _failed(name, "set aside", error) from error
        return name + SET_ASIDE

    def _file(self, name: str) -> str:
        check_file_name(name)
        return f"{self._path}/{name}"

    def _make_folder(self) -> None:
        """The folder and those above it, each durable in the one that holds it."""
        missing = []
        path = self._path
        while self._disk.size_of(path) is None:
            missing.append(path)
            path = path.rpartition("/")[0] or "/"
        for path in reversed(missing):
            with suppress(FileExistsError):
                self._disk.make_directory(path)
            self._disk.sync_directory(path.rpartition("/")[0] or "/")

    def _write_beside(self, path: str, pieces: Iterator[Sequence[Buffer]]) -> int:
        file = self._disk.open(path, "create")
        try:
            self._disk.truncate(file, 0)
            position = 0
            for buffers in pieces:
                position += write_all(self._disk, file, buffers, position)
            self._disk.sync(file)
        finally:
            close_file(self._disk, file)
        return position


def check_file_name(name: str) -> None:
    """A plain name: what could lead out of the folder is refused, not repaired."""
    if not FILE_NAME.fullmatch(name) or name.endswith((TEMPORARY, SET_ASIDE)):
        raise SnapshotInvalid(
            f"{name[:260]!r} is not the name of a snapshot: up to 251 of letters, digits, `.`, `_` "
            "and `-`, not beginning with `.`, and no path",
            file=name[:260],
        )


# ---- binary


def binary_pieces(snapshot: Snapshot) -> Iterator[Sequence[Buffer]]:
    facts, bodies, stamps = snapshot
    name = facts.queue_name.encode()
    rest = (
        FACTS.pack(facts.messages, facts.bytes, facts.capacity, facts.bytes_max, len(name)) + name
    )
    crc = crc32c(rest)
    yield START.pack(MAGIC, VERSION, crc), rest
    for first, end in _cuts(bodies):
        joined = b"".join(bodies[first:end])
        head = PIECE.pack(end - first, len(joined))
        columns = _big_endian("Q", stamps[first:end])
        columns += _big_endian("I", list(map(len, bodies[first:end])))
        crc = crc32c(joined, crc32c(columns, crc32c(head, crc)))
        yield head, CRC.pack(crc), columns, joined


def _cuts(bodies: list[bytes]) -> Iterator[tuple[int, int]]:
    """Where pieces begin and end."""
    first = 0
    while first < len(bodies):
        end = first
        size = 0
        for body in bodies[first : first + PIECE_MESSAGES]:
            size += len(body)
            if size > PIECE_BYTES and end > first:
                break
            end += 1
        yield first, end
        first = end


def _big_endian(code: str, numbers: list[int]) -> bytes:
    column = array(code, numbers)
    if sys.byteorder == "little":
        column.byteswap()
    return column.tobytes()


def _numbers(code: str, data: bytes) -> list[int]:
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "little":
        column.byteswap()
    return column.tolist()


class Reader(Protocol):
    """A snapshot from its beginning to its end."""

    @property
    def left(self) -> int:
        """How many bytes there still are; of a stream, whether there are any."""
        ...

    def take(self, size: int) -> bytes: ...

    def invalid(self, why: str) -> SnapshotInvalid: ...


class _Reader:
    """One in a file."""

    def __init__(self, disk: Disk, file: int, name: str) -> None:
        self._disk = disk
        self._file = file
        self._position = 0
        self.name = name
        self.size = disk.size(file)

    @property
    def left(self) -> int:
        return self.size - self._position

    def take(self, size: int) -> bytes:
        # Compared first: a length that is damaged must not become an allocation.
        data = self._disk.read(self._file, size, self._position) if size <= self.left else b""
        if len(data) < size:
            raise self.invalid("it ends too early")
        self._position += size
        return data

    def invalid(self, why: str) -> SnapshotInvalid:
        return invalid(self.name, why)


def invalid(name: str, why: str) -> SnapshotInvalid:
    return SnapshotInvalid(
        f"the snapshot {name!r} cannot be used, and the queue is as it was: {why}", file=name
    )


def read_binary(reader: Reader, check_room: RoomCheck) -> Snapshot:
    magic, version, crc = START.unpack(reader.take(START.size))
    if magic != MAGIC:
        raise reader.invalid("it is not a snapshot of a queue")
    if version != VERSION:
        raise reader.invalid(f"it has version {version}, and this broker reads {VERSION}")
    fixed = reader.take(FACTS.size)
    count, size, capacity, bytes_max, name_length = FACTS.unpack(fixed)
    name = reader.take(name_length)
    if crc32c(name, crc32c(fixed)) != crc:
        raise reader.invalid("its header is damaged")
    facts = Facts(name.decode(errors="replace"), count, size, capacity, bytes_max)
    check_room(facts)
    bodies: list[bytes] = []
    stamps: list[int] = []
    while len(bodies) < count:
        crc = _read_piece(reader, crc, bodies, stamps)
    if reader.left or len(bodies) != count:
        raise reader.invalid("it holds more than it says")
    return Snapshot(facts, bodies, stamps)


def _read_piece(reader: Reader, crc: int, bodies: list[bytes], stamps: list[int]) -> int:
    head = reader.take(PIECE.size)
    count, size = PIECE.unpack(head)
    (right,) = CRC.unpack(reader.take(CRC.size))
    columns = reader.take(count * ENTRY_BYTES)
    joined = reader.take(size)
    found = crc32c(joined, crc32c(columns, crc32c(head, crc)))
    lengths = _numbers("I", columns[count * 8 :])
    if found != right or sum(lengths) != size or not count:
        raise reader.invalid("a piece of it is damaged")
    ends = list(accumulate(lengths))
    bodies.extend(map(joined.__getitem__, map(slice, [0, *ends[:-1]], ends)))
    stamps.extend(_numbers("Q", columns[: count * 8]))
    return found


# ---- JSON


class _JsonMessage(msgspec.Struct, forbid_unknown_fields=True):
    payload: msgspec.Raw
    enqueued_at: int
    encoding: str | None = None


class _JsonFile(msgspec.Struct, forbid_unknown_fields=True):
    queue_name: str
    messages: list[_JsonMessage]
    capacity: int = 0
    max_bytes: int = 0


_json_file = msgspec.json.Decoder(_JsonFile)
_text = msgspec.json.Decoder(str)


def _json_pieces(snapshot: Snapshot) -> Iterator[Sequence[Buffer]]:
    facts, bodies, stamps = snapshot
    size = 0
    head = b'{"queue_name":"%b","capacity":%d,"max_bytes":%d,"messages":['
    yield (head % (facts.queue_name.encode(), facts.capacity, facts.bytes_max),)
    for first, end in _cuts(bodies):
        lines = b",".join(map(_json_line, bodies[first:end], stamps[first:end]))
        size += len(lines)
        if size > JSON_BYTES_MAX:
            raise SnapshotInvalid(
                f"as JSON the queue would have more than {JSON_BYTES_MAX} bytes; "
                "use a file name that does not end with `.json`"
            )
        yield (b"," if first else b""), lines
    yield (b"\n]}\n",)


def _json_line(body: bytes, stamp: int) -> bytes:
    if stamp & 1:
        return b'\n{"payload":%b,"enqueued_at":%d}' % (body, stamp >> 1)
    encoded = base64.b64encode(body)
    return b'\n{"payload":"%b","encoding":"base64","enqueued_at":%d}' % (encoded, stamp >> 1)


def read_json(reader: _Reader, check_room: RoomCheck) -> Snapshot:
    if reader.size > JSON_BYTES_MAX + 1024:
        raise reader.invalid(f"a JSON snapshot may have {JSON_BYTES_MAX} bytes")
    if reader.size > JSON_INLINE_BYTES:
        return _read_in_child(reader, check_room)
    try:
        snapshot = parse_json(reader.take(reader.size))
    except ValueError as error:
        raise reader.invalid(str(error)) from error
    check_room(snapshot.facts)
    return snapshot


def parse_json(text: bytes) -> Snapshot:
    """ValueError, with why, when it is none."""
    if not text.isascii():
        # Payloads are kept as they are, so the decoder does not look into them.
        text.decode()
    try:
        page = _json_file.decode(text)
    except RecursionError as error:
        raise ValueError("a payload is nested too deeply") from error
    if not min(page.capacity, page.max_bytes) >= 0:
        raise ValueError("a limit is below zero")
    bodies: list[bytes] = []
    stamps: list[int] = []
    for message in page.messages:
        is_json = message.encoding is None
        if not 0 <= message.enqueued_at < ENQUEUED_AT_MAX:
            raise ValueError(f"{message.enqueued_at} is no time in microseconds")
        bodies.append(bytes(message.payload) if is_json else _decoded(message))
        stamps.append(message.enqueued_at << 1 | is_json)
    size = sum(map(len, bodies))
    facts = Facts(page.queue_name, len(bodies), size, page.capacity, page.max_bytes)
    return Snapshot(facts, bodies, stamps)


def _decoded(message: _JsonMessage) -> bytes:
    if message.encoding != "base64":
        raise ValueError(f"the encoding {message.encoding!r} is not known; use `base64`")
    try:
        return base64.b64decode(_text.decode(message.payload), validate=True)
    except ValueError as error:
        raise ValueError(f"a payload is not base64: {error}") from error


# ---- JSON that is large


class _Stream:
    """A snapshot that a child process writes."""

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self._pipe = pipe
        self.name = name

    @property
    def left(self) -> int:
        return len(self._pipe.read(1))

    def take(self, size: int) -> bytes:
        data = self._pipe.read(size)
        if len(data) < size:
            raise SnapshotFailed(
                f"the snapshot {self.name!r} could not be read: the process that reads it ended; "
                "try again",
                file=self.name,
            )
        return data

    def invalid(self, why: str) -> SnapshotInvalid:
        return invalid(self.name, why)


def _read_in_child(reader: _Reader, check_room: RoomCheck) -> Snapshot:
    """The child gets the file, and answers with the snapshot, or with why it is none."""
    with subprocess.Popen(
        [sys.executable, "-m", "millstream.log.snapshot_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):
                while reader.left:
                    child.stdin.write(reader.take(min(reader.left, PIECE_BYTES)))
                child.stdin.close()
            stream = _Stream(child.stdout, reader.name)
            if stream.take(1) == CHILD_REFUSES:
                raise reader.invalid(child.stdout.read().decode())
            return read_binary(stream, check_room)
        finally:
            child.kill()


def _failed(name: str, what: str, error: OSError | SnapshotInvalid) -> MillstreamError:
    if isinstance(error, SnapshotInvalid):
        return error
    if error.errno == errno.ELOOP:
        return SnapshotInvalid(
            f"the snapshot {name!r} is a symbolic link, which could lead out of the folder; "
            "put the file itself there",
            file=name,
        )
    return SnapshotFailed(
        f"the snapshot {name!r} could not be {what}: {error.strerror}; look at the disk "
        "and the data directory, then try again",
        file=name,
    )
