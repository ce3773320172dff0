"""A member at work: its session, and the reading that a poll does.

Partitions take turns: a poll begins behind the partition that was served last, so that a busy one
does not keep others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from millstream.broker.group_values import OffsetReset, Polled, PolledPart
from millstream.broker.positions import Positions
from millstream.engine.pending import Pending
from millstream.errors import MillstreamError, OffsetOutOfRange, TopicUnknown

if TYPE_CHECKING:
    from millstream.broker.membership import Member
    from millstream.broker.reading import Reader
    from millstream.broker.topic_patterns import TopicPattern
    from millstream.broker.wheel import Timer
    from millstream.log.partition import PartitionId

T = TypeVar("T")


class Polling(Generic[T]):
    """One poll, or receive, under way. Cancel it when the client went away: then nothing of it
    counts as given, not even when it was answered already."""

    __slots__ = ("_gate", "_give_back", "has_waited", "is_over", "pending")

    def __init__(self, give_back: Callable[[Polling[T]], None]) -> None:
        """`give_back` is told of this one when it was answered and nobody is there. It must not
        hold this one: what a poll gave would stay in memory until somebody looks for cycles."""
        self.pending: Pending[T] = Pending()
        # It was ended from outside and has only to answer, without records.
        self.is_over = False
        # It may have taken long, so whoever asked may have gone.
        self.has_waited = False
        self._gate: Pending[None] | None = None
        self._give_back = give_back

    @classmethod
    def failed(cls, error: MillstreamError) -> Polling[T]:
        polling = cls(lambda _: None)
        polling.pending.fail(error)
        return polling

    def cancel(self) -> None:
        if self.pending.is_done:
            if self.pending.error is None:
                self._give_back(self)
        else:
            self.end()

    def end(self) -> None:
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Look again: something changed."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.succeed(None)

    def wait(self) -> Pending[None]:
        self.has_waited = True
        self._gate = Pending()
        return self._gate


@dataclass(slots=True, eq=False)
class Session:
    """What is known of a member besides what belongs to it; gone with the process."""

    member: Member
    timeout_ms: int
    auto_offset_reset: OffsetReset
    # None when the member commits by itself.
    auto_commit_s: float | None
    # On the monotonic clock.
    last_call: float
    last_commit: float
    positions: Positions = field(default_factory=Positions)
    polling: Polling[Polled] | None = None
    # Where the next poll begins among its partitions.
    turn: PartitionId | None = None
    timer: Timer | None = None
    commit_timer: Timer | None = None
    revoke_timer: Timer | None = None
    # How often something was written that the next answer depends on, and how much of that is
    # known to be durable.
    pins: int = 0
    pins_settled: int = 0
    # Of a Kafka client: where it called from.
    host: str = ""
    # The topics that it named, and a pattern of more. The member has all of them.
    named: frozenset[str] = frozenset()
    pattern: TopicPattern | None = None
    # How long it may take to give up partitions; None is what the settings say.
    rebalance_timeout_ms: int | None = None
    # A static member that said good-bye: its partitions wait for it.
    has_left: bool = False
    is_gone: bool = False

    def in_turn(self) -> list[PartitionId]:
        """Its partitions, the one whose turn it is first."""
        ids = sorted(self.member.owned)
        turn = self.turn
        if turn is None or len(ids) < 2:
            return ids
        return [one for one in ids if one > turn] + [one for one in ids if one <= turn]


def read(
    session: Session,
    reader: Reader,
    count_max: int,
    bytes_max: int,
    out_of_range: Callable[[PartitionId], None],
) -> Generator[Pending[Any], Any, list[PolledPart]]:
    """What there is for a member now. A partition that cannot be read fails the poll only when no
    other has anything to give."""
    parts: list[PolledPart] = []
    failure: MillstreamError | None = None
    positions = session.positions
    for id in session.in_turn():
        if id not in positions or id not in session.member.owned:
            continue
        offset = positions[id]
        try:
            start, end = reader.offsets(id.topic, id.number)
            if not start <= offset <= end:
                out_of_range(id)
                if id not in positions:
                    continue
                offset = positions[id]
            if offset == end:
                continue
            fetched = yield reader.fetch(id.topic, id.number, offset, count_max, bytes_max)
        except (TopicUnknown, OffsetOutOfRange):
            # It changed under our feet: the next look is at what is there then.
            continue
        except MillstreamError as error:
            failure = failure or error
            continue
        if id not in positions or positions[id] != offset:
            continue
        if not fetched.records:
            positions.skip(id, fetched.next_offset)
            continue
        parts.append(PolledPart(*id, fetched.records, fetched.next_offset, fetched.high_watermark))
        session.turn = id
        count_max -= len(fetched.records)
        bytes_max -= sum(map(_size, fetched.records))
        if count_max <= 0 or bytes_max <= 0:
            break
    if failure is not None and not parts:
        raise failure
    return parts


def _size(record: Any) -> int:
    return len(record.key or b"") + len(record.value or b"")


def wait_for_more(
    session: Session, polling: Polling[Polled], reader: Reader, seconds: float
) -> Generator[Pending[Any], Any, None]:
    """Until there may be something to read, or something changed, or the time is over."""
    gate = polling.wait()
    positions = session.positions
    ids = {id: positions[id] for id in session.member.owned if id in positions}
    waiting = reader.wait_any(ids, seconds)
    waiting.pending.then(lambda _: polling.wake())
    yield gate
    waiting.cancel()
