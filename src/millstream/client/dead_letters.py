"""Dead letters: looked at, deleted and put back."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.topics import topic_path
from millstream.client.transport import Transport
from millstream.client.values import Key, ReadMessage, Received, encode_json

Reason: TypeAlias = Literal["deliveries", "rejected"]
# Letters of one page.
_PAGE = 200
# Runs of offsets of one page.
_GONE_PAGE = 1000
# How long one call waits for the end of a redrive.
_HOLD_S = 20.0


class LetterFilter(TypedDict, total=False):
    """Which dead letters are meant; without anything, all. Times are those of the last failure."""

    reason: Reason | None
    group: str | None
    key: Key
    text: str | None  # in the value or in the error
    since_ms: int | None
    until_ms: int | None  # not included


class Origin(msgspec.Struct):
    """Where it was before it died."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


class DeadLetter(NamedTuple):
    """A record that was given up, and why."""

    partition: int
    offset: int
    record: Received
    origin: Origin
    group: str | None
    deliveries: int | None
    reason: str | None
    error: str | None
    first_failure_ms: int | None
    last_failure_ms: int | None
    redrives: int  # how often it was put back before


class DeadLetterCount(msgspec.Struct):
    topic: str
    dead_letter_topic: str
    dead_letters: int


class RedriveExample(msgspec.Struct):
    partition: int
    offset: int
    to: str | None = None
    to_partition: int | None = None
    skipped: str | None = None


class RedriveFacts(msgspec.Struct):
    """A redrive, as far as it is."""

    id: str
    topic: str
    state: str  # running, done, cancelled or failed
    total: int
    seen: int
    matched: int
    moved: int
    skipped: dict[str, int]
    started_ms: int
    to: str | None = None
    rate: int | None = None
    dry_run: bool = False
    examples: list[RedriveExample] = []
    ended_ms: int | None = None
    per_second: float | None = None
    rest_seconds: float | None = None
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state != "running"


class _Letter(msgspec.Struct):
    partition: int
    offset: int
    origin: Origin
    message: ReadMessage
    group: str | None = None
    deliveries: int | None = None
    reason: str | None = None
    error: str | None = None
    first_failure_ms: int | None = None
    last_failure_ms: int | None = None
    redrives: int = 0

    def letter(self, topic: str) -> DeadLetter:
        return DeadLetter(
            self.partition,
            self.offset,
            self.message.received(self.origin.topic or topic),
            self.origin,
            self.group,
            self.deliveries,
            self.reason,
            self.error,
            self.first_failure_ms,
            self.last_failure_ms,
            self.redrives,
        )


class _Page(msgspec.Struct):
    letters: list[_Letter]
    total: int
    next: str | None = None


class GoneRun(msgspec.Struct):
    """Dead letters that were deleted or put back, and still lie in the log."""

    partition: int
    first: int
    last: int


class _GonePage(msgspec.Struct):
    gone: list[GoneRun]
    next: str | None = None


class _Counts(msgspec.Struct):
    topics: list[DeadLetterCount]


class _Deleted(msgspec.Struct):
    deleted: int


class _Redrives(msgspec.Struct):
    redrives: list[RedriveFacts]


class DeadLetters:
    """Dead letters, by the topic that they came from."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def counts(self) -> list[DeadLetterCount]:
        """The topics that have some."""
        reply = await self._transport.ask("GET", "/v1/dead-letters")
        return msgspec.json.decode(reply.body, type=_Counts).topics

    async def count(self, topic: str) -> int:
        """How many a topic has."""
        return (await self._page(topic, {"limit": 1})).total

    async def read(self, topic: str, **wanted: Unpack[LetterFilter]) -> AsyncIterator[DeadLetter]:
        """Those that a filter means, by partition and offset."""
        asked = {"limit": _PAGE} | _query(wanted)
        cursor: str | None = ""
        while cursor is not None:
            page = await self._page(topic, asked | ({"cursor": cursor} if cursor else {}))
            for one in page.letters:
                yield one.letter(topic)
            cursor = page.next

    async def _page(self, topic: str, asked: Mapping[str, object]) -> _Page:
        path = topic_path(topic, "dead-letters", query=urlencode(asked))
        return msgspec.json.decode((await self._transport.ask("GET", path)).body, type=_Page)

    async def gone(self, topic: str) -> AsyncIterator[GoneRun]:
        """What to leave out when the topic of dead letters itself is read."""
        cursor: str | None = "0:0"
        while cursor is not None:
            query = urlencode({"limit": _GONE_PAGE, "cursor": cursor})
            path = topic_path(topic, "dead-letters", "gone", query=query)
            reply = await self._transport.ask("GET", path)
            page = msgspec.json.decode(reply.body, type=_GonePage)
            for one in page.gone:
                yield one
            cursor = page.next

    async def get(self, topic: str, partition: int, offset: int) -> DeadLetter:
        path = topic_path(topic, "dead-letters", str(partition), str(offset))
        reply = await self._transport.ask("GET", path)
        return msgspec.json.decode(reply.body, type=_Letter).letter(topic)

    async def delete(self, topic: str, places: Sequence[tuple[int, int]]) -> int:
        """Delete those at these partitions and offsets: all, or none when one is not there."""
        letters = [{"partition": partition, "offset": offset} for partition, offset in places]
        path = topic_path(topic, "dead-letters", "delete")
        reply = await self._transport.ask("POST", path, encode_json({"letters": letters}))
        return msgspec.json.decode(reply.body, type=_Deleted).deleted

    async def purge(self, topic: str) -> None:
        """Delete all of them."""
        await self._transport.ask("DELETE", topic_path(topic, "dead-letters"))

    # ---- putting them back

    async def redrive(
        self,
        topic: str,
        *,
        to: str | None = None,
        rate: int | None = None,
        is_dry_run: bool = False,
        **wanted: Unpack[LetterFilter],
    ) -> RedriveFacts:
        """Start a job that puts dead letters back where they came from, or in another topic.
        `rate` is how many a second at most. A dry run counts, and changes nothing."""
        body = {"to": to, "rate": rate, "dry_run": is_dry_run or None} | _query(wanted)
        said = encode_json({name: value for name, value in body.items() if value is not None})
        path = topic_path(topic, "dead-letters", "redrive")
        return _facts((await self._transport.ask("POST", path, said)).body)

    async def redrive_facts(self, id: str) -> RedriveFacts:
        return _facts((await self._transport.ask("GET", _redrive_path(id))).body)

    async def wait(self, id: str) -> RedriveFacts:
        """What a redrive did, when it is over."""
        path = f"{_redrive_path(id)}?timeout={_HOLD_S}"
        while True:
            reply = await self._transport.ask("GET", path, hold_s=_HOLD_S)
            facts = _facts(reply.body)
            if facts.is_over:
                return facts

    async def cancel(self, id: str) -> RedriveFacts:
        """End a redrive. What it has put back stays there."""
        return _facts((await self._transport.ask("DELETE", _redrive_path(id))).body)

    async def redrives(self, topic: str | None = None) -> list[RedriveFacts]:
        """Those that run, and those that are over since a short while, the newest first."""
        query = "" if topic is None else "?" + urlencode({"topic": topic})
        reply = await self._transport.ask("GET", f"/v1/redrives{query}")
        return msgspec.json.decode(reply.body, type=_Redrives).redrives


def _query(wanted: LetterFilter) -> dict[str, Any]:
    found: dict[str, Any] = {name: one for name, one in wanted.items() if one is not None}
    key = found.get("key")
    if isinstance(key, bytes):
        found |= {"key": base64.b64encode(key).decode("ascii"), "key_encoding": "base64"}
    return found


def _redrive_path(id: str) -> str:
    return f"/v1/redrives/{quote(id, safe='')}"


_facts = msgspec.json.Decoder(RedriveFacts).decode
