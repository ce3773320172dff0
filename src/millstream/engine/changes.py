"""Topics are made, changed and deleted one after the other, in the order that it was asked for.

What is made on the disk is made in a thread, and taken in when it is there. Deleting waits until
no append and no sync is under way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import structlog

from millstream.engine.commit import as_known
from millstream.engine.pending import Pending
from millstream.errors import EngineStopped, MillstreamError, StorageFailed
from millstream.log.store import new_uuid

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.clock import Clock
    from millstream.engine.commit import Committer
    from millstream.engine.scheduler import Scheduler
    from millstream.engine.upkeep import Upkeep
    from millstream.log.growth import Growth
    from millstream.log.partition import PartitionSettings
    from millstream.log.store import Store, Topic

T = TypeVar("T")


class Changes:
    __slots__ = (
        "_clock",
        "_committer",
        "_is_changing",
        "_is_closed",
        "_scheduler",
        "_store",
        "_upkeep",
        "_waiting",
    )

    def __init__(
        self,
        store: Store,
        committer: Committer,
        upkeep: Upkeep,
        clock: Clock,
        scheduler: Scheduler,
    ) -> None:
        self._store = store
        self._committer = committer
        self._upkeep = upkeep
        self._clock = clock
        self._scheduler = scheduler
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_changing = False
        self._is_closed = False

    def is_idle(self) -> bool:
        return not self._is_changing and not self._waiting

    def close(self) -> None:
        """What waits is refused; what a thread is at work on is not taken in any more."""
        self._is_closed = True
        self._next()

    def create(
        self, name: str, partitions: int, settings: PartitionSettings, uuid: bytes | None
    ) -> Pending[Topic]:
        def start(pending: Pending[Topic]) -> None:
            now_ms = self._clock.wall_ms()
            growth = self._store.new_topic(name, uuid or new_uuid(), partitions, settings, now_ms)
            self._grow(growth, pending, pending.succeed)

        return self._in_turn(start)

    def alter(
        self, name: str, settings: PartitionSettings | None, partitions: int | None
    ) -> Pending[Topic]:
        def start(pending: Pending[Topic]) -> None:
            if partitions is None:
                change(pending, self._store.topic(name))
                return
            growth = self._store.more_partitions(name, partitions, self._clock.wall_ms())
            self._grow(growth, pending, lambda topic: change(pending, topic))

        def change(pending: Pending[Topic], topic: Topic) -> None:
            if settings is None:
                pending.succeed(topic)
                return
            self._committer.between_rounds(
                lambda: self._settle(pending, lambda: self._store.alter_topic(name, settings))
            )

        return self._in_turn(start)

    def delete(self, name: str, forgotten: Callable[[], None]) -> Pending[None]:
        """`forgotten` is called when the topic is gone for all who ask."""

        def forget() -> None:
            gone = self._store.forget_topic(name)
            self._scheduler.background(
                lambda: self._store.remove_topic_files(gone),
                lambda _, error: _note_left(gone, error),
            )
            forgotten()

        def start(pending: Pending[None]) -> None:
            def between() -> None:
                # A thread may be at work on the files.
                if self._upkeep.after_syncs(lambda: self._committer.between_rounds(between)):
                    self._settle(pending, forget)

            self._committer.between_rounds(between)

        return self._in_turn(start)

    def _in_turn(self, start: Callable[[Pending[T]], None]) -> Pending[T]:
        """Call `start` when what was asked for before is done."""
        pending: Pending[T] = Pending()

        def begin() -> None:
            pending.then(self._ended)
            try:
                self._require_writable()
                start(pending)
            except (MillstreamError, OSError) as error:
                self._fail(pending, error)

        self._waiting.append(begin)
        self._next()
        return pending

    def _next(self) -> None:
        if self._waiting and not self._is_changing:
            self._is_changing = True
            self._waiting.popleft()()

    def _ended(self, _: Pending[T]) -> None:
        self._is_changing = False
        # Those who are told of this one come first.
        self._scheduler.soon(self._next)

    def _grow(self, growth: Growth, pending: Pending[Topic], then: Callable[[Topic], None]) -> None:
        def done(_: None, error: BaseException | None) -> None:
            if self._is_closed:
                growth.close()
                pending.fail(_stopped())
                return
            topic = self._store.take_in(growth)
            if error is None:
                then(topic)
            else:
                self._fail(pending, error)

        self._scheduler.background(growth.run, done)

    def _settle(self, pending: Pending[T], call: Callable[[], T]) -> None:
        try:
            self._require_writable()
            result = call()
        except (MillstreamError, OSError) as error:
            self._fail(pending, error)
        else:
            pending.succeed(result)

    def _require_writable(self) -> None:
        if self._is_closed:
            raise _stopped()
        if self._committer.failure is not None:
            raise StorageFailed(f"the broker stopped writing ({self._committer.failure})")

    def _fail(self, pending: Pending[T], error: BaseException) -> None:
        if isinstance(error, OSError):
            problem = f"changing the data directory failed: {error}"
            error = as_known(error) or StorageFailed(problem)
        if isinstance(error, StorageFailed):
            self._committer.fail(error.message)
        pending.fail(error)


def _stopped() -> EngineStopped:
    return EngineStopped("the log is not open; the broker is starting or stopping")


def _note_left(path: str, error: BaseException | None) -> None:
    if error is not None:
        structlog.get_logger("millstream.engine").warning(
            "files left for the next start", path=path, error=str(error)
        )
