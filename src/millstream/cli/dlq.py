"""`mill dlq`: the dead letters of a running broker."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, Optional
from urllib.parse import quote, urlencode

import msgspec
import typer

from millstream.cli.printing import print_json, print_page, print_table, show_time
from millstream.cli.remote import Ca, Remote, Server
from millstream.errors import SettingInvalid
from millstream.wire.places import DEFAULT_SERVER

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The dead letters of a running broker: what failed for good, and how to put it back.",
)

# How long one call waits for the end of a redrive; in between a person sees how far it is.
HOLD_S = 0.5
# Letters that one call asks for.
PAGE = 500
# Of a value and of an error, what a line of a table shows.
VALUE_SHOWN = 40
ERROR_SHOWN = 40

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic that they came from.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Reason = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--reason", metavar="deliveries|rejected", help="Only those given up so."),
]
Group = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--group", metavar="GROUP", help="Only those that this group gave up."),
]
Key = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--key", metavar="TEXT", help="Only those with this key."),
]
Text = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--text", metavar="TEXT", help="Only those with this in their value or error."),
]
Since = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--since", metavar="TIME", help="Only those that failed last then or later."),
]
Until = Annotated[
    Optional[str],  # noqa: UP045  read at run time
    typer.Option("--until", metavar="TIME", help="Only those that failed last before."),
]


class Filter(NamedTuple):
    reason: str | None
    group: str | None
    key: str | None
    text: str | None
    since: str | None
    until: str | None

    def query(self) -> dict[str, Any]:
        from millstream.cli.reading import parse_time_ms

        given: dict[str, Any] = {
            "reason": self.reason,
            "group": self.group,
            "key": self.key,
            "text": self.text,
            "since_ms": None if self.since is None else parse_time_ms(self.since, "--since"),
            "until_ms": None if self.until is None else parse_time_ms(self.until, "--until"),
        }
        return {name: value for name, value in given.items() if value is not None}


@app.command("list")
def list_letters(  # noqa: PLR0917  typer calls it by name
    topic: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[TOPIC]", help="Without it: the topics that have some."),
    ] = None,
    reason: Reason = None,
    group: Group = None,
    key: Key = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("--max", metavar="N", min=1, help="At most so many.")] = 100,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Print the dead letters of a topic, one a line; or the topics that have some."""
    remote = Remote(server, ca)
    wanted = Filter(reason, group, key, text, since, until).query()
    if topic is None:
        _print_topics(remote, as_json)
        return
    letters, total, is_all = _letters(remote, topic, wanted, limit)
    if as_json:
        print_json(letters)
        return
    columns = ("place", "failed", "group", "reason", "error", "value")
    print_table(columns, [_row(one) for one in letters], texts=len(columns))
    if wanted or not is_all:
        print(f"{len(letters):,} of {total:,} dead letters")


def _print_topics(remote: Remote, as_json: bool) -> None:
    page = remote.call("GET", "/v1/dead-letters").json()
    if as_json:
        print_json(page)
        return
    rows = [(one["topic"], f"{one['dead_letters']:,}") for one in page["topics"]]
    print_table(("topic", "dead letters"), rows)
    for one in page["paused"]:
        print(
            f"group {one['group']} makes none for {one['since_seconds']:.0f} s: too many of its "
            "records fail, so they are retried instead"
        )


def _letters(
    remote: Remote, topic: str, wanted: dict[str, Any], limit: int
) -> tuple[list[dict[str, Any]], int, bool]:
    """Letters, how many there are of all, and whether the list got to its end."""
    letters: list[dict[str, Any]] = []
    cursor, total = "0:0", 0
    while len(letters) < limit:
        asked = wanted | {"cursor": cursor, "limit": min(PAGE, limit - len(letters))}
        page = remote.call("GET", f"{_path(topic)}?{urlencode(asked)}").json()
        letters += page["letters"]
        total = page["total"]
        if page["next"] is None:
            return letters, total, True
        cursor = page["next"]
    return letters, total, False


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    failed_ms = letter["last_failure_ms"]
    return (
        f"{letter['partition']}/{letter['offset']}",
        "–" if failed_ms is None else show_time(failed_ms),
        letter["group"] or "–",
        letter["reason"] or "–",
        _cut(letter["error"] or "–", ERROR_SHOWN),
        _cut(_value(letter["message"]), VALUE_SHOWN),
    )


def _value(message: dict[str, Any]) -> str:
    value = message["value"]
    if isinstance(value, str):
        return value
    return "–" if value is None else msgspec.json.encode(value).decode()


def _cut(text: str, most: int) -> str:
    line = "".join(one if one.isprintable() else " " for one in text)
    return line if len(line) <= most else line[: most - 1] + "…"


@app.command()
def show(
    topic: Topic,
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="As the list has it: partition/offset.")
    ],
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Print one dead letter: what it says of its end, and its value as it is."""
    partition, offset = _place(place)
    letter = Remote(server, ca).call("GET", f"{_path(topic)}/{partition}/{offset}").json()
    if as_json:
        print_json(letter)
        return
    origin, message = letter["origin"], letter["message"]
    page: dict[str, object] = {
        "topic": origin["topic"] or topic,
        "partition": _or_dash(origin["partition"]),
        "offset": _or_dash(origin["offset"]),
        "key": _or_dash(message["key"]),
        "lane": message["lane"],
        "group": _or_dash(letter["group"]),
        "deliveries": _or_dash(letter["deliveries"]),
        "reason": _or_dash(letter["reason"]),
        "error": _or_dash(letter["error"]),
        "first failure": _time(letter["first_failure_ms"]),
        "last failure": _time(letter["last_failure_ms"]),
        "redrives": letter["redrives"],
    }
    headers = message.get("headers") or {}
    page |= {f"header {name}": value for name, value in headers.items()}
    print_page(page)
    print()
    sys.stdout.flush()
    value = _value(message).encode()
    if message.get("encoding") == "base64":
        value = base64.b64decode(message["value"])
    sys.stdout.buffer.write(value + b"\n")
    sys.stdout.buffer.flush()


@app.command()
def delete(
    topic: Topic,
    places: Annotated[list[str], typer.Argument(metavar="PLACE…", help="As the list has them.")],
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
) -> None:
    """Delete some dead letters: all that are named, or none when one is not there."""
    letters = [dict(zip(("partition", "offset"), _place(one), strict=True)) for one in places]
    body = msgspec.json.encode({"letters": letters})
    page = Remote(server, ca).call("POST", f"{_path(topic)}/delete", body).json()
    print(f"deleted {page['deleted']:,}")


@app.command()
def purge(topic: Topic, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Delete all dead letters of a topic."""
    Remote(server, ca).call("DELETE", _path(topic))


@app.command()
def redrive(  # noqa: PLR0917  typer calls it by name
    topic: Topic,
    to: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--to", metavar="TOPIC", help="By default each goes to where it came from."),
    ] = None,
    reason: Reason = None,
    group: Group = None,
    key: Key = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    rate: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--rate", metavar="N", min=1, help="At most so many a second."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be put back.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Until it is over; on a terminal that is so by itself."),
    ] = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Put dead letters back. The broker does it as a job, which Ctrl-C does not end.

    With --wait it ends with 1 when the job failed or was cancelled.
    """
    remote = Remote(server, ca)
    body = Filter(reason, group, key, text, since, until).query()
    body |= {name: one for name, one in (("to", to), ("rate", rate)) if one is not None}
    if dry_run:
        body["dry_run"] = True
    job = remote.call("POST", f"{_path(topic)}/redrive", msgspec.json.encode(body)).json()
    if wait or dry_run or sys.stderr.isatty():
        job = _waited(remote, job)
    if as_json:
        print_json(job)
    else:
        _print_job(job)
    if job["state"] in ("failed", "cancelled"):
        raise typer.Exit(1)


def _waited(remote: Remote, job: dict[str, Any]) -> dict[str, Any]:
    path = f"/v1/redrives/{job['id']}"
    try:
        with _progress(job) as show_progress:
            while job["state"] == "running":
                job = remote.call("GET", f"{path}?timeout={HOLD_S}", wait_s=HOLD_S).json()
                show_progress(job)
    except KeyboardInterrupt:
        print(f"redrive {job['id']} goes on; mill dlq cancel ends it", file=sys.stderr)
    return job


@contextmanager
def _progress(job: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar, when a person looks on."""
    if not sys.stderr.isatty():
        yield lambda _job: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        BarColumn(),
        TextColumn("{task.fields[moved]:,} put back"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("redrive", total=job["total"], moved=0)
        yield lambda now: progress.update(task, completed=now["seen"], moved=now["moved"])


def _print_job(job: dict[str, Any]) -> None:
    if job["state"] == "running":
        print(f"redrive {job['id']} of {job['topic']} runs")
        return
    if job["dry_run"]:
        stays = sum(job["skipped"].values())
        print(f"{job['matched'] - stays:,} of {job['seen']:,} would be put back")
    else:
        print(f"{job['state']}: put {job['moved']:,} back")
    for reason, count in job["skipped"].items():
        print(f"{count:,} stay: {reason}")
    if job["error"] is not None:
        print(f"error: {job['error']}")
    if job["dry_run"] and job["examples"]:
        rows = [_example(one) for one in job["examples"]]
        print_table(("place", "goes to"), rows, texts=2)


def _example(one: dict[str, Any]) -> tuple[str, str]:
    place = f"{one['partition']}/{one['offset']}"
    if one["to"] is None:
        return place, f"stays: {one['skipped']}"
    return place, f"{one['to']} partition {one['to_partition']}"


@app.command()
def jobs(
    topic: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[TOPIC]", help="Only those of this one."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Print redrives: those that run, and those that are over since a short while."""
    query = "" if topic is None else "?" + urlencode({"topic": topic})
    found = Remote(server, ca).call("GET", f"/v1/redrives{query}").json()["redrives"]
    if as_json:
        print_json(found)
        return
    columns = ("id", "topic", "to", "state", "started", "seen", "of", "put back", "stay")
    rows = [
        (
            one["id"],
            one["topic"],
            one["to"] or "–",
            "dry run" if one["dry_run"] else one["state"],
            show_time(one["started_ms"]),
            f"{one['seen']:,}",
            f"{one['total']:,}",
            f"{one['moved']:,}",
            f"{sum(one['skipped'].values()):,}",
        )
        for one in found
    ]
    print_table(columns, rows, texts=5)


@app.command()
def cancel(
    id: Annotated[str, typer.Argument(metavar="ID", help="As `mill dlq jobs` has it.")],
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
) -> None:
    """End a redrive. What it has put back stays there."""
    job = Remote(server, ca).call("DELETE", f"/v1/redrives/{quote(id, safe='')}").json()
    _print_job(job)


def _place(text: str) -> tuple[int, int]:
    partition, _, offset = text.partition("/")
    if not (partition + offset).isascii() or not (partition.isdigit() and offset.isdigit()):
        raise SettingInvalid(
            f"{text!r} is no place of a dead letter; use partition/offset, such as 0/12",
            setting="place",
            value=text,
        )
    return int(partition), int(offset)


def _or_dash(value: object) -> object:
    return "–" if value is None else value


def _time(time_ms: int | None) -> str:
    return "–" if time_ms is None else show_time(time_ms)


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/dead-letters"
