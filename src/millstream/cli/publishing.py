"""How `mill topic publish` publishes: through a producer, while the pipe is read."""

from __future__ import annotations

import base64
import logging
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import typer

from millstream.cli.main import EXIT_FAILED
from millstream.cli.printing import print_json, show_time
from millstream.client import BlockingDelivery, Client, Place
from millstream.errors import BodyInvalid, MillstreamError

if TYPE_CHECKING:
    from collections.abc import Callable


LINES_A_LOOK = 200
SCHEDULED_AT_ONCE = 500

LineForm: TypeAlias = Literal["text", "payload", "ndjson"]


class Recipe(NamedTuple):
    """What every record of a pipe gets, unless its line says otherwise."""

    key: str | None
    key_separator: str | None
    headers: dict[str, str]
    partition: int | None
    lane: str | None = None
    # When they are to appear in the topic.
    delay: str | None = None
    at: str | None = None


class _Base64(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A message as `mill topic read --json` prints it; where it was (`topic`, `partition`,
    `offset`) is not looked at."""

    value: msgspec.Raw
    key: str | None = None
    key_encoding: Literal["base64"] | None = None
    encoding: Literal["base64"] | None = None
    timestamp_ms: int | None = None
    topic: object = None
    partition: object = None
    offset: object = None
    lane: str | None = None
    headers: dict[str, str | _Base64 | None] = {}


_line = msgspec.json.Decoder(_Line)


class Tally:
    """What became of the records."""

    def __init__(self) -> None:
        self.stored = 0
        self.failed = 0
        self.first_error: BaseException | None = None
        self.last_place: Place | None = None
        # As many as the producer lets wait.
        self._waiting: deque[BlockingDelivery] = deque()

    def add(self, delivery: BlockingDelivery) -> None:
        self._waiting.append(delivery)
        while self._waiting and self._waiting[0].done():
            self._count(self._waiting.popleft())

    def finish(self) -> None:
        while self._waiting:
            self._count(self._waiting.popleft())

    def _count(self, delivery: BlockingDelivery) -> None:
        error = delivery.exception()
        if error is None:
            self.stored += 1
            self.last_place = delivery.result()
            return
        self.failed += 1
        self.first_error = self.first_error or error


def publish_all(
    server: str,
    topic: str,
    value: str | None,
    recipe: Recipe,
    *,
    tls: ssl.SSLContext | None,
    form: LineForm,
    as_json: bool,
) -> None:
    # What became of records is said at the end; once is enough.
    logging.getLogger("millstream.client").addHandler(logging.NullHandler())
    if value is None and sys.stdin.isatty():
        raise typer.BadParameter("give a value, or pipe lines into this command")
    if recipe.delay is not None or recipe.at is not None:
        schedule_all(server, topic, value, recipe, tls=tls, form=form, as_json=as_json)
        return
    lines = _lines() if value is None else iter([value.encode()])
    tally = Tally()
    wrong: MillstreamError | None = None
    # One line is sent at once; a broker that is not there is said at once.
    with Client(server, retry_s=0.0, tls=tls) as client, _progress() as show:
        producer = client.producer(linger_ms=5.0 if value is None else 0.0, delivery_timeout_s=30.0)
        with producer:
            try:
                for number, line in enumerate(lines, 1):
                    if tally.first_error is not None:
                        break
                    record = _record(line, number, recipe, form)
                    tally.add(producer.send(topic, **record))
                    show(number, tally.stored)
            except BodyInvalid as error:
                wrong = error
        tally.finish()
    _finish(topic, tally, wrong, is_one=value is not None, as_json=as_json)


def schedule_all(
    server: str,
    topic: str,
    value: str | None,
    recipe: Recipe,
    *,
    tls: ssl.SSLContext | None,
    form: LineForm,
    as_json: bool,
) -> None:
    """Those that are to appear later go in requests of some hundreds, each as a whole."""
    lines = _lines() if value is None else iter([value.encode()])
    records = (_record(line, number, recipe, form) for number, line in enumerate(lines, 1))
    later = {"delay": recipe.delay, "deliver_at": recipe.at}
    count = 0
    place: Place | None = None
    with Client(server, retry_s=0.0, tls=tls) as client:
        while part := [record | later for record in islice(records, SCHEDULED_AT_ONCE)]:
            place = client.topics.publish_many(topic, part)[-1]
            count += len(part)
    if value is None or place is None:
        print_json({"topic": topic, "scheduled": count}) if as_json else print(
            f"scheduled {count:,}"
        )
    elif as_json:
        print_json({"topic": topic, **place._asdict()})
    elif place.timestamp_ms <= time.time() * 1000:
        # A time that is past is now.
        print(f"published to partition {place.partition} at offset {place.offset:,}")
    else:
        due = show_time(place.timestamp_ms)
        print(f"scheduled for {due} with id {place.partition}/{place.offset}")


def _finish(
    topic: str, tally: Tally, wrong: MillstreamError | None, *, is_one: bool, as_json: bool
) -> None:
    error = wrong or tally.first_error
    if is_one and error is not None:
        raise error
    place = tally.last_place
    if as_json and is_one and place is not None:
        print_json({"topic": topic, **place._asdict()})
    elif as_json:
        print_json({"topic": topic, "published": tally.stored, "failed": tally.failed})
    elif is_one and place is not None:
        print(f"published to partition {place.partition} at offset {place.offset:,}")
    else:
        print(f"published {tally.stored:,}")
    if error is None:
        return
    code = error.code if isinstance(error, MillstreamError) else type(error).__name__
    failed = f"{tally.failed:,} were not stored: " if tally.failed else ""
    print(f"mill: {code}: {failed}{error}", file=sys.stderr)
    raise typer.Exit(EXIT_FAILED)


def _record(line: bytes, number: int, recipe: Recipe, form: str) -> dict[str, Any]:
    record: dict[str, Any] = {
        "value": line,
        "key": recipe.key,
        "headers": recipe.headers or None,
        "partition": recipe.partition,
        "lane": recipe.lane,
    }
    try:
        if form == "ndjson":
            return record | _message(_line.decode(line), recipe)
        if recipe.key_separator is not None:
            key, _, rest = line.partition(recipe.key_separator.encode())
            record |= {"key": key, "value": rest}
        if form == "payload":
            record["value"] = _json(record["value"])
    except (msgspec.MsgspecError, ValueError) as error:
        raise BodyInvalid(f"line {number} cannot be read: {error}", line=number) from error
    return record


def _message(line: _Line, recipe: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A record may have been written without a time, by another client: that is read as -1.
    if line.timestamp_ms != -1:
        found["timestamp_ms"] = line.timestamp_ms
    raw = bytes(line.value)
    if raw[:1] != b'"':
        found["value"] = _json(raw)
    else:
        text = msgspec.json.decode(raw, type=str)
        found["value"] = text if line.encoding is None else _bytes(text)
    if line.key is not None:
        found["key"] = line.key if line.key_encoding is None else _bytes(line.key)
    if line.lane is not None:
        found["lane"] = line.lane
    if line.headers:
        own = {
            name: _bytes(text.base64) if isinstance(text, _Base64) else text
            for name, text in line.headers.items()
        }
        found["headers"] = recipe.headers | own
    return found


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _json(text: bytes) -> Any:
    """Checked, and kept as it was written, unless it is a text, a null: those are values too."""
    value = msgspec.json.decode(text)
    return msgspec.Raw(text) if isinstance(value, dict | list | int | float) else value


def _lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.rstrip(b"\r\n")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar, when a person looks on."""
    if not sys.stderr.isatty():
        yield lambda _sent, _stored: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} stored"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("publish", total=0, rate=0.0)
        start_s = time.monotonic()

        def show(sent: int, stored: int) -> None:
            # A look at every line would cost more than the line.
            if sent % LINES_A_LOOK == 0:
                rate = stored / max(time.monotonic() - start_s, 0.001)
                progress.update(task, total=sent, completed=stored, rate=rate)

        yield show
