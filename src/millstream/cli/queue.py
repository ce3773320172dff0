"""`mill queue`: the queues of a running broker."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeAlias
from urllib.parse import urlencode

import msgspec
import typer

from millstream.broker.queues import check_queue_name
from millstream.cli.printing import print_json, print_page, print_table
from millstream.cli.remote import Ca, Remote, Server
from millstream.errors import BodyInvalid, MillstreamError, SettingInvalid
from millstream.kinds import Size
from millstream.wire.places import DEFAULT_SERVER

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The queues of a running broker: look at them, fill them, drain them.",
)

EXIT_EMPTY = 3
# Lines of a pipe that go into one request, when they can: a broker takes bodies of this size
# whatever its settings.
BATCH = 100
BATCH_BYTES = 64 * 1024
RAW = "application/octet-stream"
COLUMNS = ("name", "size", "capacity", "bytes", "waiting", "enqueued", "dequeued", "full")

WATCH_COLUMNS = ("queue", "size", "used", "bytes", "waiting", "in/s", "out/s", "full")
Cells: TypeAlias = tuple[str, ...]

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
File = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option(
        "--file",
        metavar="NAME",
        help="A name in the broker's snapshot folder; one that ends with .json is JSON. "
        "By default QUEUE.snapshot.",
    ),
]


@app.command("list")
def list_queues(server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print all queues, one a line."""
    queues = Remote(server, ca).call("GET", "/queues").json()["queues"]
    if as_json:
        print_json(queues)
        return
    print_table(COLUMNS, [_row(queue) for queue in queues])


@app.command()
def create(
    name: Name,
    capacity: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--capacity", metavar="N", min=1, help="How many messages it may hold."),
    ] = None,
    max_bytes: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--max-bytes", metavar="SIZE", help="How many bytes, such as 64M."),
    ] = None,
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Make a queue, or change the limits of one that is there."""
    limits: dict[str, int] = {} if capacity is None else {"capacity": capacity}
    if max_bytes is not None:
        limits["max_bytes"] = _size(max_bytes)
    reply = Remote(server, ca).call("PUT", _path(name), msgspec.json.encode(limits))
    _print_page(reply.json(), as_json)


@app.command()
def show(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print what there is to know of a queue."""
    _print_page(Remote(server, ca).call("GET", _path(name)).json(), as_json)


@app.command()
def enqueue(
    name: Name,
    message: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[MESSAGE]", help="Without it, each line of stdin is a message."),
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--payload", help="Messages are JSON, not bytes; the broker checks it.")
    ] = False,
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Append a message, or each line of a pipe.

    When one is refused, what came before it has been enqueued, and the error says how many.
    """
    if message is None and sys.stdin.isatty():
        raise typer.BadParameter("give a message, or pipe lines into this command")
    messages = _lines() if message is None else iter([message.encode()])
    remote, count = Remote(server, ca), 0
    try:
        for done in _send(remote, name, messages, is_json):
            count += done
    except MillstreamError as error:
        if message is not None:
            raise
        raise type(error)(f"{error.message}; {count} were enqueued before") from error
    if as_json:
        print_json({"queue_name": name, "enqueued": count})
    else:
        print(f"enqueued {count}")


@app.command()
def dequeue(
    name: Name,
    count: Annotated[
        int, typer.Option("--max", metavar="N", min=1, max=1000, help="At most so many messages.")
    ] = 1,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, max=30, help="Wait for the first."),
    ] = 0.0,
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Take the oldest messages and print them, one a line.

    Ends with 3 when there is none.
    """
    path = f"{_path(name)}/dequeue?max={count}&timeout={timeout:g}"
    reply = Remote(server, ca).call("GET", path, wait_s=timeout)
    if reply.status == 204:
        raise typer.Exit(EXIT_EMPTY)
    sys.stdout.flush()
    for message in _messages.decode(reply.body).messages:
        line = msgspec.json.encode(message) if as_json else _body(message)
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


@app.command()
def clear(
    name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False
) -> None:
    """Drop all messages of a queue."""
    page = Remote(server, ca).call("POST", f"{_path(name)}/clear").json()
    if as_json:
        print_json(page)
    else:
        print(f"cleared {page['messages']}")


@app.command()
def delete(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Remove a queue with its messages."""
    Remote(server, ca).call("DELETE", _path(name))


@app.command()
def persist(
    name: Name,
    file: File = None,
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Write what a queue holds to a file of the broker."""
    page = Remote(server, ca).call("POST", f"{_path(name)}/persist{_query(file)}").json()
    if as_json:
        print_json(page)
    else:
        print(f"persisted {page['messages']} to {page['file']}")


@app.command()
def load(
    name: Name,
    file: File = None,
    *,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Replace what a queue holds by what such a file holds."""
    page = Remote(server, ca).call("POST", f"{_path(name)}/load{_query(file)}").json()
    if as_json:
        print_json(page)
    else:
        print(f"loaded {page['messages']} from {page['file']}")


@app.command()
def watch(
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="How often it looks.")
    ] = 1.0,
    count: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--count", metavar="N", min=1, help="Look so often, then end."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
) -> None:
    """Show all queues as a live table, with their rates, until Ctrl-C. Into a file or a pipe it
    prints a table each time, with an empty line between two."""
    looks = _look(Remote(server, ca), interval, count)
    if not sys.stdout.isatty():
        for number, rows in enumerate(looks):
            if number:
                print()
            print_table(WATCH_COLUMNS, rows)
            # Whoever reads wants to see it now, and not when some kilobytes came together.
            sys.stdout.flush()
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for rows in looks:
            live.update(_table(rows), refresh=True)


def _look(remote: Remote, interval: float, count: int | None) -> Iterator[list[Cells]]:
    """What there is to see, each time that it is time to look."""
    before: dict[str, Any] = {}
    last_s = time.monotonic()
    while count is None or count > 0:
        queues = remote.call("GET", "/queues").json()["queues"]
        now_s = time.monotonic()
        yield _rows(queues, before, now_s - last_s)
        before, last_s = {queue["name"]: queue for queue in queues}, now_s
        if count is not None:
            count -= 1
        if count != 0:
            time.sleep(interval)


# ---- messages


class _Message(msgspec.Struct, omit_defaults=True):
    payload: msgspec.Raw
    enqueued_at: int
    encoding: str | None = None


class _Messages(msgspec.Struct):
    messages: list[_Message]


_messages = msgspec.json.Decoder(_Messages)


def _body(message: _Message) -> bytes:
    if message.encoding is None:
        return bytes(message.payload)
    return base64.b64decode(msgspec.json.decode(message.payload, type=str))


def _lines() -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield line.rstrip(b"\r\n")


def _send(remote: Remote, name: str, messages: Iterable[bytes], is_json: bool) -> Iterator[int]:
    """How many were taken, request by request. Bytes have no form for batches."""
    path = f"{_path(name)}/enqueue"
    if not is_json:
        for message in messages:
            remote.call("POST", path, message, media=RAW)
            yield 1
        return
    for batch in _batches(messages):
        body = b'{"payloads":[%b]}' % b",".join(batch)
        yield remote.call("POST", f"{path}/batch", body).json()["queued"]


def _batches(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Each message is checked by itself: in a list, `1,2` would pass for two."""
    batch: list[bytes] = []
    size = 0
    for number, message in enumerate(messages, 1):
        try:
            msgspec.json.decode(message)
        except msgspec.MsgspecError as error:
            raise BodyInvalid(f"message {number} is not JSON: {error}") from error
        if batch and (len(batch) == BATCH or size + len(message) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield batch


# ---- what is printed


def _row(queue: dict[str, Any]) -> tuple[str, ...]:
    fields = ("size", "capacity", "bytes", "waiting")
    totals = ("enqueued_total", "dequeued_total", "full_total")
    return (queue["name"], *(f"{queue[field]:,}" for field in (*fields, *totals)))


def _table(rows: Iterable[Cells]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    first, *numbers = WATCH_COLUMNS
    table.add_column(first)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _rows(queues: list[dict[str, Any]], before: dict[str, Any], seconds: float) -> list[Cells]:
    """Those that hold most first."""
    rows: list[Cells] = []
    for queue in sorted(queues, key=lambda queue: -queue["size"]):
        # A queue that is new, here or after a restart, has no rate yet.
        old = before.get(queue["name"], queue)
        rates = [
            max(0.0, queue[total] - old[total]) / max(seconds, 0.001)
            for total in ("enqueued_total", "dequeued_total")
        ]
        rows.append(
            (
                queue["name"],
                f"{queue['size']:,}",
                f"{queue['utilization']:.0%}",
                f"{queue['bytes']:,}",
                f"{queue['waiting']:,}",
                *(f"{rate:,.0f}" for rate in rates),
                f"{queue['full_total']:,}",
            )
        )
    return rows


def _print_page(page: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(page)
    else:
        print_page(page)


# ---- what is asked


def _path(name: str) -> str:
    """Looked at before it is sent: a name such as `a/b` would be a path of something else."""
    check_queue_name(name)
    return f"/queues/{name}"


def _query(file: str | None) -> str:
    return "" if file is None else "?" + urlencode({"file": file})


def _size(text: str) -> int:
    try:
        size = Size(minimum=1).parse(text)
    except ValueError as error:
        raise SettingInvalid(
            f"--max-bytes is {text!r}, which {error}; use {Size(1).expects}",
            setting="max_bytes",
            value=text,
        ) from error
    assert size is not None
    return size
