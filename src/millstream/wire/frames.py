"""WebSocket frames (RFC 6455): the handshake's key, reading frames and writing them. No I/O.

      0               1               2               3
     +-+-+-+-+-------+-+-------------+-------------------------------+
     |F|R|R|R| opcode|M| length, or  | length of 16 bits (126),      |
     |I|S|S|S|  (4)  |A| 126, or 127 | or of 64 bits (127)           |
     |N|V|V|V|       |S|             |                               |
     +-+-+-+-+-------+-+-------------+-------------------------------+
     | masking key, 4 bytes, when MASK is set | payload              |
     +-------------------------------------------------------------- +

What a client sends is masked, what a server sends is not. A message is one frame, or a first
frame and continuations up to one with FIN; control frames may stand between them.

A reader keeps what is incomplete in pieces and joins them once, so a frame that comes byte by
byte costs no more than one that comes whole. It holds at most one message, of a bounded size: what
is too large is refused when its head is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from typing import NamedTuple, TypeAlias

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

# Close codes that are sent; RFC 6455, section 7.4.1.
GOING_AWAY = 1001
PROTOCOL_ERROR = 1002
UNSUPPORTED = 1003
NO_CODE = 1005
NOT_UTF8 = 1007
POLICY = 1008
TOO_LARGE = 1009

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FIN, _RESERVED, _OPCODE = 0x80, 0x70, 0x0F
_MASKED, _LENGTH = 0x80, 0x7F
_SHORT_MAX = 125
_TWO = struct.Struct("!H")
_EIGHT = struct.Struct("!Q")
# Of a close frame: 125 bytes with the code.
_REASON_BYTES_MAX = 123
# Codes that a close frame may carry: those of the RFC and its registry, and private ones.
_CLOSE_CODES = frozenset((*range(1000, 1004), *range(1007, 1015)))

Event: TypeAlias = tuple[int, bytes]


class FrameError(Exception):
    """The other side broke the protocol; the connection is to be closed with this code."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


class Closing(NamedTuple):
    code: int
    reason: str


# ---- handshake


def is_key(key: bytes) -> bool:
    """Whether a client's `Sec-WebSocket-Key` is 16 bytes in base64."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except binascii.Error:
        return False


def accept_key(key: bytes) -> bytes:
    """What `Sec-WebSocket-Accept` says to a key."""
    digest = hashlib.sha1(key + _GUID, usedforsecurity=False).digest()
    return base64.b64encode(digest)


# ---- reading


class FrameReader:
    """Bytes in, whole messages and control frames out.

    `feed` answers `(opcode, payload)` in order. When `error` is set, what came before it is still
    good, and nothing after it is read.
    """

    __slots__ = (
        "_binary_bytes_max",
        "_buffered",
        "_mask_bit",
        "_message",
        "_need",
        "_opcode",
        "_pieces",
        "_text_bytes_max",
        "error",
    )

    def __init__(
        self, text_bytes_max: int, binary_bytes_max: int, *, from_client: bool = True
    ) -> None:
        self._text_bytes_max = text_bytes_max
        self._binary_bytes_max = binary_bytes_max
        self._mask_bit = _MASKED if from_client else 0
        # A frame that is not complete, and how many bytes it takes to get on with it.
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._need = 2
        # A message that is not complete, and what it is.
        self._message = bytearray()
        self._opcode = CONTINUATION
        self.error: FrameError | None = None

    def feed(self, data: bytes) -> list[Event]:
        if self._buffered:
            self._pieces.append(data)
            self._buffered += len(data)
            if self._buffered < self._need:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._buffered = 0
        events: list[Event] = []
        if self.error is None:
            try:
                self._read(data, events)
            except FrameError as error:
                self.error = error
        return events

    def _read(self, data: bytes, events: list[Event]) -> None:
        position, end = 0, len(data)
        # The common frame: masked, whole, a message by itself, shorter than 126 bytes.
        common = self._mask_bit and self._opcode == CONTINUATION
        while end - position >= 2:
            first, second = data[position], data[position + 1]
            if common and 0x81 <= first <= 0x82 and second < _MASKED | 126:
                start = position + 6
                stop = start + second - _MASKED
                if second >= _MASKED and stop <= end and self._fits(first, second - _MASKED):
                    payload = unmask(data[start:stop], data[position + 2 : start])
                    if first == 0x81:
                        _check_text(payload)
                    events.append((first & _OPCODE, payload))
                    position = stop
                    continue
            stop = self._read_frame(data, position, end, events)
            if not stop:
                break
            position = stop
            common = self._mask_bit and self._opcode == CONTINUATION
        else:
            self._need = 2
        if position < end:
            self._pieces.append(data[position:] if position else data)
            self._buffered = end - position

    def _fits(self, first: int, size: int) -> bool:
        return size <= (self._text_bytes_max if first == 0x81 else self._binary_bytes_max)

    def _read_frame(self, data: bytes, position: int, end: int, events: list[Event]) -> int:
        """Any frame; answers where it ends, or 0 when more bytes are needed."""
        first, second = data[position], data[position + 1]
        if first & _RESERVED:
            raise FrameError(PROTOCOL_ERROR, "reserved bits are set")
        if second & _MASKED != self._mask_bit:
            raise FrameError(PROTOCOL_ERROR, "a client masks its frames, a server does not")
        size, head = second & _LENGTH, 2
        if size > _SHORT_MAX:
            head = 4 if size == 126 else 10
            if end - position < head:
                self._need = head
                return 0
            size = _long_size(data, position, size)
        self._check_head(first, size)
        start = position + head + (4 if self._mask_bit else 0)
        stop = start + size
        if stop > end:
            self._need = stop - position
            return 0
        payload = data[start:stop]
        if self._mask_bit:
            payload = unmask(payload, data[start - 4 : start])
        self._take(first, payload, events)
        return stop

    def _check_head(self, first: int, size: int) -> None:
        opcode = first & _OPCODE
        if opcode >= CLOSE:
            if opcode > PONG:
                raise FrameError(PROTOCOL_ERROR, f"there is no opcode {opcode}")
            if not first & _FIN or size > _SHORT_MAX:
                raise FrameError(PROTOCOL_ERROR, "a control frame is short and in one piece")
            return
        if opcode > BINARY:
            raise FrameError(PROTOCOL_ERROR, f"there is no opcode {opcode}")
        if (opcode == CONTINUATION) != (self._opcode != CONTINUATION):
            raise FrameError(PROTOCOL_ERROR, "frames of messages are out of order")
        kind = opcode or self._opcode
        limit = self._text_bytes_max if kind == TEXT else self._binary_bytes_max
        if len(self._message) + size > limit:
            raise FrameError(TOO_LARGE, f"a message may have {limit} bytes")

    def _take(self, first: int, payload: bytes, events: list[Event]) -> None:
        opcode = first & _OPCODE
        if opcode >= CLOSE:
            events.append((opcode, payload))
            return
        if first & _FIN and opcode != CONTINUATION:
            kind = opcode
        else:
            self._opcode = kind = opcode or self._opcode
            self._message += payload
            if not first & _FIN:
                return
            payload = bytes(self._message)
            self._message = bytearray()
            self._opcode = CONTINUATION
        if kind == TEXT:
            _check_text(payload)
        events.append((kind, payload))


def read_close(payload: bytes) -> Closing:
    """What a close frame says."""
    if not payload:
        return Closing(NO_CODE, "")
    if len(payload) == 1:
        raise FrameError(PROTOCOL_ERROR, "a close code has two bytes")
    code = _TWO.unpack_from(payload)[0]
    if code not in _CLOSE_CODES and not 3000 <= code <= 4999:
        raise FrameError(PROTOCOL_ERROR, f"{code} is no close code")
    try:
        return Closing(code, payload[2:].decode())
    except UnicodeDecodeError:
        raise FrameError(NOT_UTF8, "the reason is not UTF-8") from None


def unmask(payload: bytes, key: bytes) -> bytes:
    """Masking is XOR with four bytes over and over: one operation on one long number."""
    size = len(payload)
    keys = key * ((size + 3) >> 2)
    number = int.from_bytes(payload, "little") ^ int.from_bytes(keys[:size], "little")
    return number.to_bytes(size, "little")


def _long_size(data: bytes, position: int, size: int) -> int:
    if size == 126:
        size = _TWO.unpack_from(data, position + 2)[0]
        least = 126
    else:
        size = _EIGHT.unpack_from(data, position + 2)[0]
        least = 1 << 16
    if size < least or size >> 63:
        raise FrameError(PROTOCOL_ERROR, "a length is not in its shortest form")
    return size


def _check_text(payload: bytes) -> None:
    # Looking for a byte that is not ASCII is many times quicker than decoding.
    if payload.isascii():
        return
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise FrameError(NOT_UTF8, "a text is not UTF-8") from None


# ---- writing

_HEADS = {
    opcode: tuple(bytes((_FIN | opcode, size)) for size in range(126)) for opcode in (TEXT, BINARY)
}


def frame_head(opcode: int, size: int, mask_bit: int = 0) -> bytes:
    if size <= _SHORT_MAX:
        return bytes((_FIN | opcode, mask_bit | size))
    if size < 1 << 16:
        return bytes((_FIN | opcode, mask_bit | 126)) + _TWO.pack(size)
    return bytes((_FIN | opcode, mask_bit | 127)) + _EIGHT.pack(size)


def encode(opcode: int, payload: bytes) -> bytes:
    """One frame, as a server sends it."""
    return frame_head(opcode, len(payload)) + payload


def encode_many(opcode: int, payloads: list[bytes]) -> bytes:
    """Messages, a frame each, as one buffer."""
    heads = _HEADS[opcode]
    parts: list[bytes] = []
    append = parts.append
    for payload in payloads:
        size = len(payload)
        append(heads[size] if size <= _SHORT_MAX else frame_head(opcode, size))
        append(payload)
    return b"".join(parts)


def frame_bytes(size: int) -> int:
    """How long a server's frame is with so much payload."""
    if size <= _SHORT_MAX:
        return 2 + size
    return (4 if size < 1 << 16 else 10) + size


def encode_close(code: int, reason: str = "") -> bytes:
    if code == NO_CODE:
        return encode(CLOSE, b"")
    # A reason that has to be cut may end inside a character, which would not be UTF-8.
    text = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore").encode()
    return encode(CLOSE, _TWO.pack(code) + text)


def encode_masked(opcode: int, payload: bytes, key: bytes, *, is_final: bool = True) -> bytes:
    """One frame, as a client sends it. The key is four random bytes."""
    head = frame_head(opcode, len(payload), _MASKED)
    if not is_final:
        head = bytes((head[0] & ~_FIN,)) + head[1:]
    return head + key + unmask(payload, key)
