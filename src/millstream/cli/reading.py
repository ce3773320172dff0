"""How `mill topic read` and `mill topic tail` print records."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import ssl
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import typer

from millstream.client import AsyncClient, Received
from millstream.client.reading import Start
from millstream.errors import SettingInvalid

EXIT_NOTHING = 3
# A broker that is not there is said soon.
START_S = 0.5


class Form(NamedTuple):
    is_json: bool
    has_keys: bool


def print_records(
    server: str,
    topic: str,
    form: Form,
    *,
    tls: ssl.SSLContext | None,
    partition: int | None,
    offset: str,
    time: str | None,
    limit: int | None,
) -> None:
    start = _offset(offset)
    time_ms = None if time is None else _time_ms(time)

    async def work() -> int:
        async with AsyncClient(server, retry_s=START_S, tls=tls) as client:
            chunks = client.read_chunks(
                topic, partition=partition, offset=start, time_ms=time_ms, patience_s=5.0
            )
            return await _print(chunks, form, limit)

    if _run(work()) == 0:
        raise typer.Exit(EXIT_NOTHING)


def follow_records(
    server: str,
    topic: str,
    form: Form,
    *,
    tls: ssl.SSLContext | None,
    partition: int | None,
    last: int,
    limit: int | None,
) -> None:
    async def work() -> int:
        async with AsyncClient(server, retry_s=START_S, tls=tls) as client:
            chunks = client.read_chunks(
                topic, partition=partition, last=last, follow=True, patience_s=math.inf
            )
            return await _print(chunks, form, limit)

    _run(work())


async def _print(chunks: AsyncIterator[list[Received]], form: Form, limit: int | None) -> int:
    count = 0
    sys.stdout.flush()
    out = sys.stdout.buffer
    async for chunk in chunks:
        wanted = chunk if limit is None else chunk[: limit - count]
        out.write(b"".join([_line(record, form) + b"\n" for record in wanted]))
        out.flush()
        count += len(wanted)
        if count == limit:
            break
    return count


def _run(work: Any) -> int:
    try:
        return int(asyncio.run(work))
    except BrokenPipeError:
        # The reader of a pipe has seen enough; Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return -1
    except KeyboardInterrupt:
        return -1


def _line(record: Received, form: Form) -> bytes:
    if form.is_json:
        return _encode(_message(record))
    value = record.value or b""
    return b"%b\t%b" % (record.key or b"", value) if form.has_keys else value


def _message(record: Received) -> dict[str, object]:
    """As HTTP has it, so that `mill topic publish --ndjson` takes it back."""
    message: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
    }
    message |= _text("key", "key_encoding", record.key)
    if record.is_json and record.value is not None:
        message["value"] = msgspec.Raw(record.value)
    else:
        message |= _text("value", "encoding", record.value)
    message["lane"] = record.lane
    headers = {name: _header(value) for name, value in record.headers}
    return message | ({"headers": headers} if headers else {})


def _text(name: str, encoding_name: str, data: bytes | None) -> dict[str, object]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data).decode("ascii"), encoding_name: "base64"}


def _header(data: bytes | None) -> object:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def _offset(text: str) -> Start:
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit():
        return int(text)
    raise SettingInvalid(
        f"--offset is {text!r}; use a number, earliest or latest", setting="offset", value=text
    )


def _time_ms(text: str) -> int:
    return parse_time_ms(text, "--time")


def parse_time_ms(text: str, flag: str) -> int:
    """Milliseconds since 1970, or a date and time; without a zone it is UTC."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SettingInvalid(
            f"{flag} is {text!r}; use a time such as 2026-01-31T08:00Z, or milliseconds",
            setting=flag.lstrip("-"),
            value=text,
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


_encode = msgspec.json.encode
