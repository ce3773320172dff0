"""What is said to a work queue, and what it answers: values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from millstream.errors import MillstreamError, ReceiptInvalid

if TYPE_CHECKING:
    from millstream.log.batch import Record

LeaseStart: TypeAlias = Literal["earliest", "latest"]
LEASE_STARTS: tuple[LeaseStart, ...] = ("earliest", "latest")
LeaseState: TypeAlias = Literal["leased", "waiting", "ready"]

SettleKind: TypeAlias = Literal["ack", "nack", "release", "reject", "extend"]
SETTLE_KINDS: tuple[SettleKind, ...] = ("ack", "nack", "release", "reject", "extend")

# What became of a record:
# acked, released, extended: as asked. retried: comes back at `when_ms`. dead: is in the dead
# letters. dropped: its topic has none. parked: it was a dead letter already, and stays one.
Outcome: TypeAlias = Literal[
    "acked", "retried", "released", "dead", "dropped", "parked", "extended"
]

# Why a record is a dead letter.
Reason: TypeAlias = Literal["deliveries", "rejected"]


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """As the settings have it."""

    visibility_max_ms: int = 12 * 60 * 60 * 1000
    receive_records_max: int = 1_000
    receive_bytes_max: int = 4 * 1024 * 1024
    receive_wait_max_ms: int = 30_000
    # Records that are leased or wait to come back.
    member_inflight_max: int = 1_000
    group_inflight_max: int = 100_000
    retry_delay_max_ms: int = 24 * 60 * 60 * 1000
    breaker_settlings_min: int = 20
    breaker_window_ms: int = 60_000
    breaker_failures_percent: int = 50


class Receive(NamedTuple):
    """What a worker wants. None is what the settings say."""

    topics: tuple[str, ...]
    count_max: int | None = None
    bytes_max: int | None = None
    wait_ms: int | None = None
    visibility_ms: int | None = None
    # Who asks, for the limit of records in flight; without a name only the group's limit counts.
    member: str | None = None
    # Where a group begins in a topic that it has never used.
    start: LeaseStart | None = None


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """One record, leased."""

    topic: str
    partition: int
    record: Record
    lane: str
    # How often it was given out, this time included.
    deliveries: int
    receipt: str


class Received(NamedTuple):
    records: list[Delivered]
    # When the leases run out, by the wall clock.
    deadline_ms: int
    # Why there are not more: as many as the member, or the group, may have are in flight.
    limited_by: Literal["member", "group"] | None = None
    # How long the shortest of the leases is, for clients whose clock is another.
    visibility_ms: int = 0


class Settle(msgspec.Struct, frozen=True, gc=False):
    """How one delivery ended."""

    kind: SettleKind
    receipt: str
    # Of a nack: when it comes back; None is the topic's backoff.
    delay_ms: int | None = None
    # Of an extend: from now on; None is as long as the lease was at first.
    visibility_ms: int | None = None
    # Of a nack or a reject: what went wrong, for the dead letters.
    error: str = ""


class Settled(msgspec.Struct, frozen=True):
    """Of each settle, in the order of the request."""

    receipt: str
    outcome: Outcome | None
    # When it comes back, or when its lease runs out now; 0 where there is no such time.
    when_ms: int = 0
    # Why it was refused; then nothing happened to the record.
    error: MillstreamError | None = None


class Receipt(NamedTuple):
    """`topic:partition:offset:deliveries:nonce:group`: only a group may have colons in its name."""

    topic: str
    partition: int
    offset: int
    deliveries: int
    nonce: str
    group: str

    def __str__(self) -> str:
        return ":".join(map(str, self))


# Longest names, numbers and nonce with room to spare.
RECEIPT_BYTES_MAX = 700


def whole_number(text: str) -> int | None:
    """In digits, as this broker writes them; None for anything else."""
    if text.isascii() and text.isdecimal() and (text[0] != "0" or text == "0"):
        return int(text)
    return None


def parse_receipt(text: str) -> Receipt:
    """Raises ReceiptInvalid for what this broker cannot have given out."""
    parts = text.split(":", 5) if len(text) <= RECEIPT_BYTES_MAX else ()
    if len(parts) == 6:
        partition, offset, deliveries = map(whole_number, parts[1:4])
        if partition is not None and offset is not None and deliveries is not None:
            return Receipt(parts[0], partition, offset, deliveries, parts[4], parts[5])
    raise ReceiptInvalid(
        f"{text[:100]!r} is not a receipt; send it as it came with the record",
        receipt=text[:RECEIPT_BYTES_MAX],
    )


class LeaseFacts(NamedTuple):
    """One record that is leased, or waits to come back."""

    topic: str
    partition: int
    offset: int
    lane: str
    deliveries: int
    state: LeaseState
    member: str | None
    # When the lease runs out, or the wait.
    when_ms: int


class LaneFacts(NamedTuple):
    """One lane of one partition, as a group sees it."""

    group: str
    topic: str
    partition: int
    lane: str
    ready: int
    inflight: int
    delivered: int
    delivered_per_s: float
    # None until there are two samples; and while more is ahead than the index of lanes can hold.
    arrived_per_s: float | None
    last_served_ms: int | None
    # Of the oldest record that is ready; None when none is.
    oldest_age_ms: int | None


class LaneTotals(NamedTuple):
    """One lane of all partitions of a topic, as a group sees it."""

    group: str
    topic: str
    lane: str
    ready: int
    inflight: int
    delivered: int


class ShareFacts(NamedTuple):
    """A topic that a group receives from."""

    group: str
    topic: str
    leased: int
    waiting: int
    # Returned or never given out.
    ready: int
    is_dead_lettering: bool


class BreakerFacts(NamedTuple):
    """The circuit breaker of a group: whether its failures are the records' own."""

    group: str
    # How long it has been open; None while it is closed.
    open_s: float | None
    openings: int


@dataclass(slots=True)
class DeliveryCounts:
    """Plain numbers for the metrics page, of one group."""

    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    nacked: int = 0
    rejected: int = 0
    released: int = 0
    extended: int = 0
    # Leases that ran out.
    timeouts: int = 0
    # Settlings that were refused.
    refused: int = 0
    # What became of those that failed for good.
    dead: int = 0
    dropped: int = 0
    parked: int = 0
    # Removed by retention before they were settled, or lost to damage.
    expired: int = 0
    lost: int = 0
