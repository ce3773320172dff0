"""A member of a consumer group, as an async iterator of records.

Three tasks work beside the caller's handler: one polls ahead, into a buffer that is bounded; one
sends heartbeats, so that a handler may take as long as it needs; one commits from time to time. A
record is done when the caller asks for the next one: only then may its offset be committed. So a
record whose handler fails is delivered again, here or elsewhere, and none is skipped.

When the group gives a partition to another member, this one gives it up in order: records that wait
are dropped, the one in the caller's hands is waited for, what is done is committed, and only then
does the broker hear that the partition is free. Partitions that stay are read on all the while.

When a topic is deleted, all that this member has of it is forgotten: records, and offsets that are
done. So they never count in a topic that is made again under the same name. The other topics go on.

When the broker forgot this member (it was restarted, or the session ended), it joins again and goes
on from the committed offsets, in those of its topics that there are.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, NamedTuple, Self

from millstream.client.membership import (
    Joined,
    JoinOptions,
    Membership,
    Standing,
    TopicPartition,
)
from millstream.client.transport import Transport
from millstream.client.values import Received
from millstream.errors import (
    ClientClosed,
    MemberUnknown,
    MillstreamError,
    ParameterInvalid,
    PartitionNotAssigned,
    PartitionUnknown,
    StaleGeneration,
    TopicUnknown,
)
from millstream.wire.retry import RetryPolicy

# How long the broker holds a poll while there is nothing.
POLL_S = 20.0
# How long a goodbye may take.
LEAVE_S = 5.0
# A commit is a write to disk: without a pause it would be all that is done.
COMMIT_INTERVAL_S_MIN = 0.01
_COMMITS = ("auto", "manual")
# Of a commit in a topic that went, or was made again, before this member has heard of it.
_GONE = (PartitionNotAssigned, PartitionUnknown, TopicUnknown)


class ConsumerStatistics(NamedTuple):
    member_id: str
    generation: int
    buffered: int  # fetched and not yet asked for
    received: int
    committed: int  # offsets, not records
    joins: int


class Consumer:
    """Made by `AsyncClient.consumer`; joins when it is entered, and leaves when it is left."""

    def __init__(
        self,
        transport: Transport,
        group: str,
        options: JoinOptions,
        *,
        commit: Literal["auto", "manual"] = "auto",
        commit_interval_s: float = 5.0,
        poll_records: int = 500,
        buffer_records: int = 1000,
        patience_s: float = math.inf,
    ) -> None:
        _check(
            commit=commit,
            commit_interval_s=commit_interval_s,
            poll_records=poll_records,
            buffer_records=buffer_records,
            patience_s=patience_s,
        )
        retry = RetryPolicy(timeout_s=patience_s)
        self._membership = Membership(transport, group, retry)
        self._options = options
        self._is_auto = commit == "auto"
        self._commit_interval_s = commit_interval_s
        self._poll_records = poll_records
        self._buffer_records = buffer_records
        # Where the group stands: the generation that polls and heartbeats use, and the newest
        # that was heard, which commits use, for they give nothing up.
        self._member_id: str | None = None
        self._generation = -1
        self._newest: Standing | None = None
        self._assignment: frozenset[TopicPartition] = frozenset()
        # What it has, with the generation in which it heard so. An answer of before is about
        # another topic of that name, or about a time when it had the partition earlier.
        self._since: dict[TopicPartition, int] = {}
        # Records on their way to the caller, those in its hands, and offsets that are done. All
        # of them are of partitions that it has.
        self._buffer: deque[Received] = deque()
        self._in_hand: list[Received] = []
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._arrived = asyncio.Event()
        self._handed_back = asyncio.Event()
        self._room = asyncio.Event()
        # Of the last answer to a poll that came through.
        self._number = 0
        self._error: Exception | None = None
        self._is_closed = False
        self._lost = asyncio.Event()
        # The session ended with records taken that were not committed, and none was taken since.
        self._has_lost = False
        self._committing = asyncio.Lock()
        self._giving_up: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._received = self._commits = self._joins = 0

    # ---- for callers

    async def __aenter__(self) -> Self:
        joined = await self._membership.join(self._options, None)
        self._take_seat(joined)
        self._task = asyncio.get_running_loop().create_task(self._run(joined))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        # A loop that was left in the ordinary way has done what it had in hand.
        await self.close(is_done=kind is None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        taken = await self._take(1, None)
        if not taken:
            raise StopAsyncIteration
        return taken[0]

    async def take(self, count_max: int = 500, *, timeout_s: float | None = None) -> list[Received]:
        """Up to so many records together; those taken before are done. None come when the time
        is up, or when the consumer was closed."""
        return await self._take(count_max, timeout_s)

    async def commit(self) -> None:
        """Commit all that was taken, with what is in the caller's hands. Durable when it
        returns. What was taken from a topic that is gone is not committed anywhere. When the
        session ended since, nothing that was taken before can be committed, and comes again: that
        is MemberUnknown, until the next record is taken."""
        self._finish()
        if self._has_lost:
            raise MemberUnknown(
                f"the session of group {self._membership.group} ended before what was taken could "
                "be committed; it is delivered again",
                group=self._membership.group,
            )
        await self._commit_what_is_left()

    async def close(self, *, is_done: bool = True) -> None:
        """Commit what is done, and leave the group, so that others take over at once."""
        if self._is_closed:
            return
        self._is_closed = True
        if is_done:
            self._finish()
        else:
            self._in_hand = []
        for task in (self._task, self._giving_up):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        # What cannot be said in time is learnt when the session ends.
        with suppress(MillstreamError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._say_goodbye()
        self._arrived.set()

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that it reads now."""
        return self._assignment

    def statistics(self) -> ConsumerStatistics:
        return ConsumerStatistics(
            self._member_id or "",
            self._generation,
            len(self._buffer),
            self._received,
            self._commits,
            self._joins,
        )

    # ---- records

    async def _take(self, count_max: int, timeout_s: float | None) -> list[Received]:
        self._finish()
        if not self._buffer:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not (self._buffer or self._is_closed or self._error):
                        self._arrived.clear()
                        await self._arrived.wait()
            if self._error is not None and not self._buffer:
                raise self._error
        count = min(count_max, len(self._buffer))
        taken = [self._buffer.popleft() for _ in range(count)]
        self._in_hand = taken
        if taken:
            self._has_lost = False
        self._received += count
        if len(self._buffer) <= self._buffer_records // 2:
            self._room.set()
        return taken

    def _finish(self) -> None:
        """What the caller had in hand is done."""
        for record in self._in_hand:
            self._done[_place(record)] = record.offset + 1
        self._in_hand = []
        self._handed_back.set()

    # ---- membership

    async def _run(self, joined: Joined) -> None:
        """Be a member, again and again, until closed or until an error that staying in the group
        cannot mend."""
        try:
            while True:
                await self._be_member(joined)
                joined = await self._join_again()
                self._take_seat(joined)
        except Exception as error:  # noqa: BLE001  the caller is told, whatever it is
            self._error = error
            self._arrived.set()

    async def _be_member(self, joined: Joined) -> None:
        """Until the broker does not know this member any more."""
        self._lost.clear()
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._poll_ahead(),
                self._send_heartbeats(joined.heartbeat_s),
                self._commit_now_and_then(),
                self._lost.wait(),
            )
        ]
        try:
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _join_again(self) -> Joined:
        """With the old id, which keeps what it has; without, when the broker does not know it."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            with suppress(asyncio.CancelledError):
                await self._giving_up
        options = self._options
        while True:
            try:
                try:
                    return await self._membership.join(options, self._member_id)
                except MemberUnknown:
                    return await self._membership.join(options, None)
            except TopicUnknown as error:
                left = tuple(one for one in options.topics if one != error.fields.get("topic"))
                if not left or left == options.topics:
                    raise
                options = options._replace(topics=left)

    def _take_seat(self, joined: Joined) -> None:
        """From here on the broker's committed offsets count: nothing of before is committed."""
        standing = joined.standing
        self._joins += 1
        self._member_id = standing.member_id
        self._generation = standing.generation
        self._newest = standing
        self._assignment = standing.assignment
        self._since = dict.fromkeys(standing.held, standing.generation)
        self._has_lost = self._has_lost or bool(self._in_hand) or self._has_news()
        self._buffer.clear()
        self._in_hand = []
        self._done.clear()
        self._committed.clear()
        self._number = 0

    def _heard(self, standing: Standing) -> None:
        """Follow the group: at once when there is nothing to give up."""
        if self._newest is not None and standing.generation < self._newest.generation:
            return
        self._forget_what_went(standing)
        self._newest = standing
        # Of what it is to give up, it reads what it still holds.
        self._assignment = standing.assignment | (self._assignment & standing.revoking)
        if self._giving_up is not None:
            return
        if standing.revoking & self._assignment:
            task = asyncio.get_running_loop().create_task(self._give_up())
            self._giving_up = task
            task.add_done_callback(self._gave_up)
        else:
            self._generation = standing.generation

    def _forget_what_went(self, standing: Standing) -> None:
        """Nothing of a topic that was deleted may be taken for one that was made again."""
        before = self._newest
        if before is None or standing == before:
            return
        held = standing.held
        gone = {
            one
            for one in self._since
            if one not in held or standing.topic_ids.get(one[0]) != before.topic_ids.get(one[0])
        }
        if gone:
            self._in_hand = [one for one in self._in_hand if _place(one) not in gone]
            self._drop(gone)
            self._assignment -= gone
            # Nobody waits any longer for what was in hand.
            self._handed_back.set()
        for one in held - self._since.keys():
            self._since[one] = standing.generation

    def _drop(self, partitions: Iterable[TopicPartition]) -> None:
        """All that waits in them, and all that is known of them."""
        parting = frozenset(partitions)
        self._buffer = deque(one for one in self._buffer if _place(one) not in parting)
        for one in parting:
            self._done.pop(one, None)
            self._committed.pop(one, None)
            self._since.pop(one, None)

    async def _give_up(self) -> None:
        while self._newest is not None and self._newest.revoking & self._assignment:
            parting = self._newest.revoking & self._assignment
            self._assignment -= parting
            self._buffer = deque(one for one in self._buffer if _place(one) not in parting)
            while self._holds(parting):
                self._handed_back.clear()
                await self._handed_back.wait()
            if self._is_auto:
                await self._commit_what_is_left(parting)
            # What was made again in the meantime is read anew.
            self._drop(parting - self._assignment)
        assert self._newest is not None
        self._generation = self._newest.generation
        # A call with the new generation is what tells the broker.
        assert self._member_id is not None
        self._heard(await self._membership.heartbeat(self._member_id, self._generation))

    def _gave_up(self, task: asyncio.Task[None]) -> None:
        if self._giving_up is task:
            self._giving_up = None
        if task.cancelled():
            return
        if task.exception() is not None:
            # Whatever it was, joining again brings this member and the group together.
            self._lost.set()
        elif self._newest is not None:
            self._heard(self._newest)

    def _holds(self, partitions: Iterable[TopicPartition]) -> bool:
        return not {_place(record) for record in self._in_hand}.isdisjoint(partitions)

    # ---- what goes on beside the handler

    async def _poll_ahead(self) -> None:
        while True:
            while len(self._buffer) >= self._buffer_records:
                self._room.clear()
                await self._room.wait()
            generation = self._generation
            assert self._member_id is not None
            try:
                polled = await self._membership.poll(
                    self._member_id,
                    generation,
                    received=self._number,
                    limit=self._poll_records,
                    wait_s=POLL_S,
                )
            except StaleGeneration:
                # Unless another call has moved on in the meantime, the group went on without us.
                if generation == self._generation:
                    return
                continue
            except MemberUnknown:
                return
            self._number = polled.number
            self._heard(polled.standing)
            told = polled.standing.generation
            current = {one for one in self._assignment if self._since[one] <= told}
            self._buffer.extend(one for one in polled.records if _place(one) in current)
            if self._buffer:
                self._arrived.set()

    async def _send_heartbeats(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            generation = self._generation
            assert self._member_id is not None
            try:
                self._heard(await self._membership.heartbeat(self._member_id, generation))
            except StaleGeneration:
                if generation == self._generation:
                    return
            except MemberUnknown:
                return

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._commit_interval_s)
            if self._is_auto and self._giving_up is None:
                try:
                    await self._commit_what_is_left()
                except (MemberUnknown, StaleGeneration):
                    return

    async def _commit_what_is_left(self, among: frozenset[TopicPartition] | None = None) -> None:
        """All that is done, or what is done among these. A commit is kept whole or not at all, so
        a topic that is gone would keep others from being committed: then each goes by itself."""
        try:
            await self._commit(among)
        except _GONE:
            for topic in {topic for topic, _ in self._done}:
                with suppress(*_GONE):
                    done = frozenset(one for one in self._done if one[0] == topic)
                    await self._commit(done if among is None else done & among)

    async def _commit(self, among: frozenset[TopicPartition] | None) -> None:
        """One at a time: an older one that is tried again must not undo a newer one."""
        async with self._committing:
            # Together with the generation, so that the broker can tell which topic is meant.
            news = {
                one: offset
                for one, offset in self._done.items()
                if (among is None or one in among) and offset > self._committed.get(one, -1)
            }
            if not news:
                return
            if self._member_id is None or self._newest is None:
                raise ClientClosed("the consumer has not joined its group yet")
            generation = self._newest.generation
            since = {one: self._since[one] for one in news}
            await self._membership.commit(self._member_id, generation, news)
            self._committed |= {
                one: offset for one, offset in news.items() if self._since.get(one) == since[one]
            }
            self._commits += len(news)

    def _has_news(self) -> bool:
        return any(at > self._committed.get(one, -1) for one, at in self._done.items())

    async def _say_goodbye(self) -> None:
        if self._is_auto:
            with suppress(MillstreamError):
                await self._commit_what_is_left()
        if self._member_id is not None and self._newest is not None:
            retry = RetryPolicy(timeout_s=LEAVE_S)
            await self._membership.leave(self._member_id, self._newest.generation, retry)


def _check(
    *,
    commit: str,
    commit_interval_s: float,
    poll_records: int,
    buffer_records: int,
    patience_s: float,
) -> None:
    if commit not in _COMMITS:
        raise ParameterInvalid(
            f"commit is {commit!r}; it must be one of {', '.join(_COMMITS)}", parameter="commit"
        )
    for name, number, least in (
        ("poll_records", poll_records, 1),
        ("buffer_records", buffer_records, 1),
        ("commit_interval_s", commit_interval_s, COMMIT_INTERVAL_S_MIN),
        ("patience_s", patience_s, 0),
    ):
        if not number >= least:
            raise ParameterInvalid(
                f"{name} is {number}; it must be at least {least}", parameter=name
            )


def _place(record: Received) -> TopicPartition:
    return record.topic, record.partition
