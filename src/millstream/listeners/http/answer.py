"""An answer as bytes, for routes that are served with and without ASGI."""

from __future__ import annotations

from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

JSON = b"application/json"
RAW = b"application/octet-stream"
OK = 200
NO_CONTENT = 204


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    media: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Dated:
    """Answers with the date of this second in their heads, as far as they can be made ahead."""

    __slots__ = ("_date", "_heads", "accepted", "date", "json_ok", "no_content", "raw_ok")

    def __init__(self, now_s: float) -> None:
        self._heads: dict[tuple[int, bytes], bytes] = {}
        self.set_time(now_s)

    def set_time(self, now_s: float) -> None:
        """To be called once a second."""
        self.date = formatdate(now_s, usegmt=True).encode()
        self._date = b"date: " + self.date + b"\r\n"
        self._heads.clear()
        # What a busy queue answers most of the time: all of it, or up to the length.
        self.accepted = self._head(202, RAW) + b"0\r\n\r\n"
        self.no_content = self._head(204, JSON) + b"\r\n"
        self.raw_ok = self._head(200, RAW)
        self.json_ok = self._head(200, JSON)

    def render(self, answer: Answer | bytes, is_last: bool = False) -> bytes:
        """The whole response; bytes are the JSON of one with status 200. Lengths are exact, so a
        connection can go on after it."""
        if isinstance(answer, bytes):
            if not is_last:
                return b"%b%d\r\n\r\n%b" % (self.json_ok, len(answer), answer)
            answer = Answer(OK, answer)
        status, body, media, headers = answer
        if status == OK and media is JSON and not headers and not is_last:
            # As nearly all are.
            return b"%b%d\r\n\r\n%b" % (self.json_ok, len(body), body)
        parts = [self._head(status, media)]
        if status != NO_CONTENT:
            parts.append(b"%d\r\n" % len(body))
        for name, value in headers:
            parts.append(name + b": " + value + b"\r\n")
        parts.append(b"connection: close\r\n\r\n" if is_last else b"\r\n")
        parts.append(body)
        return b"".join(parts)

    def _head(self, status: int, media: bytes) -> bytes:
        """Up to the length, or whole where an answer has none."""
        head = self._heads.get((status, media))
        if head is None:
            phrase = HTTPStatus(status).phrase.encode()
            head = b"HTTP/1.1 %d %b\r\n%b" % (status, phrase, self._date)
            if status != NO_CONTENT:
                head += b"content-type: " + media + b"\r\ncontent-length: "
            self._heads[status, media] = head
        return head
