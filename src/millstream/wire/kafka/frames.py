"""Requests and responses as they stand in the stream, without their bodies.

    size             INT32   of what follows
    request header   API key, version (INT16), correlation id (INT32), client id (nullable STRING,
                     never compact); flexible versions: tagged fields
    response header  correlation id (INT32); flexible versions: tagged fields

The response to ApiVersions never has tagged fields in its header: a client that asks has yet to
learn what the broker speaks.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.primitives import INT32, NO_TAGS, Cursor, Pieces, RequestInvalid, size_of

SIZE = INT32
SIZE_BYTES = 4
# API key, version, correlation id, length of the client id.
FIXED = Struct(">hhih")
REQUEST_BYTES_MIN = FIXED.size
# How those begin who have come to the wrong address.
_TLS_HELLO = b"\x16\x03"
_HTTP_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"PATC", b"OPTI", b"CONN")


class RequestHeader(NamedTuple):
    key: int
    version: int
    correlation_id: int
    client_id: str
    # Where the body begins, or in a flexible version the tagged fields before it.
    end: int


def read_header(frame: bytes | bytearray | memoryview) -> RequestHeader:
    """Of a frame without its size. What is in a flexible header beyond this is not read."""
    if len(frame) < REQUEST_BYTES_MIN:
        raise RequestInvalid(f"a request of {len(frame)} bytes has no room for its header")
    key, version, correlation_id, size = FIXED.unpack_from(frame)
    end = REQUEST_BYTES_MIN + max(size, 0)
    if size < -1 or end > len(frame):
        raise RequestInvalid("the client id reaches past the end of the request")
    client_id = bytes(frame[REQUEST_BYTES_MIN:end]).decode("utf-8", "replace")
    return RequestHeader(key, version, correlation_id, client_id, end)


def body_at(frame: bytes | bytearray | memoryview, header: RequestHeader, flexible: bool) -> int:
    """Where the body begins."""
    if not flexible:
        return header.end
    cursor = Cursor(frame, header.end, flexible=True)
    cursor.skip_tags()
    return cursor.at


def response(correlation_id: int, body: Pieces, *, flexible: bool) -> Pieces:
    """The pieces of a whole response, its size first."""
    size = 4 + size_of(body)
    if flexible:
        return [SIZE.pack(size + 1) + INT32.pack(correlation_id) + NO_TAGS, *body]
    return [_HEAD.pack(size, correlation_id), *body]


_HEAD = Struct(">ii")


def other_protocol(start: memoryview) -> str:
    """What a client seems to speak instead, as the end of a complaint."""
    first = bytes(start[:4])
    if first[:2] == _TLS_HELLO:
        return ", which looks like TLS; that is spoken at the address of the setting kafka_tls"
    if first in _HTTP_METHODS:
        return ", which looks like HTTP; that is spoken at the address of the setting http"
    return ""
