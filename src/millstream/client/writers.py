"""Staged writes: many tasks write for one batch, and it appears as a whole, once.

    staged = await client.writers.stage("totals", 7, task, attempt, join_entries(entries))
    await client.writers.commit("totals", 7, [staged.part])

`join_entries` and `StagedEntry` are in `millstream.wire.staged`. A commit may be repeated: a batch
that is committed already adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.transport import RAW, Transport
from millstream.client.values import encode_json

# How long one call waits for the end of a commit, and how many writers a page has.
_HOLD_S = 20
_PAGE = 1000


class Staged(msgspec.Struct):
    """What was staged by one call, on the broker's disk."""

    part: str  # the handle by which a commit names it
    records: int
    bytes: int


class Committed(msgspec.Struct):
    """A batch that is in its topics."""

    writer: str
    batch: int
    records: int | None  # None for a batch before the writer's last one
    already: bool  # committed before this was asked
    skipped: dict[str, int] = {}  # records in no topic, by why


class LastBatch(msgspec.Struct):
    batch: int
    records: int
    committed_ms: int
    skipped: dict[str, int] = {}
    owner: str | None = None  # None when nobody said for whom it was
    final: bool = False  # the writer will be forgotten


class CommitProgress(msgspec.Struct):
    batch: int
    done: int
    of: int
    trouble: str | None = None


class WriterFacts(msgspec.Struct):
    """What there is to know of a writer."""

    writer: str
    staged_parts: int
    staged_bytes: int
    last: LastBatch | None = None
    committing: CommitProgress | None = None


class _Page(msgspec.Struct):
    writers: list[WriterFacts]
    next: str | None = None


class _Aborted(msgspec.Struct):
    parts: int


class Writers:
    """Writers by name, each with batches of rising numbers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def stage(
        self,
        writer: str,
        batch: int,
        task: int,
        attempt: int,
        data: bytes,
        *,
        owner: str | None = None,
    ) -> Staged:
        """Store what a task writes; at most 8 MiB a call. Nobody sees it before the commit.

        With an owner, WriterAhead when another owner has committed this batch or a later one. A
        try whose answer is lost leaves a part that nobody names, and that is forgotten."""
        asked = {"task": str(task), "attempt": str(attempt)} | _owned(owner)
        path = f"{_batch_path(writer, batch)}/parts?{urlencode(asked)}"
        reply = await self._transport.ask("POST", path, data, media=RAW, is_repeatable=True)
        return msgspec.json.decode(reply.body, type=Staged)

    async def commit(
        self,
        writer: str,
        batch: int,
        parts: Sequence[str],
        *,
        owner: str | None = None,
        forget: bool = False,
    ) -> Committed:
        """Let a batch appear, and wait until it is in its topics. Repeating it does no harm.

        With an owner, WriterAhead when another owner has committed this batch or a later one. With
        `forget` it is the writer's final one, and the broker forgets the writer an hour later."""
        asked = {"parts": list(parts), "wait": f"{_HOLD_S}s"} | _owned(owner)
        body = encode_json(asked | ({"forget": True} if forget else {}))
        path = f"{_batch_path(writer, batch)}/commit"
        while True:
            reply = await self._transport.ask(
                "POST", path, body, is_repeatable=True, hold_s=_HOLD_S
            )
            page: dict[str, Any] = msgspec.json.decode(reply.body)
            if page["state"] == "committed":
                return msgspec.convert(page, Committed)

    async def abort(self, writer: str, batch: int) -> int:
        """Forget what is staged for a batch; how many parts that were."""
        path = f"{_batch_path(writer, batch)}/abort"
        reply = await self._transport.ask("POST", path, is_repeatable=True)
        return msgspec.json.decode(reply.body, type=_Aborted).parts

    async def get(self, writer: str) -> WriterFacts:
        reply = await self._transport.ask("GET", _writer_path(writer))
        return msgspec.json.decode(reply.body, type=WriterFacts)

    async def forget(self, writer: str) -> None:
        """Remove a writer: a batch of any number is its first then."""
        await self._transport.ask("DELETE", _writer_path(writer), is_repeatable=False)

    async def list(self) -> list[WriterFacts]:
        """All of them, by name."""
        found: list[WriterFacts] = []
        after: str | None = ""
        while after is not None:
            query = urlencode({"after": after, "limit": _PAGE})
            reply = await self._transport.ask("GET", f"/v1/writers?{query}")
            page = msgspec.json.decode(reply.body, type=_Page)
            found += page.writers
            after = page.next
        return found


def _owned(owner: str | None) -> dict[str, str]:
    return {} if owner is None else {"owner": owner}


def _writer_path(writer: str) -> str:
    return f"/v1/writers/{quote(writer, safe='')}"


def _batch_path(writer: str, batch: int) -> str:
    return f"{_writer_path(writer)}/batches/{batch}"
