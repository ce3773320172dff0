"""One connection: frames in, answers out, in the order of requests.

Small requests are cut out of a buffer that all connections share: the loop reads, and hands over
what it read, in one step. A request that does not end in there gets its own memory, of exactly its
size, and the rest of it is read straight into that: a large batch is not copied on its way in.

Requests of one connection are served at once, and answered in order: `_line` holds those whose turn
has not come. A connection is not read from

- while as many of its requests wait as are allowed, or while all connections together hold as many
  bytes as are allowed;
- while its client does not read its answers.

What was read by then stays in `_rest`, and a request with its own memory in `_whole`. Nobody takes
for ever: a request has to come within a time, answers have to be read within one, and an idle
connection is closed (`sweep`, which the listener calls once a second).
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, cast

from millstream.engine.pending import Pending
from millstream.kinds import Address
from millstream.listeners.kafka.apis import Call
from millstream.listeners.kafka.sending import NO_FILE, send, socket_file
from millstream.observe.logs import get_logger
from millstream.wire.kafka import frames
from millstream.wire.kafka.primitives import RequestInvalid, size_of

if TYPE_CHECKING:
    from millstream.listeners.kafka.apis import Api, Reply
    from millstream.wire.kafka.frames import RequestHeader
    from millstream.wire.kafka.primitives import Pieces

# What is read at once, for all connections together.
SHARED_BYTES = 256 * 1024
# A request from this size on has pages of its own. Larger than what clients send by default, for
# whom memory that malloc keeps is quicker.
OWN_PAGES_BYTES = 4 * 1024 * 1024
# Answers that were not taken by the kernel; past it the client is not read from.
UNREAD_BYTES = 256 * 1024
# Of answers to one client in a turn of the loop; then others have theirs.
SENT_BYTES_MAX = 16 * 1024 * 1024
# A request that takes longer, from its first byte to its last, is not being sent in earnest. It
# gets a second more for every 16 KiB that came.
REQUEST_S_MAX = 30.0
REQUEST_BYTES_PER_S_MIN = 16 * 1024
# Kafka's own: clients open an idle connection again when they need it.
IDLE_S_MAX = 600.0
# How long answers may lie unread. As long: a client may read only when its program asks it to.
UNREAD_S_MAX = 600.0
API_VERSIONS = 18
# Connections that go on in one turn of the loop, when there is room again for all that wait.
TOLD_MAX = 16

log = get_logger("kafka")


@dataclass(slots=True)
class Counts:
    """Plain numbers for the metrics page."""

    connections: int = 0
    turned_away: int = 0
    # Requests that could not be read, each the end of its connection.
    invalid: int = 0
    # Connections ended because their clients were too slow, or silent for too long.
    ended: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    # Errors in answers, by Kafka's name of them.
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    request_bytes_max: int = 100 * 1024 * 1024
    # Of one connection, received and not answered.
    requests_max: int = 100
    # Of all connections: one half for requests that arrive, the other for requests that are not
    # answered and answers that are not read.
    buffer_bytes_max: int = 512 * 1024 * 1024


@dataclass(slots=True)
class Shared:
    """What all connections of a listener have in common."""

    limits: Limits
    # Filled by who makes the handlers, which need the rest of this.
    table: dict[int, Api] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    is_logging: bool = False
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(SHARED_BYTES)))
    buffer_bytes: int = 0
    claimed_bytes: int = 0
    connections: set[Connection] = field(default_factory=set)
    # Connections that wait until there is room again, and those whose request waits for its own
    # memory, of so many bytes. Who came first goes first.
    waiting: dict[Connection, None] = field(default_factory=dict)
    claiming: dict[Connection, int] = field(default_factory=dict)
    _invited: Connection | None = None
    _is_telling: bool = False
    # What the last one did that could not be read, to be told once a second.
    complaint: str = ""

    @property
    def room(self) -> int:
        """For answers, and for requests that wait for theirs: half of all."""
        return self.limits.buffer_bytes_max // 2 - self.buffer_bytes

    def hold(self, size: int) -> None:
        self.buffer_bytes += size

    def release(self, size: int) -> None:
        self.buffer_bytes -= size
        self._tell()

    def claim(self, one: Connection, size: int) -> bool:
        """Whether there is room for a request that comes in pieces; the other half is for those.
        One that has begun has room to its end, so that they never wait for each other. Who gets
        none is told later."""
        is_next = not self.claiming or one is self._invited
        if is_next and self._is_room_for(size):
            self.claimed_bytes += size
            return True
        self.claiming[one] = size
        return False

    def unclaim(self, size: int) -> None:
        self.claimed_bytes -= size
        self._tell()

    def forget(self, one: Connection) -> None:
        self.waiting.pop(one, None)
        self.claiming.pop(one, None)

    def _is_room_for(self, size: int) -> bool:
        claimed = self.claimed_bytes
        return not claimed or claimed + size <= self.limits.buffer_bytes_max // 2

    def _tell(self) -> None:
        """Those that wait, some of them in each turn: who goes on may take the room again, or give
        back more, and a release must not cost what all of them do."""
        if self._is_telling or not (self.waiting or self.claiming):
            return
        if self._next() is not None:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell_some(self) -> None:
        self._is_telling = False
        for _ in range(TOLD_MAX):
            one = self._invited = self._next()
            if one is None:
                return
            self.forget(one)
            one.go_on()
            self._invited = None
        self._tell()

    def _next(self) -> Connection | None:
        """Who may go on."""
        if self.room <= 0:
            return None
        if self.waiting:
            return next(iter(self.waiting))
        for one, size in self.claiming.items():
            return one if self._is_room_for(size) else None
        return None


class _Slot:
    """A request that has its place in the line."""

    __slots__ = ("api", "begin_s", "call", "correlation_id", "held", "is_done", "reply", "size")

    def __init__(self, api: Api, call: Call, correlation_id: int, size: int) -> None:
        self.api = api
        self.call = call
        self.correlation_id = correlation_id
        # Of the request; and what is held for it, with the answer once that waits in the line.
        self.size = self.held = size
        self.begin_s = 0.0
        self.is_done = False
        self.reply: Reply = None


class Connection(asyncio.BufferedProtocol):
    __slots__ = (
        "_advertised",
        "_file",
        "_filled",
        "_frame",
        "_here",
        "_is_ending",
        "_is_flushing",
        "_is_lost",
        "_is_paused",
        "_is_unread",
        "_line",
        "_loop",
        "_out",
        "_out_bytes",
        "_peer",
        "_rest",
        "_shared",
        "_since_s",
        "_start",
        "_transport",
        "_unread",
        "_whole",
    )

    def __init__(
        self,
        shared: Shared,
        loop: asyncio.AbstractEventLoop,
        advertised: Address | None = None,
    ) -> None:
        self._shared = shared
        self._loop = loop
        # What its client is told to come back to; None is where it came to.
        self._advertised = advertised
        self._transport: asyncio.Transport | None = None
        # Of the socket, for answers that go out past the transport.
        self._file = NO_FILE
        self._here = Address("", 0)
        self._peer = ""
        # Fewer bytes than a size takes; or a request that has its size, and how much of it is here.
        self._start = b""
        self._frame: memoryview | None = None
        self._filled = 0
        # One that is all here, and for which there is no room yet; it keeps its claim.
        self._whole: memoryview | None = None
        # What was read and is not to be served yet.
        self._rest = b""
        self._line: deque[_Slot] = deque()
        self._out: Pieces = []
        self._out_bytes = 0
        self._is_flushing = False
        self._is_paused = False
        self._is_unread = False
        # Bytes of answers that the client has not read, as they were counted last.
        self._unread = 0
        self._is_ending = False
        self._is_lost = False
        # When it was last heard of; while a request comes in, when that began.
        self._since_s = loop.time()

    # ---- the event loop calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(UNREAD_BYTES)
        self._file = socket_file(transport)
        self._here = self._advertised or _place(transport.get_extra_info("sockname"))
        self._peer = str(_place(transport.get_extra_info("peername")))
        self._shared.connections.add(self)
        self._shared.counts.connections += 1

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._is_lost = True
        shared = self._shared
        shared.connections.discard(self)
        shared.forget(self)
        # What is in the engine goes on, and its answer finds nobody.
        held = self._unread + self._out_bytes + sum(slot.held for slot in self._line)
        claimed = sum(len(one) for one in (self._frame, self._whole) if one is not None)
        hurried = [slot.call for slot in self._line]
        self._line.clear()
        self._frame = self._whole = None
        self._rest = b""
        self._out = []
        self._unread = self._filled = self._out_bytes = 0
        shared.release(held)
        shared.unclaim(claimed)
        for call in hurried:
            call.hurry()

    def get_buffer(self, size_hint: int) -> memoryview:
        del size_hint
        if self._frame is not None:
            return self._frame[self._filled :]
        return self._shared.buffer

    def buffer_updated(self, count: int) -> None:
        self._shared.counts.bytes_in += count
        frame = self._frame
        if frame is None:
            self._read(self._shared.buffer[:count])
            return
        self._filled += count
        if self._filled == len(frame):
            self._frame = None
            self._filled = 0
            self._whole = frame
            if self._is_full():
                self._pause()
            else:
                self._serve_whole(frame)

    def eof_received(self) -> bool:
        """A client that sends no more may still read its answers, but not wait for any: as a rule
        it is gone. With TLS there is no such half of a connection."""
        self.shut()
        transport = self._transport
        return transport is not None and transport.get_extra_info("ssl_object") is None

    def pause_writing(self) -> None:
        self._is_unread = True
        self._since_s = self._loop.time()
        self._count_unread()
        self._mind_limits()

    def resume_writing(self) -> None:
        self._is_unread = False
        self._count_unread()
        self.go_on()

    # ---- the listener calls these

    def sweep(self, now_s: float) -> None:
        """End it when it takes too long for what it is at."""
        if self._frame is not None:
            allowed_s = REQUEST_S_MAX + self._filled / REQUEST_BYTES_PER_S_MIN
        elif self._start:
            allowed_s = REQUEST_S_MAX
        elif self._is_unread:
            allowed_s = UNREAD_S_MAX
        elif self._line or self._is_paused:
            return
        else:
            allowed_s = IDLE_S_MAX
        if now_s - self._since_s > allowed_s:
            self._shared.counts.ended += 1
            self.cut()

    def shut(self) -> None:
        """Take no more requests, and close when those that are there are answered."""
        self._end()
        for slot in list(self._line):
            slot.call.hurry()

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def go_on(self) -> None:
        """Whatever kept it from being read may be over."""
        if self._is_lost or self._is_ending or not self._is_paused:
            return
        if self._is_full():
            self._wait_for_room()
            return
        self._is_paused = False
        if self._whole is not None:
            self._serve_whole(self._whole)
        rest, self._rest = self._rest, b""
        if rest:
            self._read(memoryview(rest))
        self._resume()

    def _resume(self) -> None:
        """Unless what was left over was too much again, or wrong."""
        if not self._is_paused and not self._is_ending and self._transport is not None:
            self._transport.resume_reading()

    # ---- requests

    def _read(self, data: memoryview) -> None:
        if self._is_paused:
            # With TLS, what was decrypted already comes all the same.
            self._rest += data
            return
        if self._start:
            data = memoryview(self._start + data)
            self._start = b""
        self._since_s = self._loop.time()
        at, end, sent = 0, len(data), 0
        while not self._is_ending:
            if self._is_full():
                # At once: what is flushed below may make room, and then it is told.
                self._rest = bytes(data[at:])
                self._pause()
                break
            if end - at < frames.SIZE_BYTES:
                self._start = bytes(data[at:])
                break
            size: int = frames.SIZE.unpack_from(data, at)[0]
            if not frames.REQUEST_BYTES_MIN <= size <= self._shared.limits.request_bytes_max:
                spoken = frames.other_protocol(data[at:])
                self._refuse(f"a request says that it has {size} bytes{spoken}")
                break
            begin = at + frames.SIZE_BYTES
            if end - begin < size:
                if self._shared.claim(self, size):
                    self._begin(size, data[begin:])
                else:
                    self._rest = bytes(data[at:])
                    self._pause()
                break
            at = begin + size
            self._serve(memoryview(bytes(data[begin:at])))
            if self._out_bytes > UNREAD_BYTES:
                # So that a client that does not read is noticed before all of it is answered.
                sent += self._out_bytes
                self._flush()
                if sent > SENT_BYTES_MAX:
                    # One that reads as fast as it is answered is not all there is.
                    self._rest = bytes(data[at:])
                    self._pause()
                    self._loop.call_soon(self.go_on)
                    break
        self._flush()
        self._mind_limits()

    def _begin(self, size: int, start: memoryview) -> None:
        """The first part of a request whose rest is read into its own memory."""
        self._frame = memoryview(_memory(size))
        self._frame[: len(start)] = start
        self._filled = len(start)

    def _serve_whole(self, frame: memoryview) -> None:
        self._whole = None
        self._serve(frame)
        self._flush()
        self._mind_limits()
        self._shared.unclaim(len(frame))

    def _is_full(self) -> bool:
        """Whether there is too much to do. A request that has begun is read to its end."""
        if self._frame is not None:
            return False
        shared = self._shared
        return self._is_unread or len(self._line) >= shared.limits.requests_max or shared.room <= 0

    def _mind_limits(self) -> None:
        if not self._is_paused and not self._is_ending and self._is_full():
            self._pause()

    def _pause(self) -> None:
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Unless it waits for something of its own, which goes on by itself."""
        if self._shared.room <= 0:
            self._shared.waiting[self] = None

    def _serve(self, frame: memoryview) -> None:
        try:
            header = frames.read_header(frame)
            self._answer(header, frame)
        except RequestInvalid as error:
            self._refuse(str(error))
        except Exception:
            log.exception("a request failed", peer=self._peer)
            self._end()

    def _answer(self, header: RequestHeader, frame: memoryview) -> None:
        shared = self._shared
        api = shared.table.get(header.key)
        if api is None:
            raise RequestInvalid(f"there is no API with the key {header.key}")
        if api.bytes_max is not None and len(frame) > api.bytes_max:
            raise RequestInvalid(f"{api.name} has at most {api.bytes_max} bytes, not {len(frame)}")
        version = header.version
        low, high = api.versions
        is_known = low <= version <= high
        if not is_known and header.key != API_VERSIONS:
            raise RequestInvalid(f"{api.name} has versions {low} to {high}, not {version}")
        flexible = is_known and version >= api.flexible_from
        body = frame[frames.body_at(frame, header, flexible) :]
        # What waits for those before it may leave memory meanwhile, so it is read now.
        takes_files = self._file != NO_FILE and not self._line
        call = Call(version, header.client_id, body, flexible, self._here, self._peer, takes_files)
        requests = shared.counts.requests
        requests[api.name] = requests.get(api.name, 0) + 1
        slot = _Slot(api, call, header.correlation_id, len(frame))
        if shared.is_logging:
            slot.begin_s = perf_counter()
        outcome = api.answer(call)
        if isinstance(outcome, Pending):
            if not outcome.is_done:
                shared.hold(slot.held)
                self._line.append(slot)
                outcome.then(lambda done: self._answered(slot, done))
                return
            outcome = outcome.result()
        slot.reply = outcome
        if self._line:
            slot.is_done = True
            slot.held += 0 if outcome is None else size_of(outcome)
            shared.hold(slot.held)
            self._line.append(slot)
        else:
            self._send(slot)

    def _answered(self, slot: _Slot, done: Pending[Reply]) -> None:
        if self._is_lost:
            return
        if isinstance(done.error, RequestInvalid):
            # What was wrong with it was found late. Those before it are answered.
            self._refuse(str(done.error))
        elif done.error is not None:
            log.error("a request failed", peer=self._peer, api=slot.api.name, exc_info=done.error)
            self.cut()
            return
        slot.reply = None if done.error is not None else done.result()
        slot.is_done = True
        line = self._line
        if line[0] is not slot:
            # It is held until those before it are done.
            more = 0 if slot.reply is None else size_of(slot.reply)
            slot.held += more
            self._shared.hold(more)
            return
        released = 0
        while line and line[0].is_done:
            first = line.popleft()
            released += first.held
            self._send(first)
        if not self._is_flushing:
            # Others of this turn go out with it.
            self._is_flushing = True
            self._loop.call_soon(self._flush_line)
        self._shared.release(released)

    # ---- answers

    def _send(self, slot: _Slot) -> None:
        reply = slot.reply
        bytes_out = 0
        if reply is not None:
            is_flexible = slot.call.flexible and slot.api.key != API_VERSIONS
            pieces = frames.response(slot.correlation_id, reply, flexible=is_flexible)
            self._out += pieces
            bytes_out = size_of(pieces)
            # Held until it is with the kernel, or counted as unread.
            self._out_bytes += bytes_out
            self._shared.hold(bytes_out)
            self._shared.counts.bytes_out += bytes_out
        if self._shared.is_logging:
            log.info(
                "request",
                api=slot.api.name,
                version=slot.call.version,
                client_id=slot.call.client_id,
                bytes_in=slot.size,
                bytes_out=bytes_out,
                duration_ms=round((perf_counter() - slot.begin_s) * 1000, 3),
                peer=self._peer,
            )

    def _flush_line(self) -> None:
        self._is_flushing = False
        self._since_s = self._loop.time()
        self._flush()
        self.go_on()

    def _flush(self) -> None:
        if self._is_lost or self._transport is None:
            return
        if self._out:
            pieces, self._out = self._out, []
            bytes_out, self._out_bytes = self._out_bytes, 0
            try:
                send(self._transport, self._file, pieces)
            except OSError as error:
                log.error("an answer could not be read", peer=self._peer, error=str(error))
                self._is_ending = True
                self.cut()
            if self._is_unread:
                self._count_unread()
            self._shared.release(bytes_out)
        if self._is_ending and not self._line and not self._is_flushing:
            self._transport.close()

    def _count_unread(self) -> None:
        unread = 0
        if self._is_unread and self._transport is not None:
            unread = self._transport.get_write_buffer_size()
        more, self._unread = unread - self._unread, unread
        if more > 0:
            self._shared.hold(more)
        else:
            self._shared.release(-more)

    def _refuse(self, why: str) -> None:
        self._shared.counts.invalid += 1
        self._shared.complaint = f"{why} (from {self._peer})"
        self._end()

    def _end(self) -> None:
        """Answer what is there, then close."""
        if self._is_ending or self._is_lost:
            return
        self._is_ending = True
        if self._transport is not None:
            self._transport.pause_reading()
        if not self._line and not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush_line)


def _memory(size: int) -> bytearray | mmap.mmap:
    """The kernel gives it page by page, so what is only announced takes none. A large one is its
    own: malloc would keep up to 64 MiB of such for later, once it has seen one."""
    if size < OWN_PAGES_BYTES:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _place(name: object) -> Address:
    """Of a socket: its host and port; TLS and IPv6 have more in it."""
    if isinstance(name, tuple) and len(name) >= 2:
        return Address(str(name[0]), int(name[1]))
    return Address("", 0)
