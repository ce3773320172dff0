"""What the journal of leases holds: events of ledgers, MessagePack arrays, one a record.

A ledger is what a group knows of one partition. Its number is its name in the journal; `State`
says whose it is, and replaces all that came before. Every other event says what is now, not what
changed, so one that a `State` has in it already may follow it and does no harm.

A state is written as a draft: `Drafted` events, in one append or in several with other events in
between, and then `Closed`. Until that is there the draft is not the ledger, and what came before
it holds; events in between are for both. A `State` outside of a draft is how it was once written,
and is good at once.

Runs are flat lists of whole numbers: first offset, count, and what the event has for each of them.
Times are milliseconds since 1970, because they are read after a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class OpenRecord(msgspec.Struct, array_like=True, frozen=True):
    """A record below the cursor that is not settled. It is leased when it has a nonce."""

    offset: int
    lane: int
    deliveries: int
    key: int = 0
    nonce: str = ""
    member: str | None = None
    # Of the lease, or the wait, when it began.
    duration_ms: int = 0
    # When the lease, or the wait for the next try, runs out.
    when_ms: int = 0
    first_failure_ms: int = 0
    last_failure_ms: int = 0
    error: str = ""


class State(msgspec.Struct, array_like=True, frozen=True, tag=0):
    ledger: int
    # The newest counts, when two journals have one of the same ledger.
    version: int
    group: str
    topic: bytes
    partition: int
    # One for all lanes, or one for each.
    cursors: list[int]


class Opens(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """What a state goes on with."""

    ledger: int
    records: list[OpenRecord]


class Granted(msgspec.Struct, array_like=True, frozen=True, tag=2):
    ledger: int
    nonce: str
    member: str | None
    duration_ms: int
    deadline_ms: int
    # As in `State`, after this grant.
    cursors: list[int]
    # First offset, count, deliveries, lane.
    runs: list[int]
    # Of each record, in a topic that keeps the order of keys; else empty.
    keys: list[int]
    # Offset, lane, key: passed by, because another record of their key is leased.
    held: list[int]


class Done(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Settled for good: acked, dead, dropped, parked or lost."""

    ledger: int
    # First offset, count.
    runs: list[int]


class Returned(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Given back, uncounted: ready again."""

    ledger: int
    # First offset, count, deliveries.
    runs: list[int]


class Retried(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Failed, and comes back."""

    ledger: int
    offset: int
    deliveries: int
    when_ms: int
    first_failure_ms: int
    last_failure_ms: int
    error: str
    # How long that is from when it was said.
    wait_ms: int


class Extended(msgspec.Struct, array_like=True, frozen=True, tag=6):
    ledger: int
    deadline_ms: int
    duration_ms: int
    # First offset, count.
    runs: list[int]


class Dropped(msgspec.Struct, array_like=True, frozen=True, tag=7):
    """There is no such ledger any more."""

    ledger: int


class Drafted(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Part of a newer state: an event, encoded. The first of them is a `State`."""

    ledger: int
    part: bytes


class Closed(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """The draft is whole: from now on it is the ledger."""

    ledger: int
    # How many parts it has, so that one that lost some to damage is noticed.
    parts: int


Event: TypeAlias = (
    State | Opens | Granted | Done | Returned | Retried | Extended | Dropped | Drafted | Closed
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Event).decode


def runs_of(offsets: Sequence[int]) -> list[int]:
    """First offset and count of each run of neighbours, for different offsets that rise."""
    if offsets and offsets[-1] - offsets[0] + 1 == len(offsets):
        return [offsets[0], len(offsets)]
    runs: list[int] = []
    last = -2
    for offset in offsets:
        if offset == last + 1:
            runs[-1] += 1
        else:
            runs += (offset, 1)
        last = offset
    return runs


def offsets_of(runs: list[int], width: int = 2) -> Iterator[tuple[int, int]]:
    """Each offset, with where its run begins in the list."""
    for at in range(0, len(runs), width):
        first = runs[at]
        for offset in range(first, first + runs[at + 1]):
            yield offset, at
