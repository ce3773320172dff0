"""HTTP/1.1 from the client's side: one connection, one exchange at a time. No dependencies.

What can go wrong is told apart by what the broker may have done:

    Unsent    no byte of the request left: trying again is always safe
    Unheard   the request left, and no whole answer came: the broker may have done it, or not

An answer is read exactly: a status line, headers, and a body by `content-length`, by chunks, or up
to the end of the connection. What does not parse, or is larger than allowed, ends the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

# As a reader of headers that nobody uses would otherwise grow.
HEAD_BYTES_MAX = 64 * 1024
_CHUNK_LINE_BYTES_MAX = 1024
_NO_BODY = frozenset((204, 304))


class Unsent(Exception):
    """No connection, so nothing was asked."""


class Unheard(Exception):
    """The connection ended, or time ran out, before the whole answer was there."""


class AnswerInvalid(Unheard):
    """What came is not HTTP, or is larger than allowed."""


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # names in lower case; of a repeated one the last
    body: bytes


class Connection(asyncio.Protocol):
    """A connection that is kept open. `on_end` is called once, when it can be used no more."""

    __slots__ = (
        "_answer_bytes_max",
        "_on_end",
        "_parser",
        "_transport",
        "_waiter",
        "idle_since_s",
        "is_open",
    )

    def __init__(self, answer_bytes_max: int, on_end: Callable[[Connection], None]) -> None:
        self._answer_bytes_max = answer_bytes_max
        self._on_end = on_end
        self._parser = AnswerParser(answer_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self.is_open = False
        # When it answered last, by the loop's clock.
        self.idle_since_s = 0.0

    def exchange(self, request: list[bytes]) -> asyncio.Future[Reply]:
        """Send a request; the future has its answer. The caller waits for one at a time."""
        assert self._waiter is None
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._transport is None or not self.is_open:
            waiter.set_exception(Unsent("the connection is closed"))
            return waiter
        self._waiter = waiter
        self._transport.writelines(request)
        return waiter

    def give_up(self, why: str) -> None:
        """Wait no longer for the answer."""
        self._fail(Unheard(why))
        self.close()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What uvloop gives is one, though not by its class.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # Nothing was asked: the other side is confused, or says why it closes.
            self.close()
            return
        try:
            reply = self._parser.feed(data)
        except AnswerInvalid as error:
            self._fail(error)
            self.close()
            return
        if reply is not None:
            self._finish(reply)

    def eof_received(self) -> None:
        reply = None if self._waiter is None else self._parser.finish()
        if reply is not None:
            self._finish(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.is_open = False
        self._fail(Unheard(f"the connection was closed: {error or 'the other side ended it'}"))
        self._on_end(self)

    def _finish(self, reply: Reply) -> None:
        waiter, self._waiter = self._waiter, None
        if self._parser.is_last or self._parser.has_more:
            self.close()
        self._parser = AnswerParser(self._answer_bytes_max)
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)


class AnswerParser:
    """Bytes in, one answer out."""

    __slots__ = (
        "_body",
        "_buffer",
        "_bytes_max",
        "_headers",
        "_left",
        "_status",
        "_step",
        "has_more",
        "is_last",
    )

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self._step: Callable[[], Reply | None] = self._read_head
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._left = 0
        # Whether the connection ends after it, and whether bytes follow that nobody asked for.
        self.is_last = False
        self.has_more = False

    def feed(self, data: bytes) -> Reply | None:
        self._buffer += data
        reply = self._step()
        if reply is not None and self._buffer:
            self.has_more = True
        return reply

    def finish(self) -> Reply | None:
        """At the end of the connection: an answer without a length is complete now."""
        return self._reply() if self._step == self._read_to_end else None

    def _read_head(self) -> Reply | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise AnswerInvalid(f"the answer's head has more than {HEAD_BYTES_MAX} bytes")
            return None
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        self._read_status(lines[0])
        self._headers = _headers(lines[1:])
        if 100 <= self._status < 200 and self._status != 101:
            return self._read_head()
        self.is_last |= self._headers.get(b"connection", b"").lower() == b"close"
        if self._status in _NO_BODY or self._status == 101:
            return self._reply()
        if b"chunked" in self._headers.get(b"transfer-encoding", b"").lower():
            self._step = self._read_chunk
        elif b"content-length" in self._headers:
            self._left = _length(self._headers[b"content-length"])
            self._check_size(self._left)
            self._step = self._read_counted
        else:
            self.is_last = True
            self._step = self._read_to_end
        return self._step()

    def _read_status(self, line: bytes) -> None:
        parts = line.split(b" ", 2)
        is_http = parts[0] in (b"HTTP/1.1", b"HTTP/1.0") and len(parts) > 1
        if not is_http or not parts[1].isdigit() or len(parts[1]) != 3:
            raise AnswerInvalid(f"this is no answer in HTTP: {line[:40]!r}")
        self.is_last = parts[0] == b"HTTP/1.0"
        self._status = int(parts[1])

    def _read_counted(self) -> Reply | None:
        if len(self._buffer) < self._left:
            return None
        self._body, self._buffer = self._buffer, self._buffer[self._left :]
        del self._body[self._left :]
        return self._reply()

    def _read_to_end(self) -> Reply | None:
        self._body += self._buffer
        self._buffer.clear()
        self._check_size(len(self._body))
        return None

    def _read_chunk(self) -> Reply | None:
        while True:
            end = self._buffer.find(b"\r\n", 0, _CHUNK_LINE_BYTES_MAX)
            if end < 0:
                if len(self._buffer) >= _CHUNK_LINE_BYTES_MAX:
                    raise AnswerInvalid("a chunk's length does not end")
                return None
            size = _hexadecimal(bytes(self._buffer[:end]).partition(b";")[0])
            if size == 0:
                self._step = self._read_trailers
                return self._step()
            self._check_size(len(self._body) + size)
            stop = end + 2 + size
            if len(self._buffer) < stop + 2:
                return None
            if self._buffer[stop : stop + 2] != b"\r\n":
                raise AnswerInvalid("a chunk is longer than it says")
            self._body += self._buffer[end + 2 : stop]
            del self._buffer[: stop + 2]

    def _read_trailers(self) -> Reply | None:
        """From the last chunk's line on: fields that nobody reads, then an empty line."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise AnswerInvalid("the fields after the last chunk do not end")
            return None
        del self._buffer[: end + 4]
        return self._reply()

    def _reply(self) -> Reply:
        return Reply(self._status, self._headers, bytes(self._body))

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise AnswerInvalid(f"the answer has more than {self._bytes_max} bytes")


def request_head(method: str, path: str, fixed: bytes, size: int, media: bytes | None) -> bytes:
    """`fixed` has the lines that all requests share. A line break would be a second request."""
    assert not any(character in path for character in "\r\n ")
    head = f"{method} {path} HTTP/1.1\r\n".encode("ascii") + fixed
    if media is not None:
        head += b"content-type: %b\r\n" % media
    if size or method in ("POST", "PUT", "PATCH"):
        head += b"content-length: %d\r\n" % size
    return head + b"\r\n"


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name:
            raise AnswerInvalid(f"this is no header: {line[:40]!r}")
        headers[name.lower()] = value.strip()
    return headers


def _length(text: bytes) -> int:
    if not text.isdigit():
        raise AnswerInvalid(f"this is no length: {text[:40]!r}")
    return int(text)


def _hexadecimal(text: bytes) -> int:
    try:
        return int(text.strip(), 16)
    except ValueError:
        raise AnswerInvalid(f"this is no length of a chunk: {text[:40]!r}") from None
