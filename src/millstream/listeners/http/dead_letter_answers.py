"""What HTTP says to dead letters and redrives, and back."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from millstream.broker.dead_letter_reading import DELETE_MAX, LIST_MAX, LetterFilter
from millstream.broker.dead_letter_values import HEADER_PREFIX
from millstream.broker.redrive_jobs import RedriveWish
from millstream.engine.pending import Pending, follow
from millstream.errors import BodyInvalid, ParameterInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import NO_CONTENT, json_of, read_body
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import from_base64, shown
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters, whole
from millstream.log.batch import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.dead_letter_reading import (
        DeadLetterReading,
        GonePage,
        Letter,
        LetterCount,
        LetterPage,
    )
    from millstream.broker.delivery import Delivery
    from millstream.broker.redrive import Redrive
    from millstream.broker.redrive_jobs import JobFacts
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits

LIMIT_DEFAULT = 100
TIMEOUT_S_MAX = 30.0
REASONS = ("deliveries", "rejected")
FILTERS = frozenset(("reason", "group", "key", "key_encoding", "text", "since_ms", "until_ms"))
LIST_PARAMETERS = FILTERS | {"partition", "cursor", "limit"}
GONE_PARAMETERS = frozenset(("cursor", "limit"))
TIMEOUT_PARAMETERS = frozenset(("timeout",))
JOBS_PARAMETERS = frozenset(("topic",))


class Redriving(msgspec.Struct, forbid_unknown_fields=True):
    to: str | None = None
    rate: int | None = None
    dry_run: bool = False
    reason: Literal["deliveries", "rejected"] | None = None
    group: str | None = None
    key: str | None = None
    key_encoding: Literal["base64"] | None = None
    text: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class LetterPlace(msgspec.Struct, forbid_unknown_fields=True):
    partition: int
    offset: int


class Deleting(msgspec.Struct, forbid_unknown_fields=True):
    letters: list[LetterPlace]


_redriving = msgspec.json.Decoder(Redriving)
_deleting = msgspec.json.Decoder(Deleting)


class DeadLetterParts(NamedTuple):
    """What the handlers call."""

    reading: DeadLetterReading
    redrive: Redrive
    delivery: Delivery
    waits: Waits


class DeadLetterAnswers:
    __slots__ = ("_delivery", "_reading", "_redrive", "_waits")

    def __init__(self, parts: DeadLetterParts) -> None:
        self._reading, self._redrive, self._delivery, self._waits = parts

    # ---- dead letters

    def overview(self, call: Call) -> Later:
        """Where there are some, and who makes none for now."""
        Parameters(call.query, ())

        def answer(counts: list[LetterCount]) -> Answer:
            topics = [
                {"topic": one.topic, "dead_letter_topic": one.dead_letter_topic,
                 "dead_letters": one.letters}
                for one in counts
            ]  # fmt: skip
            paused = [
                {"group": one.group, "since_seconds": round(one.open_s or 0.0, 3),
                 "openings": one.openings}
                for one in self._delivery.paused()
            ]  # fmt: skip
            return json_of({"topics": topics, "paused": paused})

        return later(self._reading.counts(), answer)

    def list(self, call: Call, topic: str) -> Later:
        parameters = Parameters(call.query, LIST_PARAMETERS)
        wanted = LetterFilter(
            reason=parameters.choice("reason", None, REASONS),
            group=parameters.text("group", None),
            key=_key(
                parameters.text("key", None), parameters.choice("key_encoding", None, ("base64",))
            ),
            text=parameters.text("text", None),
            since_ms=parameters.whole("since_ms", None, 0, OFFSET_MAX),
            until_ms=parameters.whole("until_ms", None, 0, OFFSET_MAX),
        )
        limit = parameters.whole("limit", LIMIT_DEFAULT, 1, LIST_MAX)
        partition = parameters.whole("partition", None, 0, PARTITION_MAX)
        at = _cursor(parameters.text("cursor", "0:0"))

        def answer(page: LetterPage) -> Answer:
            return json_of(
                {
                    "topic": topic,
                    "dead_letter_topic": page.dead_letter_topic,
                    "total": page.total,
                    "letters": [_letter_page(one) for one in page.letters],
                    "next": _shown_cursor(page.next),
                }
            )

        listing = self._reading.list(topic, wanted, count_max=limit, partition=partition, at=at)
        return later(listing, answer)

    def gone(self, call: Call, topic: str) -> Later:
        parameters = Parameters(call.query, GONE_PARAMETERS)
        limit = parameters.whole("limit", LIMIT_DEFAULT, 1, LIST_MAX)
        at = _cursor(parameters.text("cursor", "0:0"))

        def answer(page: GonePage) -> Answer:
            return json_of(
                {
                    "topic": topic,
                    "dead_letter_topic": page.dead_letter_topic,
                    "gone": [one._asdict() for one in page.runs],
                    "next": _shown_cursor(page.next),
                }
            )

        return later(self._reading.gone(topic, count_max=limit, at=at), answer)

    def get(self, call: Call, topic: str, partition: str, offset: str) -> Later:
        Parameters(call.query, ())
        got = self._reading.get(topic, *_place(partition, offset))
        return later(got, lambda letter: json_of(_letter_page(letter)))

    def delete(self, call: Call, topic: str, partition: str, offset: str) -> Later:
        Parameters(call.query, ())
        deleted = self._reading.delete(topic, [_place(partition, offset)])
        return later(deleted, lambda _: NO_CONTENT)

    def delete_many(self, call: Call, topic: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_deleting, call.body, '{"letters": [{"partition": …, "offset": …}]}')
        if not 1 <= len(said.letters) <= DELETE_MAX:
            raise BodyInvalid(
                f"there are {len(said.letters)} letters; one request deletes 1 to {DELETE_MAX}",
                least=1,
                most=DELETE_MAX,
            )
        places = [(one.partition, one.offset) for one in said.letters]
        count = len(set(places))
        return later(self._reading.delete(topic, places), lambda _: json_of({"deleted": count}))

    def purge(self, call: Call, topic: str) -> Later:
        Parameters(call.query, ())
        return later(self._reading.purge(topic), lambda _: NO_CONTENT)

    # ---- redrives

    def redrive(self, call: Call, topic: str) -> Pending[Answer]:
        parameters = Parameters(call.query, TIMEOUT_PARAMETERS)
        timeout_s = parameters.seconds("timeout", TIMEOUT_S_MAX)
        said = read_body(_redriving, call.body, '{"to": …, "reason": …, …}')
        for name in ("since_ms", "until_ms"):
            value = getattr(said, name)
            if value is not None and not 0 <= value <= OFFSET_MAX:
                raise BodyInvalid(f"{name} is {value}; it must be milliseconds since 1970")
        wanted = LetterFilter(
            reason=said.reason,
            group=said.group,
            key=_key(said.key, said.key_encoding),
            text=said.text,
            since_ms=said.since_ms,
            until_ms=said.until_ms,
        )
        wish = RedriveWish(wanted, said.to, said.rate, said.dry_run)

        def steps() -> Generator[Pending[Any], Any, Answer]:
            facts: JobFacts = yield self._redrive.begin(topic, wish)
            return json_of((yield from self._after(call, facts.id, timeout_s)), 202)

        return follow(steps())

    def jobs(self, call: Call) -> Later:
        topic = Parameters(call.query, JOBS_PARAMETERS).text("topic", None)

        def answer(jobs: Sequence[JobFacts]) -> Answer:
            found = [_job_page(one) for one in jobs if topic in (None, one.job.topic)]
            return json_of({"redrives": found})

        return later(self._redrive.jobs(), answer)

    def job(self, call: Call, id: str) -> Pending[Answer]:
        parameters = Parameters(call.query, TIMEOUT_PARAMETERS)
        timeout_s = parameters.seconds("timeout", TIMEOUT_S_MAX)

        def steps() -> Generator[Pending[Any], Any, Answer]:
            return json_of((yield from self._after(call, id, timeout_s)))

        return follow(steps())

    def _after(
        self, call: Call, id: str, timeout_s: float
    ) -> Generator[Pending[Any], Any, dict[str, object]]:
        """What there is to say of a job when it is over, or when the time is."""
        if timeout_s:
            yield self._waits.until(call, self._redrive.wait(id, timeout_s))
        return _job_page((yield self._redrive.get(id)))

    def cancel(self, call: Call, id: str) -> Later:
        Parameters(call.query, ())
        return later(self._redrive.cancel(id), lambda facts: json_of(_job_page(facts)))


def _letter_page(letter: Letter) -> dict[str, object]:
    facts = letter.facts
    # What its headers say of its end is said beside it.
    one = letter.record
    own = tuple(header for header in one.headers if not header[0].startswith(HEADER_PREFIX))
    record = Record(one.offset, one.timestamp, one.key, one.value, own)
    [message] = shown(letter.partition, [record])
    return {
        "partition": letter.partition,
        "offset": one.offset,
        "origin": {
            "topic": facts.topic, "partition": facts.partition, "offset": facts.offset,
        },
        "group": facts.group,
        "deliveries": facts.deliveries,
        "reason": facts.reason,
        "error": facts.error,
        "first_failure_ms": facts.first_failure_ms,
        "last_failure_ms": facts.last_failure_ms,
        "redrives": facts.redrives,
        "message": message,
    }  # fmt: skip


def _job_page(facts: JobFacts) -> dict[str, object]:
    job, progress = facts.job, facts.progress
    return {
        "id": facts.id,
        "topic": job.topic,
        "dead_letter_topic": job.dlq,
        "to": job.to,
        "rate": job.rate,
        "dry_run": job.is_dry_run,
        "state": progress.state,
        "total": job.total,
        "seen": progress.seen,
        "matched": progress.matched,
        "moved": progress.moved,
        "skipped": progress.skipped,
        "examples": [
            {"partition": one.partition, "offset": one.offset, "to": one.to,
             "to_partition": one.to_partition, "skipped": one.skipped}
            for one in progress.examples
        ],
        "started_ms": job.started_ms,
        "ended_ms": progress.ended_ms,
        "per_second": None if facts.per_second is None else round(facts.per_second, 1),
        "rest_seconds": None if facts.rest_s is None else round(facts.rest_s, 1),
        "error": progress.error,
    }  # fmt: skip


def _key(text: str | None, encoding: str | None) -> bytes | None:
    if text is None:
        return None
    return text.encode() if encoding is None else from_base64("key", text)


def _place(partition: str, offset: str) -> tuple[int, int]:
    return (
        whole("partition", partition, 0, PARTITION_MAX),
        whole("offset", offset, 0, OFFSET_MAX),
    )


def _shown_cursor(at: tuple[int, int] | None) -> str | None:
    return None if at is None else f"{at[0]}:{at[1]}"


def _cursor(text: str) -> tuple[int, int]:
    partition, colon, offset = text.partition(":")
    if not colon:
        raise ParameterInvalid(
            f"cursor is {text[:40]!r}; it must be the `next` of the page before",
            parameter="cursor",
        )
    return whole("cursor", partition, 0, PARTITION_MAX), whole("cursor", offset, 0, OFFSET_MAX)
