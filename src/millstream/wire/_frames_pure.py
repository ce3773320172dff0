"""The frame codec in plain Python: the twin of `_frames.pyx`. The layout: `_frames_layout.py`."""

from __future__ import annotations

from typing import TypeAlias

from millstream.wire import _frames_layout as layout
from millstream.wire._frames_layout import (
    BINARY,
    CLOSE,
    CONTINUATION,
    EIGHT,
    FIN,
    FRAMES_ALL,
    LENGTH,
    MASKED,
    OPCODE,
    PONG,
    RESERVED,
    SHORT_MAX,
    TEXT,
    TWO,
    FrameError,
    check_utf8,
    frame_head,
)

Event: TypeAlias = tuple[int, bytes]

_HEADS = {
    opcode: tuple(bytes((FIN | opcode, size)) for size in range(SHORT_MAX + 1))
    for opcode in (TEXT, BINARY)
}


class FrameReader:
    """Bytes in, whole messages and control frames out.

    `feed` answers `(opcode, payload)` in order. It stops after `frames_max` frames, so that one
    packet of tiny frames does not hold up everybody else: then `has_more` is set, and `feed(b"")`
    goes on. When `error` is set, what came before it is still good, and nothing after it is read.

    What is incomplete is kept in one buffer, so a frame that comes byte by byte costs no more than
    one that comes whole. It holds at most one message, of a bounded size: what is too large is
    refused when its head is read.
    """

    __slots__ = (
        "_binary_bytes_max",
        "_held",
        "_mask_bit",
        "_message",
        "_need",
        "_opcode",
        "_position",
        "_rest",
        "_text_bytes_max",
        "error",
        "has_control",
        "has_more",
    )

    def __init__(
        self, text_bytes_max: int, binary_bytes_max: int, *, from_client: bool = True
    ) -> None:
        self._text_bytes_max = text_bytes_max
        self._binary_bytes_max = binary_bytes_max
        self._mask_bit = MASKED if from_client else 0
        # A frame that is not complete, and how many bytes it takes to get on with it.
        self._held = bytearray()
        self._need = 2
        # A packet that was not read to its end, and where to go on.
        self._rest = b""
        self._position = 0
        # A message that is not complete, and what it is.
        self._message = bytearray()
        self._opcode = CONTINUATION
        self.has_more = False
        # Whether there is a control frame among the last events.
        self.has_control = False
        self.error: FrameError | None = None

    @property
    def is_partial(self) -> bool:
        """Whether a frame or a message has begun and is not complete."""
        return bool(self._held) or self._opcode != CONTINUATION

    def feed(self, data: bytes, frames_max: int = FRAMES_ALL) -> list[Event]:
        self.has_control = False
        events: list[Event] = []
        if self.error is not None:
            return events
        position = 0
        if self.has_more:
            # Not copied while it is worked off, which takes many turns.
            if data:
                data = self._rest[self._position :] + data
            else:
                data, position = self._rest, self._position
            self._rest = b""
            self.has_more = False
        elif self._held:
            self._held += data
            if len(self._held) < self._need:
                return events
            data = bytes(self._held)
            self._held = bytearray()
        try:
            self._read(data, position, events, frames_max)
        except FrameError as error:
            self.error = error
        return events

    def _read(self, data: bytes, position: int, events: list[Event], frames_left: int) -> None:
        end = len(data)
        # The common frame: masked, whole, a message by itself, shorter than 126 bytes.
        is_common = self._mask_bit and self._opcode == CONTINUATION
        while end - position >= 2:
            if frames_left <= 0:
                self._rest, self._position, self.has_more = data, position, True
                return
            frames_left -= 1
            first, second = data[position], data[position + 1]
            if is_common and 0x81 <= first <= 0x82 and MASKED <= second <= MASKED | SHORT_MAX:
                start = position + 6
                size = second - MASKED
                stop = start + size
                if stop <= end and size <= self._bytes_max(first & OPCODE):
                    payload = unmask(data[start:stop], data[position + 2 : start])
                    if first == 0x81 and not payload.isascii():
                        check_utf8(payload)
                    events.append((first & OPCODE, payload))
                    position = stop
                    continue
            stop = self._read_frame(data, position, end, events)
            if not stop:
                break
            position = stop
            is_common = self._mask_bit and self._opcode == CONTINUATION
        else:
            self._need = 2
        if position < end:
            self._held += data[position:] if position else data

    def _bytes_max(self, opcode: int) -> int:
        return self._text_bytes_max if opcode == TEXT else self._binary_bytes_max

    def _read_frame(self, data: bytes, position: int, end: int, events: list[Event]) -> int:
        """Any frame; answers where it ends, or 0 when more bytes are needed."""
        first, second = data[position], data[position + 1]
        if first & RESERVED:
            raise layout.reserved_bits()
        if second & MASKED != self._mask_bit:
            raise layout.wrong_mask()
        size, head = second & LENGTH, 2
        if size > SHORT_MAX:
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
        opcode = first & OPCODE
        if opcode >= CLOSE:
            if opcode > PONG:
                raise layout.no_opcode(opcode)
            if not first & FIN or size > SHORT_MAX:
                raise layout.wrong_control()
            return
        if opcode > BINARY:
            raise layout.no_opcode(opcode)
        if (opcode == CONTINUATION) != (self._opcode != CONTINUATION):
            raise layout.out_of_order()
        bytes_max = self._bytes_max(opcode or self._opcode)
        if len(self._message) + size > bytes_max:
            raise layout.too_large(bytes_max)

    def _take(self, first: int, payload: bytes, events: list[Event]) -> None:
        opcode = first & OPCODE
        if opcode >= CLOSE:
            self.has_control = True
            events.append((opcode, payload))
            return
        if first & FIN and opcode != CONTINUATION:
            kind = opcode
        else:
            self._opcode = kind = opcode or self._opcode
            self._message += payload
            if not first & FIN:
                return
            payload = bytes(self._message)
            self._message = bytearray()
            self._opcode = CONTINUATION
        if kind == TEXT and not payload.isascii():
            check_utf8(payload)
        events.append((kind, payload))


def _long_size(data: bytes, position: int, size: int) -> int:
    if size == 126:
        size = TWO.unpack_from(data, position + 2)[0]
        least = 126
    else:
        size = EIGHT.unpack_from(data, position + 2)[0]
        least = 1 << 16
    if size < least or size >> 63:
        raise layout.wrong_length()
    return size


def unmask(payload: bytes, key: bytes) -> bytes:
    """Masking is XOR with four bytes over and over: one operation on one long number."""
    size = len(payload)
    keys = key * ((size + 3) >> 2)
    number = int.from_bytes(payload, "little") ^ int.from_bytes(keys[:size], "little")
    return number.to_bytes(size, "little")


def encode_many(opcode: int, payloads: list[bytes]) -> bytes:
    """Messages, a frame each, as one buffer, as a server sends them."""
    heads = _HEADS[opcode]
    parts: list[bytes] = []
    append = parts.append
    for payload in payloads:
        size = len(payload)
        append(heads[size] if size <= SHORT_MAX else frame_head(opcode, size))
        append(payload)
    return b"".join(parts)


def encode_counted(before: bytes, first: int, count: int, after: bytes) -> bytes:
    """Texts that differ only by a number that counts up, a frame each, as one buffer."""
    return encode_many(TEXT, [b"%b%d%b" % (before, first + at, after) for at in range(count)])
