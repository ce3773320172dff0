"""Fetch sessions: what a client asks of each partition is remembered, so that it need say only what
changed, and is told only what changed.

A session has an id and an epoch, which rises with each fetch. Epoch 0 opens one, with all its
partitions; -1 asks once, with all partitions, and closes the session that it names. A client whose
session is gone is told so, and opens another; so sessions may be dropped at any time.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple

from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.fetch import (
    FINAL_EPOCH,
    FIRST_EPOCH,
    NO_OFFSET,
    NO_SESSION,
)
from millstream.wire.kafka.primitives import ITEMS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.wire.kafka.fetch import Given, Part, Request

# Kafka's own count of sessions; and of partitions in all of them, each about 400 bytes. The session
# that was used least recently goes first.
SESSIONS_MAX = 1000
PARTITIONS_MAX = 200_000
# Of one session: what a client may ask for at once.
SESSION_PARTITIONS_MAX = ITEMS_MAX
ID_MAX = 2**31 - 1


class _Known(NamedTuple):
    """A partition in a session: what is asked of it, and what was said of it last."""

    part: Part
    high_watermark: int = NO_OFFSET
    start_offset: int = NO_OFFSET


class Session:
    """What one fetch asks. `id` goes into its answer; only those with one are kept."""

    __slots__ = ("_known", "epoch", "id")

    def __init__(self, id: int) -> None:
        self.id = id
        self.epoch = 1
        self._known: dict[tuple[str, int], _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def update(self, request: Request) -> None:
        known = self._known
        for name, numbers in request.forgotten:
            for number in numbers:
                known.pop((name, number), None)
        for name, parts in request.topics:
            for part in parts:
                before = known.get((name, part.number))
                known[name, part.number] = (
                    _Known(part) if before is None else before._replace(part=part)
                )

    def parts(self) -> list[tuple[str, Part]]:
        return [(name, one.part) for (name, _), one in self._known.items()]

    def answer(
        self, given: list[tuple[str, Given]], *, is_whole: bool
    ) -> list[tuple[str, list[Given]]]:
        """By topic; unless all of it is to be told, without those of which there is nothing new.
        Several fetches of a session may be under way, so each says that for itself."""
        topics: dict[str, list[Given]] = {}
        known = self._known
        for name, one in given:
            before = known.get((name, one.number))
            if before is not None and self.id:
                said = (before.high_watermark, before.start_offset)
                is_news = said != (one.high_watermark, one.start_offset)
                if not is_whole and not (one.records or one.code or is_news):
                    continue
                if one.records:
                    # Others come first next time, so that one busy partition starves nobody.
                    del known[name, one.number]
                known[name, one.number] = _Known(before.part, one.high_watermark, one.start_offset)
            topics.setdefault(name, []).append(one)
        return list(topics.items())


def is_whole(request: Request) -> bool:
    """Whether a fetch wants to be told of all its partitions."""
    return request.session_epoch in (FIRST_EPOCH, FINAL_EPOCH)


class Sessions:
    """The sessions of a listener, the one used last at the end."""

    __slots__ = ("_by_id", "_partitions", "_random")

    def __init__(self, random: Callable[[int], int] = secrets.randbelow) -> None:
        self._random = random
        self._by_id: dict[int, Session] = {}
        self._partitions = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, request: Request) -> Session | Code:
        """The session of a fetch, brought up to date; or why there is none."""
        id, epoch = request.session_id, request.session_epoch
        if is_whole(request):
            if id != NO_SESSION:
                self._drop(id)
            session = Session(self._new_id() if epoch == FIRST_EPOCH else NO_SESSION)
            session.update(request)
            if session.id:
                self._keep(session)
            return session
        found = self._by_id.pop(id, None)
        if found is None:
            return Code.FETCH_SESSION_ID_NOT_FOUND
        if epoch != found.epoch:
            self._by_id[id] = found
            return Code.INVALID_FETCH_SESSION_EPOCH
        self._partitions -= len(found)
        found.update(request)
        if len(found) > SESSION_PARTITIONS_MAX:
            # It begins anew, and says all that it wants at once.
            return Code.FETCH_SESSION_ID_NOT_FOUND
        found.epoch = epoch + 1 if epoch < ID_MAX else 1
        self._keep(found)
        return found

    def _keep(self, session: Session) -> None:
        """One that is larger than all may be together is not kept; its client will be told."""
        self._by_id[session.id] = session
        self._partitions += len(session)
        while len(self._by_id) > SESSIONS_MAX or self._partitions > PARTITIONS_MAX:
            self._drop(next(iter(self._by_id)))

    def _drop(self, id: int) -> None:
        session = self._by_id.pop(id, None)
        if session is not None:
            self._partitions -= len(session)

    def _new_id(self) -> int:
        while True:
            id = 1 + self._random(ID_MAX)
            if id not in self._by_id:
                return id
