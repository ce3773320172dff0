"""A TCP proxy that a test cuts: between a Kafka client and the broker."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

READ_BYTES = 64 * 1024


class Proxy:
    """Passes bytes both ways. `cut` breaks all connections; while `swallows` is set, what the
    broker answers is lost, so its client does not know whether it was heard."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.target = ("127.0.0.1", 0)
        self.swallows = False
        self.swallowed = 0
        # What each client sent, in order.
        self.heard: list[bytearray] = []
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            connections, self._open = self._open, set()
        for one in connections:
            # A thread may be reading from it: a close alone would not wake it.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def swallow(self) -> None:
        self.swallowed = 0
        self.swallows = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, broker}
            for source, sink, is_answer in ((client, broker, False), (broker, client, True)):
                threading.Thread(
                    target=self._pass, args=(source, sink, is_answer), daemon=True
                ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        heard = bytearray()
        if not is_answer:
            self.heard.append(heard)
        with suppress(OSError):
            while data := source.recv(READ_BYTES):
                heard += data
                if is_answer and self.swallows:
                    self.swallowed += 1
                    continue
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
