"""What a broker refuses, as the error that it is."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from millstream import errors
from millstream.errors import BrokerUnreachable, MillstreamError, OutcomeUnknown

# Answers of a proxy that lost its broker: nobody can say what the broker did.
_LOST_BEHIND_PROXY = frozenset((502, 504))
_BUSY = frozenset((429, 503))


class Refused(MillstreamError):
    """A broker that is newer, or HTTP itself, refused with a code of its own; fields: error."""

    code = "refused"


class RefusedForNow(Refused):
    """The same, where trying again can help."""

    retriable = True


def refusal(server: str, status: int, body: bytes) -> MillstreamError:
    """The error of an answer of 400 or more."""
    try:
        page = msgspec.json.decode(body, type=dict[str, object])
        code, message = str(page.pop("error")), str(page.pop("message"))
    except (msgspec.MsgspecError, KeyError):
        return _stranger(server, status)
    kind = _kinds().get(code)
    if kind is not None:
        return kind(message, **page)
    unknown = RefusedForNow if status in _BUSY else Refused
    error = unknown(message, **page)
    error.code = code  # type: ignore[misc]  # of this one alone
    return error


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds of a `Retry-After`; a date, which a broker never sends, is not read."""
    if value is None or not value.isdigit():
        return None
    return float(min(int(value), 3600))


def _stranger(server: str, status: int) -> MillstreamError:
    if status in _LOST_BEHIND_PROXY:
        return OutcomeUnknown(
            f"what stands before {server} lost the broker's answer ({status}); "
            "look whether it was done, before it is tried again"
        )
    if status in _BUSY:
        return RefusedForNow(f"what answers at {server} is busy: it said {status}", server=server)
    return BrokerUnreachable(
        f"what answers at {server} is no broker: it said {status}", server=server
    )


def _kinds() -> dict[str, type[MillstreamError]]:
    if not _kinds_by_code:
        _kinds_by_code.update((kind.code, kind) for kind in _below(MillstreamError))
    return _kinds_by_code


_kinds_by_code: dict[str, type[MillstreamError]] = {}


def _below(kind: type[MillstreamError]) -> Iterator[type[MillstreamError]]:
    for below in kind.__subclasses__():
        if getattr(errors, below.__name__, None) is below:
            yield below
            yield from _below(below)
