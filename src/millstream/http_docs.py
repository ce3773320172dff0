"""Makes `docs/http.md` from the routes: `python -m millstream.http_docs > docs/http.md`.

The page is what `/openapi.json` says, for people. The routes are those of a broker in memory that
is never started.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from millstream import errors
from millstream.broker.broker import Broker, BrokerOptions, make_broker
from millstream.broker.queues import QueueLimits, Queues
from millstream.broker.snapshots import Snapshots
from millstream.broker.timers import Timers
from millstream.broker.topic_settings import TopicDefaults
from millstream.broker.topics import TopicLimits
from millstream.clock import SystemClock
from millstream.engine.memory import MemoryEngine
from millstream.listeners.http.answers import status_of_kind
from millstream.listeners.http.app import http_app
from millstream.listeners.http.route import COMMON_ERRORS, OF_THE_CONNECTION
from millstream.listeners.http.v1 import V1, Bounds
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionSettings
from millstream.log.snapshot import SnapshotFolder
from millstream.observe.metrics import Metrics
from millstream.observe.status import Status

Page = dict[str, Any]

_HEAD = """\
# HTTP

This page is made from the routes in `src/millstream/listeners/http/` by `make docs`. Change the
routes, not the page. A broker gives the same to programs at `/openapi.json`.

Bodies and answers are JSON unless something else is said. Times that end with `_ms`, and `time`,
are milliseconds since 1970. A field or a parameter that a route does not know is refused under
`/v1`, so that a misspelt one is noticed. Names in a path are percent-encoded.

```
$ curl -s localhost:8080/v1/topics/orders/messages -d '{"key": "4711", "value": {"total": 9.99}}'
{"topic":"orders","partition":0,"offset":0,"timestamp_ms":1767225600000}
$ curl -s localhost:8080/v1/topics/orders/messages
{"topic":"orders","messages":[{"partition":0,"offset":0,…}],"next":"5e35c0de:0:1,…"}
```

**Errors** have one form: `{"error": code, "message": text, …}`. The code is for programs and stays
the same; the message says what to do; other fields (a topic, a limit, the index of a bad record)
help. All codes are listed at the end. With 429 and 503, `Retry-After` says how many seconds to
wait. A path that is not there is answered with 404 and `not_found`, a method that a path does not
take with 405 and `method_not_allowed`. These may come from every route, and are not repeated below:

| status | code |
|---|---|
{everywhere}

Messages over WebSocket have pages of their own: [topics](topics.md) and [queues](websocket.md).
"""

# In the order of the page; what is not here comes after them, in its own order.
_SECTIONS = {
    "topics": "Topics",
    "topic messages": "Messages of topics",
    "groups": "Groups",
    "work queues": "Work queues",
    "dead letters": "Dead letters",
    "staged writes": "Staged writes",
    "sequential consumers": "Sequential consumers",
    "admin": "Administration",
    "messages": "Messages of queues",
    "queues": "Queues",
}
_CODE = re.compile(r"`([a-z_]+)`")
_EVERYWHERE = frozenset(
    (*(code for _, code in OF_THE_CONNECTION), *(kind.code for kind in COMMON_ERRORS))
)
_VERBS = ("get", "post", "put", "patch", "delete")


def http_page() -> str:
    """The whole page."""
    page = http_app(*_parts()).openapi()
    forms: dict[str, Page] = {}
    sections = [_section(tag, routes, forms) for tag, routes in _by_tag(page).items()]
    head = _HEAD.replace("{everywhere}", _everywhere())
    return head + "".join(sections) + _forms(forms) + _codes()


def _parts() -> tuple[Status, Metrics, Broker, V1]:
    """What an application is made of; none of it runs."""
    clock = SystemClock()
    queues = Queues(QueueLimits(), lambda: 0)
    folder = SnapshotFolder(SystemDisk(), "")
    broker = make_broker(
        MemoryEngine(),
        queues,
        Snapshots(queues, folder, folder),
        BrokerOptions(TopicDefaults(PartitionSettings()), TopicLimits()),
        clock=clock,
        timers=Timers(clock, _never),
        turns=_NoTurns(),
    )
    status = Status(node_id=1, clock=clock)
    return status, Metrics(), broker, V1(broker, status, Bounds())


class _NoTurns:
    def soon(self, call: Callable[[], None]) -> None:
        raise AssertionError(call)

    at_end = soon


def _never(seconds: float, call: Callable[[], None]) -> Any:
    raise AssertionError(seconds, call)


def _everywhere() -> str:
    pairs = [(status_of_kind(kind), kind.code) for kind in COMMON_ERRORS]
    return "\n".join(
        f"| {status:d} | `{code}` |" for status, code in sorted([*pairs, *OF_THE_CONNECTION])
    )


# ---- routes


def _by_tag(page: Page) -> dict[str, list[tuple[str, str, Page]]]:
    found: dict[str, list[tuple[str, str, Page]]] = {tag: [] for tag in _SECTIONS}
    for path, verbs in page["paths"].items():
        for verb in _VERBS:
            if verb in verbs:
                tag = verbs[verb].get("tags", ["other"])[0]
                found.setdefault(tag, []).append((verb.upper(), path, verbs[verb]))
    return {tag: routes for tag, routes in found.items() if routes}


def _section(tag: str, routes: list[tuple[str, str, Page]], forms: dict[str, Page]) -> str:
    return f"\n## {_SECTIONS.get(tag, tag.capitalize())}\n" + "".join(
        _route(verb, path, page, forms) for verb, path, page in routes
    )


def _route(verb: str, path: str, page: Page, forms: dict[str, Page]) -> str:
    lines = [f"\n### `{verb} {path}`\n", f"{page['summary']}.\n"]
    if page.get("description"):
        lines.append(f"{page['description'].strip()}\n")
    if page.get("description", "").startswith("Another spelling"):
        return "\n".join(lines)
    parameters = page.get("parameters", ())
    if parameters:
        lines.append("| parameter | in | takes | |\n|---|---|---|---|")
        lines += [_parameter(one, forms) for one in parameters]
        lines.append("")
    for media, content in page.get("requestBody", {}).get("content", {}).items():
        lines.append(f"Body, `{media}`: {_kind(content.get('schema', {}), forms)}\n")
    lines.append("| status | answer |\n|---|---|")
    for status, answer in sorted(page["responses"].items()):
        said = _answer(answer, forms)
        if said:
            lines.append(f"| {status} | {_cell(said)} |")
    return "\n".join(lines) + "\n"


def _parameter(one: Page, forms: dict[str, Page]) -> str:
    needed = "" if one["in"] == "path" or not one.get("required") else "Needed. "
    kind = _cell(_kind(one.get("schema", {}), forms))
    return f"| `{one['name']}` | {one['in']} | {kind} | {needed}{one.get('description', '')} |"


def _answer(answer: Page, forms: dict[str, Page]) -> str:
    said = str(answer["description"])
    codes = _CODE.findall(said)
    if said == ", ".join(f"`{code}`" for code in codes):
        # The page says at its top what every route may answer.
        return ", ".join(f"`{code}`" for code in codes if code not in _EVERYWHERE)
    kinds = [
        _kind(content.get("schema", {}), forms) if media == "application/json" else f"`{media}`"
        for media, content in answer.get("content", {}).items()
    ]
    shown = " or ".join(kind for kind in kinds if kind not in ("any JSON", _ERROR))
    headers = ", ".join(f"`{name}`" for name in answer.get("headers", ()))
    headers = f" Headers: {headers}." if headers else ""
    return f"{said} {shown}".strip() + headers


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# ---- forms

_ERROR = "[Error](#error)"


def _kind(schema: Page, forms: dict[str, Page]) -> str:
    """What a value may be, in a few words; a form with a name is described once, further down."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    title = schema.get("title")
    if title is not None and (schema.get("type") == "object" or "anyOf" in schema):
        if title == "Error":
            return _ERROR
        known = forms.setdefault(title, schema)
        # The same schema may write its numbers in two ways, so what is shown is compared.
        if known != schema and _form(title, known, {}) != _form(title, schema, {}):
            raise ValueError(f"two forms have the title {title}; the page would show one for both")
        return f"[{title}](#{title.lower()})"
    if "anyOf" in schema:
        kinds = sorted(_choices(schema, forms), key="null".__eq__)
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(_kind({**schema, "type": one}, forms) for one in kind)
    if kind == "array":
        return "list of " + _kind(schema.get("items", {}), forms)
    if kind == "string":
        return "bytes" if schema.get("format") == "binary" else "text"
    words = {
        "integer": "whole number" + _range(schema),
        "number": "number" + _range(schema),
        "boolean": "`true` or `false`",
        "null": "null",
        "object": "object",
    }
    return words.get(kind, "any JSON") if isinstance(kind, str) else "any JSON"


def _choices(schema: Page, forms: dict[str, Page]) -> list[str]:
    """Of a choice, those of the choices in it as well."""
    if "anyOf" not in schema:
        return [_kind(schema, forms)]
    return [kind for one in schema["anyOf"] for kind in _choices(one, forms)]


def _range(schema: Page) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None or most is None or most >= 2**31 - 1:
        return "" if least in (None, 0) else f" from {_figure(least)}"
    return f" from {_figure(least)} to {_figure(most)}"


def _figure(number: float) -> str:
    """A whole number may be written as 1.0, and is to have all its digits."""
    return str(int(number)) if number == int(number) else f"{number:g}"


def _forms(forms: dict[str, Page]) -> str:
    """Those that were named so far, and those that they name."""
    lines: list[str] = []
    shown: set[str] = set()
    while len(shown) < len(forms):
        title = next(title for title in forms if title not in shown)
        shown.add(title)
        lines.append(_form(title, forms[title], forms))
    return "\n## Forms\n" + "".join(lines)


def _form(title: str, schema: Page, forms: dict[str, Page]) -> str:
    lines = [f"\n### {title}\n"]
    if schema.get("description"):
        lines.append(f"{schema['description']}\n")
    lines.append("| field | takes | |\n|---|---|---|")
    parts = schema.get("anyOf", [schema])
    fields: dict[str, list[Page]] = {}
    for part in parts:
        for name, field in part.get("properties", {}).items():
            fields.setdefault(name, []).append(field)
    for name, kinds in fields.items():
        is_needed = all(name in part.get("required", ()) for part in parts)
        takes = _kind({"anyOf": kinds}, forms)
        said = next((text for one in kinds if (text := _described(one))), "")
        needed = "" if is_needed else "May be left out. "
        lines.append(f"| `{name}` | {_cell(takes)} | {needed}{_cell(said)} |")
    return "\n".join(lines) + "\n"


def _described(schema: Page) -> str:
    if schema.get("description"):
        return str(schema["description"])
    return next((text for one in schema.get("anyOf", ()) if (text := _described(one))), "")


# ---- errors


def _codes() -> str:
    lines = ["\n## Errors\n", "| code | status | try again | |\n|---|---|---|---|"]
    for kind in sorted(set(_kinds(errors.MillstreamError)), key=lambda kind: kind.code):
        again = "yes" if kind.retriable else ""
        what = " ".join((kind.__doc__ or "").split())
        lines.append(f"| `{kind.code}` | {status_of_kind(kind):d} | {again} | {_cell(what)} |")
    return "\n".join(lines) + "\n"


def _kinds(root: type[errors.MillstreamError]) -> Iterator[type[errors.MillstreamError]]:
    for kind in root.__subclasses__():
        if getattr(errors, kind.__name__, None) is kind:
            yield kind
        yield from _kinds(kind)


if __name__ == "__main__":
    sys.stdout.write(http_page())
