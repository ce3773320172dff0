"""`mill group`: the consumer groups of a running broker."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Optional
from urllib.parse import quote, urlencode

import msgspec
import typer

from millstream.cli.pairs import Unset, changes_of
from millstream.cli.printing import print_json, print_page, print_table, show_setting
from millstream.cli.remote import Ca, Remote, Server
from millstream.errors import SettingInvalid
from millstream.wire.places import DEFAULT_SERVER

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The consumer groups of a running broker: who is in them, and how far they are.",
)

# What `describe` shows of them: a screen, not a list.
LEASES_MAX = 50

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command("list")
def list_groups(server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print all groups, one a line."""
    remote = Remote(server, ca)
    groups: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        query = "?" + urlencode({"after": after}) if after else ""
        page = remote.call("GET", f"/v1/groups{query}").json()
        groups += page["groups"]
        after = page["next"]
    if as_json:
        print_json(groups)
        return
    rows = [
        (
            group["group"],
            group["state"],
            group["protocol"] or "–",
            f"{group['members']:,}",
            f"{group['generation']:,}",
        )
        for group in groups
    ]
    print_table(("name", "state", "protocol", "members", "generation"), rows, texts=3)


@app.command()
def describe(
    name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False
) -> None:
    """Print a group's members, what they read, and how far behind they are.

    Lag is in records and in seconds: the age of the oldest record that is not committed. The
    trend is in records a second over five minutes; above zero the group falls behind.
    """
    remote = Remote(server, ca)
    page = remote.call("GET", _path(name)).json()
    lag = remote.call("GET", f"{_path(name)}/lag").json()
    leases = remote.call("GET", f"{_path(name)}/leases?limit={LEASES_MAX}").json()
    query = urlencode({"group": name})
    groups = remote.call("GET", f"/v1/reliability/stats?{query}").json()["groups"]
    if as_json:
        page["lag"] = {key: lag[key] for key in lag if key != "group"}
        print_json(page | {"leases": leases["leases"]})
        return
    facts = {
        "name": page["group"],
        "state": page["state"],
        "protocol": page["protocol"] or "–",
        "generation": page["generation"],
        "assignor": page["assignor"],
        "lag": f"{lag['messages']:,} records, {lag['seconds']:.1f} s{_trend(lag)}",
    }
    if groups:
        facts["by lease"] = _in_flight(groups[0])
    given = {key: value for key, value in page["settings"].items() if value is not None}
    print_page(facts | {key: show_setting(key, value) for key, value in given.items()})
    if page["members"]:
        print()
        rows = [(m["member_id"], m["client_id"], _partitions(m)) for m in page["members"]]
        print_table(("member", "client", "partitions"), rows, texts=3)
    if lag["partitions"]:
        print()
        columns = ("topic", "partition", "committed", "end", "lag", "seconds", "trend/s")
        print_table(columns, [_lag_row(one) for one in lag["partitions"]])
    if leases["leases"]:
        print()
        names = ("topic", "partition", "offset", "state", "member", "deliveries", "lane", "until")
        print_table(names, [_lease_row(one) for one in leases["leases"]])
        if leases["next"] is not None:
            print(f"and more: these are the first {LEASES_MAX}")


@app.command()
def alter(  # noqa: PLR0917  typer calls it by name
    name: Name,
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045  read at run time
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting, such as visibility_ms=10m or inflight_max=500. Can be given again.",
        ),
    ] = None,
    unset: Unset = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Change what is set for a group that receives by lease, used before or not.

    visibility_ms, inflight_max and member_inflight_max; what is not set is as its topics and the
    broker say.
    """
    changes = changes_of(settings, unset)
    if not changes:
        raise typer.BadParameter("say what to change: --set or --unset")
    body = msgspec.json.encode({"settings": changes})
    page = Remote(server, ca).call("PATCH", _path(name), body).json()
    if as_json:
        print_json(page)
        return
    print(f"{name} has {', '.join(f'{key}={_shown(key, page)}' for key in changes)}")


def _shown(key: str, page: dict[str, Any]) -> str:
    value = page["settings"][key]
    return "the default" if value is None else show_setting(key, value)


@app.command()
def reset(  # noqa: PLR0917  typer calls it by name
    name: Name,
    topic: Annotated[str, typer.Option("--topic", metavar="TOPIC", help="Of which topic.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="earliest|latest|N|TIME",
            help="Where to: an end, an offset, or a time such as 2026-01-31T08:00Z.",
        ),
    ],
    partition: Annotated[
        Optional[list[int]],  # noqa: UP045  read at run time
        typer.Option("--partition", metavar="N", min=0, help="Only this one. Can be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say where the group would be.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Move a group that has no members: what it reads next."""
    body: dict[str, object] = {"topic": topic} | _target(to)
    if partition:
        body["partitions"] = partition
    if dry_run:
        body["dry_run"] = True
    path = f"{_path(name)}/reset"
    page = Remote(server, ca).call("POST", path, msgspec.json.encode(body)).json()
    if as_json:
        print_json(page)
        return
    rows = [
        (one["topic"], str(one["partition"]), _number(one["before"]), _number(one["after"]))
        for one in page["offsets"]
    ]
    print_table(("topic", "partition", "before", "after"), rows)


@app.command()
def delete(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Forget a group that has no members, with its offsets."""
    Remote(server, ca).call("DELETE", _path(name))


def _target(to: str) -> dict[str, object]:
    if to in ("earliest", "latest"):
        return {"to": to}
    if to.isascii() and to.isdigit():
        return {"to": "offset", "offset": int(to)}
    from millstream.cli.reading import parse_time_ms

    try:
        return {"to": "time", "time_ms": parse_time_ms(to, "--to")}
    except SettingInvalid as error:
        raise SettingInvalid(
            f"--to is {to!r}; use earliest, latest, an offset such as 4711, or a time such as "
            "2026-01-31T08:00Z",
            setting="to",
            value=to,
        ) from error


def _partitions(member: dict[str, Any]) -> str:
    """`orders 0-3,7`: a range for each run."""
    return " ".join(f"{one['topic']} {_runs(one['partitions'])}" for one in member["assignment"])


def _runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _lag_row(one: dict[str, Any]) -> tuple[str, ...]:
    trend = one["trend_per_s"]
    return (
        one["topic"],
        str(one["partition"]),
        _number(one["committed"]),
        _number(one["end"]),
        _number(one["messages"]),
        f"{one['seconds']:.1f}",
        "–" if trend is None else f"{trend:+.1f}",
    )


def _in_flight(group: dict[str, Any]) -> str:
    topics = group["topics"]
    words = ("leased", "waiting", "ready")
    return ", ".join(f"{sum(topic[word] for topic in topics):,} {word}" for word in words)


def _lease_row(one: dict[str, Any]) -> tuple[str, ...]:
    until = datetime.fromtimestamp(one["when_ms"] // 1000, UTC) if one["when_ms"] else None
    return (
        one["topic"],
        str(one["partition"]),
        _number(one["offset"]),
        one["state"],
        one["member"] or "–",
        str(one["deliveries"]),
        one["lane"],
        until.strftime("%Y-%m-%d %H:%M:%SZ") if until is not None else "–",
    )


def _trend(lag: dict[str, Any]) -> str:
    return "" if lag["trend_per_s"] is None else f", {lag['trend_per_s']:+.1f}/s"


def _number(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def _path(name: str) -> str:
    return f"/v1/groups/{quote(name, safe='')}"
