"""What a settle request says, checked and sorted: which record each part is of, and whether it may.

Each part has its own result, whatever the others say. A receipt is good while its lease is: until
then its record is found by offset, and must have the receipt's nonce and count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.delivery_values import (
    RECEIPT_BYTES_MAX,
    Settle,
    Settled,
    parse_receipt,
    whole_number,
)
from millstream.broker.ledger import LEASED, Grant, Ledger, Open
from millstream.broker.topic_settings import VISIBILITY_MS_MIN
from millstream.engine.pending import Pending
from millstream.errors import (
    MillstreamError,
    ParameterInvalid,
    ReceiptStale,
    ReceiptUnknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from millstream.broker.delivery_values import DeliveryOptions, Outcome, Receipt
    from millstream.broker.shares import Share, Shares


class Failed(NamedTuple):
    """A record that a worker gave up, and where its result belongs."""

    at: int
    one: Open
    settle: Settle


class Work:
    """What a request does to one ledger."""

    __slots__ = ("acked", "extended", "failed", "first", "ledger", "released", "share")

    def __init__(self, share: Share, ledger: Ledger) -> None:
        self.share = share
        self.ledger = ledger
        # Acks of records that were leased for the first time: by grant, index and offset.
        self.first: dict[Grant, tuple[list[int], list[int]]] = {}
        self.acked: list[tuple[int, Open]] = []
        self.released: list[tuple[int, Open]] = []
        self.extended: dict[int, list[tuple[int, Open]]] = {}
        self.failed: list[Failed] = []


class Request:
    """One settle request: done when each of its parts is."""

    __slots__ = ("_left", "pending", "results", "settles")

    def __init__(self, settles: Sequence[Settle]) -> None:
        self.settles = settles
        self.results: list[Settled | None] = [None] * len(settles)
        self.pending: Pending[list[Settled]] = Pending()
        self._left = 1

    def refuse(self, at: int, error: MillstreamError) -> None:
        self.results[at] = Settled(self.settles[at].receipt, None, 0, error)

    def say(self, at: int, outcome: Outcome, when_ms: int = 0) -> None:
        self.results[at] = Settled(self.settles[at].receipt, outcome, when_ms)

    def after(self, part: Pending[Any], done: Callable[[BaseException | None], None]) -> None:
        self._left += 1

        def one_done(one: Pending[Any]) -> None:
            try:
                done(one.error)
            finally:
                self.part_done()

        part.then(one_done)

    def part_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.pending.succeed([one for one in self.results if one is not None])

    def fail_parts(self, parts: Sequence[int], error: BaseException) -> None:
        for at in parts:
            if isinstance(error, MillstreamError):
                self.refuse(at, error)
            else:
                self.refuse(at, MillstreamError(f"settling failed: {error!r}"))


class _Taken:
    """Receipts that a request settles already. Acks are looked at first, and told apart later:
    hardly ever does anybody ask."""

    __slots__ = ("_acked", "_request", "receipts")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._acked: set[str] | None = None
        self.receipts: set[str] = set()

    def has(self, receipt: str) -> bool:
        if self._acked is None:
            results = self._request.results
            self._acked = {one.receipt for one in results if one is not None and one.error is None}
        return receipt in self.receipts or receipt in self._acked


def gather(shares: Shares, request: Request, group: str | None) -> Iterable[Work]:
    """What a request does to each ledger. Its records are busy from now on; what is wrong has its
    result already. With a group, receipts of others are refused."""
    works: dict[Ledger, Work] = {}
    found: tuple[str, str, Share] | None = None
    taken = _Taken(request)
    for at in _ack_first(shares, request, works, group):
        settle = request.settles[at]
        receipt = None
        try:
            receipt = parse_receipt(settle.receipt)
            if found is None or found[:2] != (receipt.group, receipt.topic):
                found = None
                share = _share(shares, receipt, settle, group)
                found = (receipt.group, receipt.topic, share)
            share = found[2]
            one, ledger = _open(share, receipt, settle)
            work = works.get(ledger)
            if work is None:
                work = works[ledger] = Work(share, ledger)
            _sort(shares.options, work, at, one, settle)
        except MillstreamError as error:
            is_twice = isinstance(error, ReceiptStale) and taken.has(settle.receipt)
            request.refuse(at, _twice(settle.receipt) if is_twice else error)
            crew = None if receipt is None else shares.crews.get(receipt.group)
            if crew is not None:
                crew.counts.refused += 1
            else:
                shares.refused += 1
            continue
        one.is_busy = True
        taken.receipts.add(settle.receipt)
    return works.values()


def _ack_first(
    shares: Shares, request: Request, works: dict[Ledger, Work], group: str | None
) -> list[int]:
    """Acks of records that were leased for the first time, nearly all there are. Answers the
    indexes of the others, also of all that is wrong."""
    rest: list[int] = []
    results = request.results
    # Of the grant that the last one was of: its receipts differ in nothing but the offset.
    before = after = ""
    grant: Grant | None = None
    open_: dict[int, Grant | Open] = {}
    acking: dict[int, Grant] = {}
    indexes: list[int] = []
    offsets: list[int] = []
    for at, settle in enumerate(request.settles):
        receipt = settle.receipt
        if settle.kind != "ack" or len(receipt) > RECEIPT_BYTES_MAX:
            rest.append(at)
            continue
        offset = _offset_between(receipt, before, after) if grant is not None else -1
        if grant is None or open_.get(offset) is not grant:
            # Of another grant; one answer may have some with the same nonce, one for each lane.
            share, grant = _first(shares, receipt, group)
            if share is None or grant is None:
                rest.append(at)
                continue
            ledger = grant.ledger
            before = f"{share.topic.name}:{ledger.partition}:"
            after = f":1:{grant.nonce}:{ledger.group}"
            open_, acking = ledger.open, ledger.acking
            work = works.get(ledger)
            if work is None:
                work = works[ledger] = Work(share, ledger)
            indexes, offsets = work.first.setdefault(grant, ([], []))
            offset = _offset_between(receipt, before, after)
            if open_.get(offset) is not grant:
                rest.append(at)
                continue
        acking[offset] = grant
        del open_[offset]
        indexes.append(at)
        offsets.append(offset)
        results[at] = Settled(receipt, "acked")
    return rest


def _offset_between(receipt: str, before: str, after: str) -> int:
    """As it was written; -1 for another spelling of the number, and for 0: those are looked at
    one by one."""
    if not (receipt.startswith(before) and receipt.endswith(after)):
        return -1
    text = receipt[len(before) : -len(after)]
    return int(text) if text.isdecimal() and text.isascii() and text >= "1" else -1


def _first(shares: Shares, receipt: str, group: str | None) -> tuple[Share | None, Grant | None]:
    """The share and the grant of a record that is leased for the first time."""
    parts = receipt.split(":", 5)
    if len(parts) != 6 or parts[3] != "1" or group not in {None, parts[5]}:
        return None, None
    share = shares.find(parts[5], parts[0])
    number, offset = whole_number(parts[1]), whole_number(parts[2])
    if share is None or number is None or offset is None or number >= len(share.ledgers):
        return None, None
    grant = share.ledgers[number].open.get(offset)
    if isinstance(grant, Grant) and grant.is_noted and grant.nonce == parts[4]:
        return share, grant
    return None, None


def _share(shares: Shares, receipt: Receipt, settle: Settle, group: str | None) -> Share:
    share = shares.find(receipt.group, receipt.topic)
    if share is None or (group is not None and group != receipt.group):
        raise _unknown(settle.receipt)
    return share


def _open(share: Share, receipt: Receipt, settle: Settle) -> tuple[Open, Ledger]:
    if receipt.partition >= len(share.ledgers):
        raise _unknown(settle.receipt)
    ledger = share.ledgers[receipt.partition]
    one = ledger.open.get(receipt.offset)
    if isinstance(one, Grant) and one.is_noted and one.nonce == receipt.nonce:
        one = ledger.find(receipt.offset)
    if one is None or isinstance(one, Grant):
        # Another's, or nobody's any more.
        if receipt.offset < max(ledger.cursors) and (one is None or receipt.deliveries <= 2):
            raise _stale(settle.receipt)
        raise _unknown(settle.receipt)
    grant = one.grant
    # A release takes the count back, so a receipt may have one more than the record has now.
    if receipt.deliveries > one.deliveries + 1:
        raise _unknown(settle.receipt)
    is_its_own = (
        grant is not None
        and one.state == LEASED
        and one.deliveries == receipt.deliveries
        and grant.nonce == receipt.nonce
    )
    if one.is_busy or not is_its_own:
        raise _stale(settle.receipt)
    return one, ledger


def _sort(options: DeliveryOptions, work: Work, at: int, one: Open, settle: Settle) -> None:
    match settle.kind:
        case "ack":
            work.acked.append((at, one))
        case "release":
            work.released.append((at, one))
        case "extend":
            assert one.grant is not None
            duration_ms = settle.visibility_ms
            if duration_ms is None:
                duration_ms = one.grant.duration_ms
            check_visibility(duration_ms, options.visibility_max_ms)
            work.extended.setdefault(duration_ms, []).append((at, one))
        case "nack" | "reject":
            check_delay(settle.delay_ms, options.retry_delay_max_ms)
            work.failed.append(Failed(at, one, settle))


def check_delay(delay_ms: int | None, most_ms: int) -> None:
    if delay_ms is not None and not 0 <= delay_ms <= most_ms:
        raise ParameterInvalid(
            f"a delay is 0 to {most_ms} ms, not {delay_ms}", parameter="delay_ms"
        )


def check_visibility(duration_ms: int, most_ms: int) -> None:
    if not VISIBILITY_MS_MIN <= duration_ms <= most_ms:
        raise ParameterInvalid(
            f"a visibility timeout is {VISIBILITY_MS_MIN} to {most_ms} ms, not {duration_ms}",
            parameter="visibility_ms",
        )


def _stale(receipt: str) -> ReceiptStale:
    return ReceiptStale(
        "the lease ran out or was settled; the record may be somebody else's now", receipt=receipt
    )


def _twice(receipt: str) -> ReceiptStale:
    return ReceiptStale(
        "the receipt is twice in one request; its other settling was taken, so leave this one out",
        receipt=receipt,
    )


def _unknown(receipt: str) -> ReceiptUnknown:
    return ReceiptUnknown("nobody in this group was given such a receipt", receipt=receipt)
