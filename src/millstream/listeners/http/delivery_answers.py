"""What HTTP says to work queues and back: receives, settlings, and what is known of them.

A request that settles one delivery is answered as that went, with the status of its error. One
that settles many is answered 200, with a result for each, in the order of the request.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import msgspec

from millstream.broker.delivery_values import DeliveryCounts, Receive, Settle
from millstream.broker.group_values import check_group_name
from millstream.errors import BodyInvalid, ParameterInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.bodies import json_of, read_body
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import TYPE, Shown, encoded, shown_lease
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters, whole
from millstream.wire import leases
from millstream.wire.batches import is_shown_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from millstream.broker.delivery import Delivery
    from millstream.broker.delivery_values import (
        Delivered,
        LaneFacts,
        Received,
        Settled,
        SettleKind,
    )
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.topics import Topics
    from millstream.listeners.http.route import Call, Handler
    from millstream.listeners.http.waits import Waits

# What one request settles at most: each takes some microseconds, and others wait meanwhile.
SETTLES_MAX = 10_000
LISTED_MAX = 1_000
LEASES_PARAMETERS = frozenset(("topic", "after", "limit"))
RELIABILITY_PARAMETERS = frozenset(("group", "after", "limit"))
PRIORITY_PARAMETERS = frozenset(("topic", "group", "after", "limit"))

_ONE = "one of `receipt` and `receipts` is needed"


class Receiving(msgspec.Struct, forbid_unknown_fields=True):
    topics: list[str]
    limit: int | None = None
    bytes: int | None = None
    wait_ms: int | None = None
    visibility_ms: int | None = None
    member: str | None = None
    start: Literal["earliest", "latest"] | None = None


class Receipts(msgspec.Struct, forbid_unknown_fields=True):
    """Of an ack or a release."""

    receipt: str | None = None
    receipts: list[str] | None = None


class Nacking(Receipts, forbid_unknown_fields=True):
    delay_ms: int | None = None
    error: str = ""


class Rejecting(Receipts, forbid_unknown_fields=True):
    error: str = ""


class Extending(Receipts, forbid_unknown_fields=True):
    visibility_ms: int | None = None


class Settling(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["ack", "nack", "release", "reject", "extend"]
    receipt: str
    delay_ms: int | None = None
    visibility_ms: int | None = None
    error: str = ""


class Settlings(msgspec.Struct, forbid_unknown_fields=True):
    settles: list[Settling]


class _Page(msgspec.Struct, gc=False):
    """What a receive answers."""

    group: str
    deadline_ms: int
    visibility_ms: int
    limited_by: Literal["member", "group"] | None
    messages: list[Shown]


class _Kind:
    """A way to settle: what its route reads, and says."""

    __slots__ = ("decoder", "form", "kind")

    def __init__(self, kind: SettleKind, body: type[Receipts], form: str) -> None:
        self.kind: SettleKind = kind
        self.decoder = msgspec.json.Decoder(body)
        self.form = form


# By the last word of the path.
KINDS = {
    "ack": _Kind("ack", Receipts, '{"receipt": …}'),
    "nack": _Kind("nack", Nacking, '{"receipt": …, "delay_ms": …, "error": …}'),
    "reject": _Kind("reject", Rejecting, '{"receipt": …, "error": …}'),
    "release": _Kind("release", Receipts, '{"receipt": …}'),
    "visibility": _Kind("extend", Extending, '{"receipt": …, "visibility_ms": …}'),
}

_receiving = msgspec.json.Decoder(Receiving)
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_settlings = msgspec.json.Decoder(Settlings)


class DeliveryAnswers:
    __slots__ = ("_delivery", "_offsets", "_topics", "_waits")

    def __init__(
        self, delivery: Delivery, offsets: GroupOffsets, topics: Topics, waits: Waits
    ) -> None:
        self._delivery = delivery
        self._offsets = offsets
        self._topics = topics
        self._waits = waits

    # ---- receiving

    def receive(self, call: Call, group: str) -> Later:
        if call.query:
            Parameters(call.query, ())
        said = read_body(_receiving, call.body, '{"topics": […], "limit": …, …}')
        waits = self._waits
        wait_ms = said.wait_ms
        if wait_ms:
            waits.check_room()
            if waits.is_draining:
                wait_ms = 0
        receive = Receive(
            tuple(said.topics),
            said.limit,
            said.bytes,
            wait_ms,
            said.visibility_ms,
            said.member,
            said.start,
        )
        receiving = self._delivery.receive(group, receive)
        if not receiving.pending.is_done:
            waits.hold(call, receiving)
        written = _packed if call.header(b"accept") == leases.MEDIA else _received

        def answer(found: Received) -> Answer:
            if receiving.has_waited and found.records and call.is_lost:
                # The loop does not know it yet, and nobody would read this.
                receiving.cancel()
            return written(group, found)

        return later(receiving.pending, answer)

    # ---- settling

    def settler(self, word: str, *, of_group: bool) -> Handler:
        """The handler of a route that settles in one way. With `of_group` it takes the receipts of
        one group only."""
        kind = KINDS[word]

        def settle_all(call: Call) -> Later:
            return self._settle(call, kind, None)

        def settle_of_group(call: Call, group: str) -> Later:
            check_group_name(group)
            return self._settle(call, kind, group)

        return settle_of_group if of_group else settle_all

    def _settle(self, call: Call, kind: _Kind, group: str | None) -> Later:
        if call.query:
            Parameters(call.query, ())
        said = read_body(kind.decoder, call.body, kind.form)
        delay_ms = said.delay_ms if isinstance(said, Nacking) else None
        visibility_ms = said.visibility_ms if isinstance(said, Extending) else None
        error = said.error if isinstance(said, Nacking | Rejecting) else ""
        if delay_ms is not None or visibility_ms is not None:
            self._delivery.check_times(delay_ms, visibility_ms)
        receipt, receipts, name = said.receipt, said.receipts, kind.kind
        if receipt is not None:
            if receipts is not None:
                raise BodyInvalid(_ONE)
            one = Settle(name, receipt, delay_ms, visibility_ms, error)
            return later(self._delivery.settle((one,), group), _settled)
        if receipts is None:
            raise BodyInvalid(_ONE)
        _check_count(receipts)
        all_ = [Settle(name, one, delay_ms, visibility_ms, error) for one in receipts]
        return later(self._delivery.settle(all_, group), _all_settled)

    def settle(self, call: Call) -> Later:
        return self._settle_many(call, None)

    def settle_of_group(self, call: Call, group: str) -> Later:
        check_group_name(group)
        return self._settle_many(call, group)

    def _settle_many(self, call: Call, group: str | None) -> Later:
        """Each in its own way."""
        if call.query:
            Parameters(call.query, ())
        form = '{"settles": [{"kind": …, "receipt": …}, …]}'
        said = read_body(_settlings, call.body, form).settles
        _check_count(said)
        settles = [_settle_of(one) for one in said]
        for one in settles:
            if one.delay_ms is not None or one.visibility_ms is not None:
                self._delivery.check_times(one.delay_ms, one.visibility_ms)
        return later(self._delivery.settle(settles, group), _all_settled)

    # ---- looking

    def leases(self, call: Call, group: str) -> Answer:
        parameters = Parameters(call.query, LEASES_PARAMETERS)
        topic = self._topic(parameters)
        after = _place("after", parameters.text("after", None))
        limit = parameters.whole("limit", LISTED_MAX, 1, LISTED_MAX)
        self._offsets.known(group)
        found = self._delivery.leases(group, topic, after, limit + 1)
        last = found[limit - 1] if len(found) > limit else None
        return json_of(
            {
                "group": group,
                "leases": [one._asdict() for one in found[:limit]],
                "next": last and f"{last.topic}:{last.partition}:{last.offset}",
            }
        )

    def reliability(self, call: Call) -> Answer:
        parameters = Parameters(call.query, RELIABILITY_PARAMETERS)
        group = _group(parameters)
        after = parameters.text("after", "")
        limit = parameters.whole("limit", LISTED_MAX, 1, LISTED_MAX)
        counts = self._delivery.counts
        names = sorted(name for name in counts if name > after and group in (None, name))
        listed_names = names[:limit]
        topics: dict[str, list[dict[str, object]]] = {name: [] for name in listed_names}
        for one in self._delivery.shares(topics):
            page = one._asdict()
            topics[page.pop("group")].append(page)
        groups = [
            {"group": name, **asdict(counts[name]), "topics": topics[name]} for name in listed_names
        ]
        more = listed_names[-1] if len(names) > limit else None
        totals = _totals(counts.values()) | {"refused": self._delivery.refused}
        return json_of({"totals": totals, "groups": groups, "next": more})

    def priority(self, call: Call) -> Later:
        parameters = Parameters(call.query, PRIORITY_PARAMETERS)
        topic, group = self._topic(parameters), _group(parameters)
        after = _lane_place("after", parameters.text("after", None))
        limit = parameters.whole("limit", LISTED_MAX, 1, LISTED_MAX)

        def answer(found: list[LaneFacts]) -> Answer:
            last = found[-1] if len(found) >= limit else None
            more = last and f"{last.topic}:{last.partition}:{last.group}"
            return json_of({"lanes": [one._asdict() for one in found], "next": more})

        return later(self._delivery.lanes(topic, group, after, limit), answer)

    def _topic(self, parameters: Parameters) -> str | None:
        """One that there is."""
        name = parameters.text("topic", None)
        return None if name is None else self._topics.get(name).name


# ---- answers


def _received(group: str, received: Received) -> Answer:
    return Answer(200, received_body(group, received, received.records))


def received_body(group: str, received: Received, records: Sequence[Delivered]) -> bytes:
    """What a receive answers that gave these records, some or all of what was received."""
    return _encode(
        _Page(
            group,
            received.deadline_ms,
            received.visibility_ms,
            received.limited_by,
            [shown_lease(one) for one in records],
        )
    )


class ReceivedPages:
    """The answers to receives of one record each that were served together: what they have in
    common is encoded once."""

    __slots__ = ("_begin", "_deadline_ms", "_group", "_limited_by", "_visibility_ms")

    def __init__(self, group: str) -> None:
        self._group = group
        self._begin = b""
        self._deadline_ms = self._visibility_ms = -1
        self._limited_by: str | None = None

    def page(self, received: Received, one: Delivered | None) -> bytes:
        """As `received_body` of this record alone, or of none."""
        if (
            received.deadline_ms != self._deadline_ms
            or received.visibility_ms != self._visibility_ms
            or received.limited_by != self._limited_by
        ):
            self._deadline_ms = received.deadline_ms
            self._visibility_ms = received.visibility_ms
            self._limited_by = received.limited_by
            self._begin = received_body(self._group, received, ()).removesuffix(b"]}")
        message = b"" if one is None else encoded(shown_lease(one))
        return b"%b%b]}" % (self._begin, message)


def _packed(group: str, received: Received) -> Answer:
    """The same for programs, without text: see `wire/leases.py`."""
    messages = [
        (
            one.topic,
            one.partition,
            record.offset,
            record.timestamp,
            record.key,
            record.value,
            [pair for pair in record.headers if is_shown_header(pair[0])] if record.headers else (),
            TYPE in record.headers,
            one.lane,
            one.deliveries,
            one.receipt,
        )
        for one in received.records
        for record in (one.record,)
    ]
    page = {
        "group": group,
        "deadline_ms": received.deadline_ms,
        "visibility_ms": received.visibility_ms,
        "limited_by": received.limited_by,
        "messages": messages,
    }
    return Answer(200, _pack(page), leases.MEDIA)


def _settled(found: list[Settled]) -> Answer:
    (one,) = found
    return settled_answer(one)


def settled_answer(one: Settled) -> Answer:
    """Of the only one that a request settled."""
    if one.error is not None:
        return failure(one.error)
    return Answer(200, _outcome(one))


def _all_settled(found: list[Settled]) -> Answer:
    refused = 0
    results: list[bytes] = []
    for one in found:
        if one.error is not None:
            refused += 1
            results.append(failure(one.error).body)
        else:
            results.append(_outcome(one))
    body = b'{"settled":%d,"refused":%d,"results":[%b]}'
    return Answer(200, body % (len(found) - refused, refused, b",".join(results)))


def _outcome(one: Settled) -> bytes:
    assert one.outcome is not None
    if one.when_ms:
        return b'{"outcome":"%b","when_ms":%d}' % (one.outcome.encode(), one.when_ms)
    return b'{"outcome":"%b"}' % one.outcome.encode()


# ---- what is asked


def _settle_of(one: Settling) -> Settle:
    """What does not belong to a kind is a mistake that should be told."""
    if one.delay_ms is not None and one.kind != "nack":
        raise BodyInvalid("delay_ms is for a nack")
    if one.visibility_ms is not None and one.kind != "extend":
        raise BodyInvalid("visibility_ms is for an extend")
    if one.error and one.kind not in {"nack", "reject"}:
        raise BodyInvalid("error is for a nack or a reject")
    return Settle(one.kind, one.receipt, one.delay_ms, one.visibility_ms, one.error)


def _check_count(settles: Sequence[object]) -> None:
    if not 1 <= len(settles) <= SETTLES_MAX:
        raise BodyInvalid(
            f"there are {len(settles)} deliveries; one request settles 1 to {SETTLES_MAX}",
            least=1,
            most=SETTLES_MAX,
        )


def _group(parameters: Parameters) -> str | None:
    group = parameters.text("group", None)
    if group is not None:
        check_group_name(group)
    return group


def _place(name: str, text: str | None) -> tuple[str, int, int] | None:
    """`topic:partition:offset`"""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) != 3:
        raise _no_next(name)
    topic, partition, offset = parts
    try:
        return topic, whole(name, partition, 0, PARTITION_MAX), whole(name, offset, 0, OFFSET_MAX)
    except ParameterInvalid:
        raise _no_next(name) from None


def _lane_place(name: str, text: str | None) -> tuple[str, str, int] | None:
    """`topic:partition:group`: a group may have colons in its name."""
    if text is None:
        return None
    parts = text.split(":", 2)
    if len(parts) != 3:
        raise _no_next(name)
    try:
        return parts[2], parts[0], whole(name, parts[1], 0, PARTITION_MAX)
    except ParameterInvalid:
        raise _no_next(name) from None


def _no_next(name: str) -> ParameterInvalid:
    return ParameterInvalid(f"{name} must be the `next` of the page before", parameter=name)


def _totals(counts: Iterable[DeliveryCounts]) -> dict[str, int]:
    totals = asdict(DeliveryCounts())
    for one in counts:
        for name in totals:
            totals[name] += getattr(one, name)
    return totals
