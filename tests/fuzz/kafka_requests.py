"""A fuzzer on all that reads bytes of Kafka's clients: `make fuzz`, or

    python tests/fuzz/kafka_requests.py -max_total_time=60

It feeds frames, as they come from a socket, to the header and to the reader of the API that they
name. Whatever the bytes are, they are a request or `RequestInvalid`; anything else is a fault.
Arguments are libFuzzer's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import atheris

with atheris.instrument_imports(include=["millstream.wire", "kafka.protocol"]):
    from millstream.engine.pending import Pending
    from millstream.kinds import Address
    from millstream.listeners.kafka.apis import Api, Call
    from millstream.listeners.kafka.assemble import every_api
    from millstream.listeners.kafka.context import Context
    from millstream.wire.kafka import frames
    from millstream.wire.kafka.primitives import RequestInvalid


class Reached(Exception):
    """A handler got its request: it was read."""


class _Nothing:
    """In the place of the broker: whoever asks anything of it has read the request."""

    is_ready = False

    def __getattr__(self, name: str) -> Any:
        if _Nothing.is_ready:
            raise Reached
        return self

    def __call__(self, *_: object) -> Any:
        return self


TABLE: dict[int, Api] = every_api(cast("Context", _Nothing()))
_Nothing.is_ready = True


def read_one(data: bytes) -> None:
    try:
        frame = memoryview(data)
        header = frames.read_header(frame)
        api = TABLE.get(header.key)
        if api is None or not api.versions[0] <= header.version <= api.versions[1]:
            return
        flexible = header.version >= api.flexible_from
        body = frame[frames.body_at(frame, header, flexible) :]
        call = Call(header.version, header.client_id, body, flexible, Address("h", 1), "p")
        outcome = api.answer(call)
        if isinstance(outcome, Pending):
            outcome.result()
    except (RequestInvalid, Reached):
        pass


def seeds() -> list[bytes]:
    """A short request of every API and version, for the fuzzer to begin with."""
    return [
        key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\7\xff\xff" + bytes(40)
        for key, api in sorted(TABLE.items())
        for version in range(api.versions[0], api.versions[1] + 1)
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([*sys.argv, corpus], read_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
