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
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from millstream.broker.queues import Contents, check_queue_name, queue_full
from millstream.errors import MillstreamError, QueueUnknown
from millstream.log.snapshot import Facts, Snapshot, check_file_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.queues import Queue, Queues
    from millstream.log.snapshot import RoomCheck

Result = TypeVar("Result")

SUFFIX = ".snapshot"
# In the names of files, a longer queue name is replaced by its digest.
PLAIN_NAME_MAX = 200


class Folder(Protocol):
    """Where snapshots lie; every call waits for a disk."""

    def names(self) -> list[str]: ...

    def write(self, name: str, snapshot: Snapshot) -> int: ...

    def read(self, name: str, check_room: RoomCheck) -> Snapshot: ...

    def size(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...

    def set_aside(self, name: str) -> str: ...


class Done(NamedTuple):
    """What a persist or a load did."""

    file: str
    queue_name: str
    messages: int
    bytes: int
    file_bytes: int


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
        self._worker = _Worker()
        # What the broker's own files hold, by file, so that a queue at rest is not written again.
        self._written: dict[str, object] = {}
        self._has_restored = False

    # ---- on request

    async def persist(self, name: str, file: str | None) -> Done:
        """Write what the queue holds now. SnapshotInvalid for a name that leads elsewhere."""
        file = file if file is not None else default_file(name)
        check_file_name(file)
        self._queues.get(name)
        async with self._turn:
            return await self._write(self._asked, file, self._queues.get(name))

    async def load(self, name: str, file: str | None) -> Done:
        """Replace what the queue holds by what the file holds, or leave it as it is and raise. A
        queue that is not there is made, with the limits that it had when it was persisted."""
        check_queue_name(name)
        file = file if file is not None else default_file(name)
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
                    one = await self._restore(file)
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
        # Limits that nobody asked for are not written: a later start may have other settings.
        own = (queue.own_capacity, queue.own_bytes_max)
        facts = Facts(queue.name, len(bodies), queue.bytes, *own)
        size = await self._in_thread(folder.write, file, Snapshot(facts, bodies, stamps))
        return Done(file, facts.queue_name, facts.messages, facts.bytes, size)

    async def _read(self, folder: Folder, file: str, name: str) -> Done:
        """Into the queue of that name."""
        check_room = self._room_check(name)
        found = await self._in_thread(_read_measured, folder, file, check_room)
        self._replace(name, found)
        return found.done(file, name)

    async def _restore(self, file: str) -> Done:
        """Into the queue of the name in the file, with the limits it had."""
        found = await self._in_thread(_read_measured, self._own, file, _no_check)
        facts = found.facts
        check_queue_name(facts.queue_name)
        self._queues.configure(facts.queue_name, facts.capacity or None, facts.bytes_max or None)
        queue = self._queues.get(facts.queue_name)
        self._queues.replace(queue, found.contents, is_restored=True)
        return found.done(file, facts.queue_name)

    def _room_check(self, name: str) -> RoomCheck:
        """For the thread: a large file that does not fit is refused by its first bytes."""
        limits = self._queues.limits
        queue = None
        with suppress(QueueUnknown):
            queue = self._queues.get(name)
        given = (queue.capacity, queue.bytes_max) if queue is not None else None

        def check(facts: Facts) -> None:
            own = (facts.capacity or limits.capacity, facts.bytes_max or limits.bytes_max)
            capacity, bytes_max = given or own
            if facts.messages > capacity or facts.bytes > min(bytes_max, limits.total_bytes_max):
                raise queue_full(name, capacity, bytes_max)

        return check

    def _replace(self, name: str, found: _Found) -> None:
        facts, contents, _ = found
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
        return await self._worker.run(lambda: call(*arguments))


class _Found(NamedTuple):
    """What a file holds."""

    facts: Facts
    contents: Contents
    file_bytes: int

    def done(self, file: str, name: str) -> Done:
        return Done(file, name, self.facts.messages, self.facts.bytes, self.file_bytes)


def _read_measured(folder: Folder, file: str, check_room: RoomCheck) -> _Found:
    facts, bodies, stamps = folder.read(file, check_room)
    lengths = [*map(len, bodies)]
    contents = Contents(bodies, stamps, sum(lengths), max(lengths, default=0))
    return _Found(facts, contents, folder.size(file))


def _no_check(facts: Facts) -> None:
    """What the broker wrote fitted into it once; the limit of all queues is looked at later."""
    del facts


class _Worker:
    """One thread, which does one thing after the other.

    A daemon, unlike those of an executor: when a disk hangs, the process must be able to end
    without it.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        if self._thread is None:
            self._thread = threading.Thread(target=self._turn, name="snapshots", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def job() -> None:
            try:
                outcome: Callable[[], None] = partial(_settle, done, work(), None)
            except BaseException as error:  # noqa: BLE001  handed to who waits
                outcome = partial(_settle, done, None, error)
            # A loop that is closed has nobody who waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(outcome)

        self._jobs.put(job)
        return await done

    def _turn(self) -> None:
        while True:
            self._jobs.get()()


def _settle(done: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def default_file(queue_name: str) -> str:
    """The file of a queue whose user names none."""
    if len(queue_name) > PLAIN_NAME_MAX or queue_name.startswith("."):
        return _digest(queue_name) + SUFFIX
    return queue_name + SUFFIX


def own_file(queue_name: str) -> str:
    """The file in the broker's own folder; the queue's whole name is inside it."""
    if len(queue_name) <= PLAIN_NAME_MAX:
        # A name may begin with a dot, which a file may not.
        return f"_{queue_name}{SUFFIX}"
    return _digest(queue_name) + SUFFIX


def _digest(queue_name: str) -> str:
    return hashlib.sha256(queue_name.encode()).hexdigest()


def _mark(queue: Queue) -> object:
    """Differs whenever the contents or the limits do. The queue itself is part of it, because
    one that was made again under an old name counts from zero."""
    facts = queue.facts()._replace(full_total=0, timeout_total=0, waiting=0)
    return queue, queue.refills, facts
