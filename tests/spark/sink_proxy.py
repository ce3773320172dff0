"""Stands between a sink and its broker, and calls out at a chosen moment of a write."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Literal, Self
from urllib.parse import urlsplit

Moment = Literal["writing", "staged", "committing", "committed"]
# While rows are staged; when all are, and the commit was not sent; when it was sent; and when it
# is done and nobody heard of it.
MOMENTS: tuple[Moment, ...] = ("writing", "staged", "committing", "committed")
ANSWER_S = 60.0

_SIZE = re.compile(rb"(?i)\r\ncontent-length: *([0-9]+)")


class SinkProxy:
    """A proxy for one broker, of whole HTTP messages. `at` is called once, at the next such
    moment; the request that it met gets no answer."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._target = (place.hostname, place.port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._armed: tuple[Moment, Callable[[], None]] | None = None
        self._staged = 0
        self.called = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.getsockname()[1]}"

    def arm(self, moment: Moment, at: Callable[[], None]) -> None:
        with self._lock:
            self._armed, self._staged = (moment, at), 0

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as requests, suppress(OSError):
            while (request := read_message(requests)) is not None:
                path = request.split(b" ", 2)[1].decode()
                answer = self._answer(path, request)
                if answer is None:
                    return
                client.sendall(answer)

    def _answer(self, path: str, request: bytes) -> bytes | None:
        """None: the connection ends without."""
        if "/parts?" in path:
            with self._lock:
                self._staged += 1
                is_first = self._staged == 1
            if not is_first and self._is_reached("writing"):
                return None
        is_commit = path.endswith("/commit")
        if is_commit and self._is_reached("staged"):
            return None
        with socket.create_connection(self._target, ANSWER_S) as broker:
            broker.sendall(request)
            if is_commit and self._is_reached("committing"):
                return None
            with broker.makefile("rb") as answers:
                answer = read_message(answers)
        return None if is_commit and self._is_reached("committed") else answer

    def _is_reached(self, moment: Moment) -> bool:
        with self._lock:
            if self._armed is None or self._armed[0] != moment:
                return False
            _, at = self._armed
            self._armed = None
            self.called += 1
        at()
        return True


def read_message(stream: BinaryIO) -> bytes | None:
    """Head and body; None when the other side ended before."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return None
        head += line
    size = _SIZE.search(head)
    return head + stream.read(int(size[1]) if size else 0)
