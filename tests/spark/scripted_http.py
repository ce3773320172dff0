"""A Millstream broker's HTTP side that a test starts and stops: where it is, and its files."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from millstream.log import batch as batches


class ScriptedHttp:
    """Its address is there from the beginning; nobody answers until `start`."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        # By path, up to its question mark: the page, or a status.
        self.pages: dict[str, dict[str, Any] | int] = {}
        self._server: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def _serve(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                with client, client.makefile("rb") as requests:
                    path = requests.readline().split()[1].decode()
                    while requests.readline().strip():
                        pass
                    status, body = self._answer(path.partition("?")[0])
                    head = f"HTTP/1.1 {status} .\r\nContent-Length: {len(body)}\r\n"
                    client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)

    def _answer(self, path: str) -> tuple[int, bytes]:
        page = self.pages.get(path, 404)
        if isinstance(page, int):
            error = {"error": "topic_unknown", "message": f"no {path}", "topic": path}
            return page, json.dumps(error).encode()
        return 200, json.dumps(page).encode()


class Files:
    """A partition's directory with one segment, and the page by which a broker tells of it."""

    def __init__(self, folder: Path, uuid: str) -> None:
        self.topic_directory = folder / f"orders@{uuid}"
        self.uuid = uuid
        self._segment = self.topic_directory / "0" / f"{0:020d}.log"
        self._segment.parent.mkdir(parents=True)
        self._segment.touch()
        self.end = 0

    def add(self, *values: bytes) -> None:
        records: list[Any] = [(1, None, value, []) for value in values]
        with self._segment.open("ab") as file:
            file.write(batches.encode(records, base_offset=self.end))
        self.end += len(values)

    def manifest(self) -> dict[str, Any]:
        return {
            "directory": str(self.topic_directory),
            "uuid": self.uuid,
            "partitions": [
                {
                    "partition": 0,
                    "start_offset": 0,
                    "high_watermark": self.end,
                    "segments": [{"base_offset": 0, "sealed": False}],
                }
            ],
        }
