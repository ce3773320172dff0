"""WebSocket frames (RFC 6455): the handshake's key, reading frames and writing them. No I/O.

The layout of a frame stands in `_frames_layout.py`. There are two implementations of what is done
for every message, with the same answers and the same errors: a compiled one, taken where it was
built, and one in plain Python, also taken when `MILLSTREAM_PURE` is set.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from typing import TYPE_CHECKING, Literal, NamedTuple

from millstream.wire._frames_layout import (
    BINARY,
    CLOSE,
    FIN,
    GOING_AWAY,
    INTERNAL,
    MASKED,
    NO_CODE,
    NOT_UTF8,
    PING,
    POLICY,
    PONG,
    PROTOCOL_ERROR,
    TEXT,
    TOO_LARGE,
    TWO,
    UNSUPPORTED,
    FrameError,
    frame_bytes,
    frame_head,
)

IMPLEMENTATION: Literal["compiled", "pure"]

if TYPE_CHECKING:
    from millstream.wire._frames_pure import FrameReader, encode_counted, encode_many, unmask
else:
    try:
        if os.environ.get("MILLSTREAM_PURE", "") not in ("", "0"):
            raise ImportError("the pure twin was asked for")
        from millstream.wire import _frames as _twin

        IMPLEMENTATION = "compiled"
    except ImportError:
        from millstream.wire import _frames_pure as _twin

        IMPLEMENTATION = "pure"
    FrameReader = _twin.FrameReader
    encode_counted = _twin.encode_counted
    encode_many = _twin.encode_many
    unmask = _twin.unmask

__all__ = [
    "BINARY",
    "CLOSE",
    "GOING_AWAY",
    "IMPLEMENTATION",
    "INTERNAL",
    "NOT_UTF8",
    "NO_CODE",
    "PING",
    "POLICY",
    "PONG",
    "PROTOCOL_ERROR",
    "TEXT",
    "TOO_LARGE",
    "UNSUPPORTED",
    "Closing",
    "FrameError",
    "FrameReader",
    "accept_key",
    "encode",
    "encode_close",
    "encode_counted",
    "encode_many",
    "encode_masked",
    "frame_bytes",
    "is_key",
    "read_close",
    "unmask",
]

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# Of a close frame: 125 bytes with the code.
_REASON_BYTES_MAX = 123
# Codes that a close frame may carry: those of the RFC and its registry, and private ones.
_CLOSE_CODES = frozenset((*range(1000, 1004), *range(1007, 1015)))


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


# ---- single frames


def encode(opcode: int, payload: bytes) -> bytes:
    """One frame, as a server sends it."""
    return frame_head(opcode, len(payload)) + payload


def encode_masked(opcode: int, payload: bytes, key: bytes, *, is_final: bool = True) -> bytes:
    """One frame, as a client sends it. The key is four random bytes."""
    head = frame_head(opcode, len(payload), MASKED)
    if not is_final:
        head = bytes((head[0] & ~FIN,)) + head[1:]
    return head + key + unmask(payload, key)


def encode_close(code: int, reason: str = "") -> bytes:
    if code == NO_CODE:
        return encode(CLOSE, b"")
    # A reason that has to be cut may end inside a character, which would not be UTF-8.
    text = reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore").encode()
    return encode(CLOSE, TWO.pack(code) + text)


def read_close(payload: bytes) -> Closing:
    """What a close frame says."""
    if not payload:
        return Closing(NO_CODE, "")
    if len(payload) == 1:
        raise FrameError(PROTOCOL_ERROR, "a close code has two bytes")
    code = TWO.unpack_from(payload)[0]
    if code not in _CLOSE_CODES and not 3000 <= code <= 4999:
        raise FrameError(PROTOCOL_ERROR, f"{code} is no close code")
    try:
        return Closing(code, payload[2:].decode())
    except UnicodeDecodeError:
        raise FrameError(NOT_UTF8, "the reason is not UTF-8") from None
