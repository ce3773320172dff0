"""What HTTP says to staged writes, and back."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.broker.staged_commits import Committed, Running
from millstream.broker.staged_values import BATCH_MAX
from millstream.broker.staged_writes import Attempt
from millstream.engine.pending import Pending, follow
from millstream.errors import BodyInvalid, BodyTooLarge, DelayInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import (
    LISTED_PARAMETERS,
    NO_CONTENT,
    json_of,
    page_of,
    read_body,
)
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.parameters import Parameters, whole
from millstream.wire.staged import BODY_BYTES_MAX, is_too_large
from millstream.wire.times import delay_ms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.staged_writes import Staged, StagedWrites, WriterFacts
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits

TASK_MAX = 2**31 - 1
ATTEMPT_MAX = 2**63 - 1
# How long a commit is waited for: by default, and at most.
WAIT_DEFAULT_MS = 20_000
WAIT_MS_MAX = 30_000
STAGE_PARAMETERS = frozenset(("task", "attempt", "owner"))


class Committing(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[str]
    wait: str | int | None = None
    owner: str | None = None
    forget: bool = False


_committing = msgspec.json.Decoder(Committing)


class WriterAnswers:
    __slots__ = ("_waits", "_writes")

    def __init__(self, writes: StagedWrites, waits: Waits) -> None:
        self._writes = writes
        self._waits = waits

    def stage(self, call: Call, writer: str, batch: str) -> Later:
        parameters = Parameters(call.query, STAGE_PARAMETERS)
        attempt = Attempt(
            writer,
            _batch(batch),
            parameters.whole("task", 0, 0, TASK_MAX),
            parameters.whole("attempt", 0, 0, ATTEMPT_MAX),
            parameters.text("owner", None),
        )
        body = call.body
        if is_too_large(body):
            raise BodyTooLarge(
                f"the body has {len(body)} bytes, and several entries in one request at most "
                f"{BODY_BYTES_MAX}; send several requests",
                limit_bytes=BODY_BYTES_MAX,
            )

        def answer(staged: Staged) -> Answer:
            return json_of({"part": staged.part, "records": staged.records, "bytes": staged.bytes})

        return later(self._writes.stage(attempt, body), answer)

    def commit(self, call: Call, writer: str, batch: str) -> Pending[Answer]:
        Parameters(call.query, ())
        said = read_body(_committing, call.body, '{"parts": [handle, …], "wait": "20s"}')
        wait_s = _wait_ms(said.wait) / 1000
        committing = self._writes.commit(
            writer, _batch(batch), said.parts, said.owner, is_final=said.forget
        )

        def steps() -> Generator[Pending[Any], Any, Answer]:
            one: Committed | Running = yield committing
            if isinstance(one, Committed):
                return _committed(writer, one)
            if wait_s:
                yield self._waits.until(call, self._writes.wait(one, wait_s))
            if not one.outcome.is_done:
                return _running(one)
            return _committed(writer, one.outcome.result())

        return follow(steps())

    def abort(self, call: Call, writer: str, batch: str) -> Later:
        Parameters(call.query, ())
        number = _batch(batch)

        def answer(parts: int) -> Answer:
            return json_of({"writer": writer, "batch": number, "state": "aborted", "parts": parts})

        return later(self._writes.abort(writer, number), answer)

    def list(self, call: Call) -> Later:
        names, next_ = page_of(self._writes.names(), Parameters(call.query, LISTED_PARAMETERS))

        def answer(found: Sequence[WriterFacts]) -> Answer:
            return json_of({"writers": [_writer_page(one) for one in found], "next": next_})

        return later(self._writes.facts(names), answer)

    def get(self, call: Call, writer: str) -> Later:
        Parameters(call.query, ())
        return later(self._writes.facts([writer]), lambda found: json_of(_writer_page(found[0])))

    def forget(self, call: Call, writer: str) -> Later:
        Parameters(call.query, ())
        return later(self._writes.forget(writer), lambda _: NO_CONTENT)


def _batch(text: str) -> int:
    return whole("batch", text, 0, BATCH_MAX)


def _wait_ms(wait: str | int | None) -> int:
    if wait is None:
        return WAIT_DEFAULT_MS
    try:
        wait_ms = delay_ms_of(wait)
    except DelayInvalid as error:
        raise BodyInvalid(f"wait: {error.message}") from None
    if wait_ms > WAIT_MS_MAX:
        raise BodyInvalid(f"wait is {wait_ms} ms; a commit is waited for {WAIT_MS_MAX} ms at most")
    return wait_ms


def _committed(writer: str, one: Committed) -> Answer:
    return json_of(
        {
            "writer": writer,
            "batch": one.batch,
            "state": "committed",
            "records": one.records,
            "skipped": one.skipped,
            "already": one.already,
        }
    )


def _running(one: Running) -> Answer:
    return json_of(
        {
            "writer": one.writer,
            "batch": one.committing.batch,
            "state": "committing",
            "done": one.progress.at,
            "of": len(one.places),
            "trouble": one.trouble,
        },
        202,
    )


def _writer_page(facts: WriterFacts) -> dict[str, object]:
    last = committing = None
    if facts.last_batch is not None:
        last = {
            "batch": facts.last_batch,
            "records": facts.last_records,
            "skipped": facts.last_skipped,
            "owner": facts.last_owner,
            "final": facts.is_last_final,
            "committed_ms": facts.committed_ms,
        }
    if facts.committing is not None:
        committing = {
            "batch": facts.committing,
            "done": facts.done,
            "of": facts.of,
            "trouble": facts.trouble,
        }
    return {
        "writer": facts.name,
        "last": last,
        "committing": committing,
        "staged_parts": facts.parts,
        "staged_bytes": facts.bytes,
    }
