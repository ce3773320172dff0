"""`mill topic`: the topics of a running broker."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Optional
from urllib.parse import quote, urlencode

import msgspec
import typer

from millstream.cli.main import EXIT_FAILED
from millstream.cli.pairs import Unset, changes_of, pairs_of
from millstream.cli.printing import print_json, print_page, print_table, show_setting, show_time
from millstream.cli.remote import Ca, Remote, Server, tls_of
from millstream.errors import MillstreamError
from millstream.wire.places import DEFAULT_SERVER

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The topics of a running broker: make them, change them, write and read records.",
)

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Partition = Annotated[
    Optional[int],  # noqa: UP045  read at run time
    typer.Option("--partition", metavar="N", min=0, help="Only this partition."),
]
Set = Annotated[
    Optional[list[str]],  # noqa: UP045  read at run time
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting, such as retention_ms=7d or fsync=none. Can be given again.",
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Do not ask. Only a person at a terminal is asked.")
]
WithKeys = Annotated[bool, typer.Option("--keys", help="The key and a tab before each value.")]


@app.command()
def create(  # noqa: PLR0917  typer calls it by name
    name: Name,
    partitions: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--partitions", metavar="N", min=1, help="How many; by default 3."),
    ] = None,
    settings: Set = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Make a topic."""
    body: dict[str, object] = {"name": name}
    if partitions is not None:
        body["partitions"] = partitions
    if settings:
        body["settings"] = pairs_of(settings, "--set")
    page = Remote(server, ca).call("POST", "/v1/topics", msgspec.json.encode(body)).json()
    if as_json:
        print_json(page)
    else:
        print(f"created {name} with {_count(page['partitions'], 'partition')}")


@app.command("list")
def list_topics(server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print all topics, one a line."""
    remote = Remote(server, ca)
    topics: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        query = "?" + urlencode({"after": after}) if after else ""
        page = remote.call("GET", f"/v1/topics{query}").json()
        topics += page["topics"]
        after = page["next"]
    if as_json:
        print_json(topics)
        return
    columns = ("name", "partitions", "retention", "fsync", "compact")
    print_table(columns, [_row(topic) for topic in topics])


@app.command()
def describe(
    name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False
) -> None:
    """Print what there is to know of a topic: its settings, and where its partitions stand."""
    page = Remote(server, ca).call("GET", _path(name)).json()
    if as_json:
        print_json(page)
        return
    facts = {"name": page["name"], "uuid": page["uuid"], "created": show_time(page["created_ms"])}
    print_page(facts | {key: show_setting(key, page["settings"][key]) for key in page["settings"]})
    print()
    rows = [
        [str(one["partition"]), *(f"{one[key]:,}" for key in ("start", "end", "bytes"))]
        for one in page["details"]
    ]
    print_table(("partition", "start", "end", "bytes"), rows, texts=0)


@app.command()
def alter(  # noqa: PLR0917  typer calls it by name
    name: Name,
    settings: Set = None,
    unset: Unset = None,
    partitions: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--partitions", metavar="N", min=1, help="Have so many from now on."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Change settings, or add partitions. Records that are there stay where they are."""
    changes = changes_of(settings, unset)
    if not changes and partitions is None:
        raise typer.BadParameter("say what to change: --set, --unset or --partitions")
    page = _alter(Remote(server, ca), name, changes, partitions)
    if as_json:
        print_json(page)
        return
    said = [f"{key}={show_setting(key, page['settings'][key])}" for key in changes]
    said += [_count(page["partitions"], "partition")] if partitions is not None else []
    print(f"{name} has {', '.join(said)}")


def _alter(
    remote: Remote, name: str, changes: dict[str, str | None], partitions: int | None
) -> Any:
    """Settings first, because they can be changed back, and partitions stay. But not before it is
    clear that there are to be more partitions: what is refused for that changes nothing."""
    steps: list[tuple[str, str, str, object]] = []
    if changes:
        said = "the settings are changed"
        steps.append(("PATCH", _path(name), said, {"settings": changes}))
    if partitions is not None:
        said = f"there are {_count(partitions, 'partition')}"
        steps.append(("POST", f"{_path(name)}/partitions", said, {"partitions": partitions}))
    if partitions is not None and changes:
        has = remote.call("GET", _path(name)).json()["partitions"]
        if partitions <= has:
            steps.reverse()
    page: Any = None
    done = ""
    for method, path, said, body in steps:
        try:
            page = remote.call(method, path, msgspec.json.encode(body)).json()
        except MillstreamError:
            if done:
                print(f"mill: {name}: {done}, but then:", file=sys.stderr)
            raise
        done = said
    return page


@app.command()
def delete(name: Name, yes: Yes = False, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Remove a topic with its records."""
    _ask(f"Remove the topic {name} with all its records?", is_sure=yes)
    Remote(server, ca).call("DELETE", _path(name))


@app.command()
def purge(name: Name, yes: Yes = False, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Remove all records of a topic, and keep the topic."""
    _ask(f"Remove all records of the topic {name}?", is_sure=yes)
    Remote(server, ca).call("POST", f"{_path(name)}/purge")


@app.command()
def publish(  # noqa: PLR0917  typer calls it by name
    name: Name,
    value: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[VALUE]", help="Without it, each line of stdin is a record."),
    ] = None,
    key: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--key", metavar="TEXT", help="The key of every record."),
    ] = None,
    key_separator: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--key-separator", metavar="TEXT", help="What stands before it is the key."),
    ] = None,
    headers: Annotated[
        Optional[list[str]],  # noqa: UP045  read at run time
        typer.Option("--header", metavar="NAME=VALUE", help="Of every record. Can be repeated."),
    ] = None,
    partition: Partition = None,
    lane: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--lane", metavar="LANE", help="critical, high, normal, low, background."),
    ] = None,
    delay: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--delay", metavar="TIME", help="Appear after so long: 30s, 5m, 24h, 7d."),
    ] = None,
    at: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--at", metavar="TIME", help="Appear at a time: 2026-01-31T08:00Z, or ms."),
    ] = None,
    payload: Annotated[bool, typer.Option("--payload", help="Values are JSON, not text.")] = False,
    ndjson: Annotated[
        bool,
        typer.Option(
            "--ndjson", help="Each line is a message, as `mill topic read --json` prints it."
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Store a record, or each line of a pipe.

    Ends with 1 when a record was not stored; what was stored is said all the same.
    """
    from millstream.cli.publishing import LineForm, Recipe, publish_all

    recipe = Recipe(
        key, key_separator, pairs_of(headers or [], "--header"), partition, lane, delay, at
    )
    form: LineForm = "ndjson" if ndjson else "payload" if payload else "text"
    publish_all(server, name, value, recipe, tls=tls_of(server, ca), form=form, as_json=as_json)


@app.command()
def read(  # noqa: PLR0917  typer calls it by name
    name: Name,
    partition: Partition = None,
    offset: Annotated[
        str, typer.Option("--offset", metavar="N|earliest|latest", help="Where to begin.")
    ] = "earliest",
    time: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--time", metavar="TIME", help="Begin at a time: 2026-01-31T08:00Z, or ms."),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--max", metavar="N", min=1, help="At most so many records."),
    ] = None,
    keys: WithKeys = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """Print records, one a line, up to the end as it is now.

    Ends with 3 when there is none.
    """
    from millstream.cli.reading import Form, print_records

    print_records(
        server,
        name,
        Form(as_json, keys),
        tls=tls_of(server, ca),
        partition=partition,
        offset=offset,
        time=time,
        limit=limit,
    )


@app.command()
def tail(  # noqa: PLR0917  typer calls it by name
    name: Name,
    partition: Partition = None,
    last: Annotated[
        int,
        typer.Option(
            "--last", metavar="N", min=0, help="Begin so many records before, in each partition."
        ),
    ] = 0,
    limit: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--max", metavar="N", min=1, help="End after so many records."),
    ] = None,
    keys: WithKeys = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """Print records as they come, until Ctrl-C. Goes on when the broker was away."""
    from millstream.cli.reading import Form, follow_records

    follow_records(
        server,
        name,
        Form(as_json, keys),
        tls=tls_of(server, ca),
        partition=partition,
        last=last,
        limit=limit,
    )


def _ask(question: str, *, is_sure: bool) -> None:
    """A person is asked before records are gone; a script has nobody to ask."""
    if is_sure or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    print(f"{question} [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("nothing was removed", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)


def _row(topic: dict[str, Any]) -> list[str]:
    settings = topic["settings"]
    return [
        topic["name"],
        str(topic["partitions"]),
        "" if settings["compact"] else show_setting("retention_ms", settings["retention_ms"]),
        settings["fsync"],
        show_setting("compact", settings["compact"]),
    ]


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _path(name: str) -> str:
    return f"/v1/topics/{quote(name, safe='')}"
