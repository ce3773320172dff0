"""An answer as bytes, for routes that are served with and without ASGI."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

JSON = b"application/json"
RAW = b"application/octet-stream"
NO_CONTENT = 204


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    media: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


def _head(status: int, media: bytes) -> bytes:
    line = b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())
    if status == NO_CONTENT:
        return line
    return line + b"content-type: " + media + b"\r\ncontent-length: "


_heads: dict[tuple[int, bytes], bytes] = {
    (status, media): _head(status, media)
    for status in (200, 202, 204, 400, 404, 413, 429)
    for media in (JSON, RAW)
}


def render(answer: Answer, is_last: bool) -> bytes:
    """The whole response. Lengths are exact, so a connection can go on after it."""
    status, body, media, headers = answer
    if not (body or headers or is_last):
        ready = _empty.get((status, media))
        if ready is not None:
            return ready
    head = _heads.get((status, media)) or _head(status, media)
    parts = [head] if status == NO_CONTENT else [head, b"%d\r\n" % len(body)]
    for name, value in headers:
        parts.append(name + b": " + value + b"\r\n")
    parts.append(b"connection: close\r\n\r\n" if is_last else b"\r\n")
    parts.append(body)
    return b"".join(parts)


# Answers without a body that a busy queue gives most of the time.
_empty = {(202, RAW): _head(202, RAW) + b"0\r\n\r\n", (204, JSON): _head(204, JSON) + b"\r\n"}
