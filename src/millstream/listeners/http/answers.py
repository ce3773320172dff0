"""How HTTP answers: JSON by msgspec, one shape for errors, and which form a client wants."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from millstream import errors
from millstream.listeners.http.answer import Answer

if TYPE_CHECKING:
    from millstream.errors import MillstreamError

JSON_TYPE = "application/json"

# Which status an error has. The tree of errors is wider than what HTTP can tell apart, so the
# code in the body is what a program should look at; what is not listed is a 400.
STATUS_OF_ERROR: Mapping[type[MillstreamError], int] = {
    errors.BatchTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.AppendTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.TopicExists: HTTPStatus.CONFLICT,
    errors.TopicUnknown: HTTPStatus.NOT_FOUND,
    errors.TopicReserved: HTTPStatus.FORBIDDEN,
    errors.TooManyTopics: HTTPStatus.TOO_MANY_REQUESTS,
    errors.IdempotencyKeyConflict: HTTPStatus.CONFLICT,
    errors.TooManyIdempotencyKeys: HTTPStatus.TOO_MANY_REQUESTS,
    errors.PartitionUnknown: HTTPStatus.NOT_FOUND,
    errors.OffsetOutOfRange: HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    errors.LogDamaged: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.ProducerFenced: HTTPStatus.CONFLICT,
    errors.SequenceOutOfOrder: HTTPStatus.CONFLICT,
    errors.SequenceDuplicate: HTTPStatus.CONFLICT,
    errors.DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
    errors.TooManyFiles: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.StorageFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.OutcomeUnknown: HTTPStatus.GATEWAY_TIMEOUT,
    errors.EngineBusy: HTTPStatus.TOO_MANY_REQUESTS,
    errors.EngineStopped: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ForeignRequest: HTTPStatus.FORBIDDEN,
    errors.BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.Busy: HTTPStatus.TOO_MANY_REQUESTS,
    errors.Stopping: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.GroupUnknown: HTTPStatus.NOT_FOUND,
    errors.GroupNotEmpty: HTTPStatus.CONFLICT,
    errors.TooManyGroups: HTTPStatus.TOO_MANY_REQUESTS,
    errors.TooManyMembers: HTTPStatus.TOO_MANY_REQUESTS,
    errors.MemberUnknown: HTTPStatus.NOT_FOUND,
    errors.MemberFenced: HTTPStatus.CONFLICT,
    errors.StaleGeneration: HTTPStatus.CONFLICT,
    errors.GroupProtocolMismatch: HTTPStatus.CONFLICT,
    errors.PartitionNotAssigned: HTTPStatus.CONFLICT,
    errors.OffsetUnknown: HTTPStatus.NOT_FOUND,
    errors.MetadataTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.ConsumerUnknown: HTTPStatus.NOT_FOUND,
    errors.ConsumerFenced: HTTPStatus.CONFLICT,
    errors.UpgradeRequired: HTTPStatus.UPGRADE_REQUIRED,
    errors.ReceiptUnknown: HTTPStatus.NOT_FOUND,
    errors.ReceiptStale: HTTPStatus.CONFLICT,
    errors.GroupUsesLeases: HTTPStatus.CONFLICT,
    errors.GroupUsesOffsets: HTTPStatus.CONFLICT,
    errors.LeasesRefused: HTTPStatus.CONFLICT,
    errors.DeadLetterUnknown: HTTPStatus.NOT_FOUND,
    errors.RedriveUnknown: HTTPStatus.NOT_FOUND,
    errors.RedriveRunning: HTTPStatus.CONFLICT,
    errors.TooManyRedrives: HTTPStatus.TOO_MANY_REQUESTS,
    errors.ScheduleUnknown: HTTPStatus.NOT_FOUND,
    errors.ScheduleOver: HTTPStatus.CONFLICT,
    errors.TooManySchedules: HTTPStatus.TOO_MANY_REQUESTS,
    errors.WriterUnknown: HTTPStatus.NOT_FOUND,
    errors.TooManyWriters: HTTPStatus.TOO_MANY_REQUESTS,
    errors.TooManyParts: HTTPStatus.TOO_MANY_REQUESTS,
    errors.StagedFull: HTTPStatus.TOO_MANY_REQUESTS,
    errors.StagedPartUnknown: HTTPStatus.NOT_FOUND,
    errors.StagedTopicGone: HTTPStatus.CONFLICT,
    errors.CommitRunning: HTTPStatus.CONFLICT,
    errors.BatchCommitted: HTTPStatus.CONFLICT,
    errors.WriterAhead: HTTPStatus.CONFLICT,
    errors.QueueUnknown: HTTPStatus.NOT_FOUND,
    errors.QueueFull: HTTPStatus.TOO_MANY_REQUESTS,
    errors.MemoryFull: HTTPStatus.TOO_MANY_REQUESTS,
    errors.TooManyQueues: HTTPStatus.TOO_MANY_REQUESTS,
    errors.MessageTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.SnapshotUnknown: HTTPStatus.NOT_FOUND,
    errors.SnapshotFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
}
# What a refused client should wait, in seconds, before it tries again.
RETRY_AFTER = "1"
_TRY_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def json_answer(content: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON_TYPE)


def error_answer(
    status: int, code: str, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The one shape of every error: `error` for programs, `message` for people."""
    body = msgspec.json.encode({"error": code, "message": message})
    return Response(body, status, headers=headers, media_type=JSON_TYPE)


def answer_to(error: MillstreamError) -> Response:
    """The answer to an error of our own tree."""
    plain = failure(error)
    headers = {name.decode(): value.decode() for name, value in plain.headers}
    return Response(plain.body, plain.status, headers=headers, media_type=JSON_TYPE)


def failure(error: MillstreamError) -> Answer:
    """The same, for routes that do without ASGI."""
    status = status_of(error)
    body = msgspec.json.encode(
        {"error": error.code, "message": error.message, **error.fields}, enc_hook=str
    )
    is_worth_it = error.retriable and status in _TRY_AGAIN
    headers = ((b"retry-after", RETRY_AFTER.encode()),) if is_worth_it else ()
    return Answer(status, body, JSON_TYPE.encode(), headers)


def status_of(error: MillstreamError) -> int:
    return status_of_kind(type(error))


def status_of_kind(kind: type[MillstreamError]) -> int:
    # Classes that the table names stand before those they come from in an error's own order.
    for one in kind.__mro__:
        if one in STATUS_OF_ERROR:
            return STATUS_OF_ERROR[one]
    return HTTPStatus.BAD_REQUEST


def preferred(accept: str | None, *offers: str) -> str:
    """Which of the media types a client wants; the first when it does not care."""
    if not accept:
        return offers[0]
    wishes: dict[str, float] = {}
    for part in accept.split(","):
        media_type, _, parameters = part.partition(";")
        quality = 1.0
        for parameter in parameters.split(";"):
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        wishes[media_type.strip().lower()] = quality

    def wish(offer: str) -> float:
        family = offer.partition("/")[0] + "/*"
        return wishes.get(offer, wishes.get(family, wishes.get("*/*", 0.0)))

    return max(offers, key=wish)
