"""The layout of a WebSocket frame (RFC 6455), and what both twins of the codec share.

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
"""

from __future__ import annotations

import struct

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

# Close codes that are sent; RFC 6455, section 7.4.1.
GOING_AWAY = 1001
PROTOCOL_ERROR = 1002
UNSUPPORTED = 1003
NO_CODE = 1005
NOT_UTF8 = 1007
POLICY = 1008
TOO_LARGE = 1009
INTERNAL = 1011

FIN, RESERVED, OPCODE = 0x80, 0x70, 0x0F
MASKED, LENGTH = 0x80, 0x7F
# The longest payload whose length is in the second byte; control frames may have no more.
SHORT_MAX = 125
# Frames that one `feed` reads when nobody says how many.
FRAMES_ALL = 1 << 62

TWO = struct.Struct("!H")
EIGHT = struct.Struct("!Q")


class FrameError(Exception):
    """The other side broke the protocol; the connection is to be closed with this code."""

    def __init__(self, close_code: int, reason: str) -> None:
        super().__init__(reason)
        self.close_code = close_code
        self.reason = reason


# ---- what can be wrong with a frame


def reserved_bits() -> FrameError:
    return FrameError(PROTOCOL_ERROR, "reserved bits are set")


def wrong_mask() -> FrameError:
    return FrameError(PROTOCOL_ERROR, "a client masks its frames, a server does not")


def no_opcode(opcode: int) -> FrameError:
    return FrameError(PROTOCOL_ERROR, f"there is no opcode {opcode}")


def wrong_control() -> FrameError:
    return FrameError(PROTOCOL_ERROR, "a control frame is short and in one piece")


def out_of_order() -> FrameError:
    return FrameError(PROTOCOL_ERROR, "frames of messages are out of order")


def wrong_length() -> FrameError:
    return FrameError(PROTOCOL_ERROR, "a length is not in its shortest form")


def too_large(bytes_max: int) -> FrameError:
    return FrameError(TOO_LARGE, f"a message may have {bytes_max} bytes")


def check_utf8(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError:
        raise FrameError(NOT_UTF8, "a text is not UTF-8") from None


# ---- heads


def frame_head(opcode: int, size: int, mask_bit: int = 0) -> bytes:
    if size <= SHORT_MAX:
        return bytes((FIN | opcode, mask_bit | size))
    if size < 1 << 16:
        return bytes((FIN | opcode, mask_bit | 126)) + TWO.pack(size)
    return bytes((FIN | opcode, mask_bit | 127)) + EIGHT.pack(size)


def frame_bytes(size: int) -> int:
    """How long a server's frame is with so much payload."""
    if size <= SHORT_MAX:
        return 2 + size
    return (4 if size < 1 << 16 else 10) + size
