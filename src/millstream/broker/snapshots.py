"""Queues that outlive a restart: persisted on request, at intervals and at the stop.

What is written is one instant of a queue: its contents are copied on the loop, which copies
references and no bytes, and are encoded and written in a thread while the queue goes on. One file
is written or read at a time, so that whatever clients ask for, one queue at most is held twice.

Snapshots that the broker makes by itself lie in a folder of their own. It mirrors the queues there
are: a queue that is gone takes its file with it, which must not happen to a file that somebody
asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from millstream.broker.queues import Contents, check_queue_name, queue_full
from millstream.errors import MillstreamError, QueueUnknown
from millstream.log.snapshot import Facts, Snapshot, check_file_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.queues import Queue, Queues
    from millstream.log.snapshot import RoomCheck

Result = TypeVar("Result")

SUFFIX = ".snapshot"
# In the names of the broker's own files, a longer queue name is replaced by its digest.
PLAIN_NAME_MAX = 200


class Folder(Protocol):
    """Where snapshots lie; every call waits for a disk."""

    def names(self) -> list[str]: ...

    def write(self, name: str, snapshot: Snapshot) -> int: ...

    def read(self, name: str, check_room: RoomCheck) -> Snapshot: ...

    def remove(self, name: str) -> None: ...

    def set_aside(self, name: str) -> str: ...


class Done(NamedTuple):
    """What a persist or a load did."""

    file: str
    queue_name: str
    messages: int
    bytes: int
    # Of the file; 0 for a load.
    file_bytes: int = 0


class Refused(NamedTuple):
    """A file that could not be loaded at start, and under which name it is kept."""

    file: str
    kept_as: str
    why: str


class Snapshots:
    """Persist and load, for one broker."""

    def __init__(self, queues: Queues, asked: Folder, own: Folder) -> None:
        """`asked` has what users persist; `own` is the broker's."""
        self._queues = queues
        self._asked = asked
        self._own = own
        self._turn = asyncio.Lock()
        # One thread of its own: a request that is cancelled leaves its work running, and the next
        # must not run beside it.
        self._thread = ThreadPoolExecutor(1, "snapshots")
        # What the broker's own files hold, by file, so that a queue at rest is not written again.
        self._written: dict[str, object] = {}
        self._has_restored = False

    # ---- on request

    async def persist(self, name: str, file: str | None) -> Done:
        """Write what the queue holds now. SnapshotInvalid for a name that leads elsewhere."""
        file = file if file is not None else name + SUFFIX
        check_file_name(file)
        self._queues.get(name)
        async with self._turn:
            return await self._write(self._asked, file, self._queues.get(name))

    async def load(self, name: str, file: str | None) -> Done:
        """Replace what the queue holds by what the file holds, or leave it as it is and raise. A
        queue that is not there is made, with the limits that it had when it was persisted."""
        check_queue_name(name)
        file = file if file is not None else name + SUFFIX
        check_file_name(file)
        async with self._turn:
            return await self._read(self._asked, file, name)

    # ---- by the broker itself

    async def restore(self) -> tuple[list[Done], list[Refused]]:
        """Load the broker's own snapshots. What cannot be loaded is kept under another name."""
        done, refused = [], []
        async with self._turn:
            for file in await self._in_thread(self._own.names):
                try:
                    one = await self._read(self._own, file, None)
                    self._written[file] = _mark(self._queues.get(one.queue_name))
                    done.append(one)
                except MillstreamError as error:
                    kept_as = await self._in_thread(self._own.set_aside, file)
                    refused.append(Refused(file, kept_as, error.message))
        self._has_restored = True
        return done, refused

    async def keep(self) -> list[Done]:
        """Write every queue that changed since the last time; a queue that is gone goes here too.

        Nothing before `restore`: a start that failed must not replace what is there by nothing.
        """
        if not self._has_restored:
            return []
        done = []
        async with self._turn:
            for name in [queue.name for queue in self._queues]:
                # Others may be deleted while one is written.
                with suppress(QueueUnknown):
                    queue = self._queues.get(name)
                    file, mark = own_file(name), _mark(queue)
                    if self._written.get(file) != mark:
                        done.append(await self._write(self._own, file, queue))
                        self._written[file] = mark
            for file in await self._in_thread(self._own.names):
                if file not in {own_file(queue.name) for queue in self._queues}:
                    await self._in_thread(self._own.remove, file)
                    self._written.pop(file, None)
        return done

    # ---- one file

    async def _write(self, folder: Folder, file: str, queue: Queue) -> Done:
        bodies, stamps = queue.contents()
        facts = Facts(queue.name, len(bodies), queue.bytes, queue.capacity, queue.bytes_max)
        size = await self._in_thread(folder.write, file, Snapshot(facts, bodies, stamps))
        return Done(file, facts.queue_name, facts.messages, facts.bytes, size)

    async def _read(self, folder: Folder, file: str, name: str | None) -> Done:
        """Into the queue of that name, or of the name in the file."""
        check_room = self._room_check(name)
        facts, contents = await self._in_thread(_read_measured, folder, file, check_room)
        name = name if name is not None else facts.queue_name
        self._replace(name, facts, contents)
        return Done(file, name, facts.messages, facts.bytes)

    def _room_check(self, name: str | None) -> RoomCheck:
        """For the thread: a large file that does not fit is refused by its first bytes."""
        limits = self._queues.limits
        queue = None
        if name is not None:
            with suppress(QueueUnknown):
                queue = self._queues.get(name)
        given = (queue.capacity, queue.bytes_max) if queue is not None else None

        def check(facts: Facts) -> None:
            own = (facts.capacity or limits.capacity, facts.bytes_max or limits.bytes_max)
            capacity, bytes_max = given or own
            if facts.messages > capacity or facts.bytes > min(bytes_max, limits.total_bytes_max):
                raise queue_full(name or facts.queue_name, capacity, bytes_max)

        return check

    def _replace(self, name: str, facts: Facts, contents: Contents) -> None:
        try:
            queue = self._queues.get(name)
        except QueueUnknown:
            queue = self._queues.configure(name, facts.capacity or None, facts.bytes_max or None)
            try:
                self._queues.replace(queue, contents)
            except MillstreamError:
                self._queues.delete(name)
                raise
        else:
            self._queues.replace(queue, contents)

    async def _in_thread(self, call: Callable[..., Result], *arguments: object) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, call, *arguments)


def _read_measured(folder: Folder, file: str, check_room: RoomCheck) -> tuple[Facts, Contents]:
    facts, bodies, stamps = folder.read(file, check_room)
    lengths = [*map(len, bodies)]
    return facts, Contents(bodies, stamps, sum(lengths), max(lengths, default=0))


def own_file(queue_name: str) -> str:
    """The file in the broker's own folder; the queue's whole name is inside it."""
    if len(queue_name) <= PLAIN_NAME_MAX:
        # A name may begin with a dot, which a file may not.
        return f"_{queue_name}{SUFFIX}"
    return f"{hashlib.sha256(queue_name.encode()).hexdigest()}{SUFFIX}"


def _mark(queue: Queue) -> object:
    """Differs whenever the contents or the limits do. The queue itself is part of it, because
    one that was made again under an old name counts from zero."""
    facts = queue.facts()._replace(full_total=0, timeout_total=0, waiting=0)
    return queue, queue.refills, facts
