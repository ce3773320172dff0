"""Volatile queues: named, first in first out, bounded by count and by bytes.

A message is bytes, with a stamp: the microseconds at which it came, and whether it came as JSON.
Messages and stamps lie in two deques side by side, because an object for each message would cost
more memory than the message.

Who waits for a message is served in the order of waiting. A message is either in its queue, or it
was given to one waiter; a waiter that goes away before that costs nothing. What a consumer could
not be sent is put back at the front.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol

from millstream.errors import (
    MemoryFull,
    MessageTooLarge,
    QueueFull,
    QueueNameInvalid,
    QueueUnknown,
    TooManyQueues,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

QUEUE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
DEFAULT_QUEUE = "default"


class Message(NamedTuple):
    """`stamp` is twice the time in microseconds, plus one when the body came as JSON."""

    body: bytes
    stamp: int

    @property
    def is_json(self) -> bool:
        return bool(self.stamp & 1)


class Contents(NamedTuple):
    """Messages as columns, oldest first, and what was found out about them elsewhere: the loop
    should not have to look at each of a million."""

    bodies: list[bytes]
    stamps: list[int]
    total_bytes: int
    longest_bytes: int


class Waiter(Protocol):
    """Somebody who takes the next messages of a queue."""

    @property
    def count_max(self) -> int:
        """How many it takes at once."""
        ...

    def take(self, messages: list[Message]) -> None: ...


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What a new queue gets, and what all of them may have together."""

    capacity: int = 100_000
    bytes_max: int = 256 * 1024 * 1024
    total_bytes_max: int = 1024 * 1024 * 1024
    queues_max: int = 1_000
    message_bytes_max: int = 128 * 1024


class QueueFacts(NamedTuple):
    """A queue as it is seen from outside, at one moment."""

    name: str
    size: int
    bytes: int
    capacity: int
    bytes_max: int
    enqueued_total: int
    dequeued_total: int
    full_total: int
    timeout_total: int
    waiting: int


class Counts(NamedTuple):
    """What only grows, of one queue or of several."""

    enqueued: int = 0
    dequeued: int = 0
    returned: int = 0
    full: int = 0
    timeouts: int = 0

    def plus(self, queue: Queue) -> Counts:
        return Counts(
            self.enqueued + queue.enqueued_total,
            self.dequeued + queue.dequeued_total,
            self.returned + queue.returned_total,
            self.full + queue.full_total,
            self.timeouts + queue.timeout_total,
        )


class Queue:
    __slots__ = (
        "_bodies",
        "_stamps",
        "bytes",
        "bytes_max",
        "capacity",
        "dequeued_total",
        "enqueued_total",
        "full_total",
        "is_serving",
        "name",
        "own_bytes_max",
        "own_capacity",
        "refills",
        "returned_total",
        "timeout_total",
        "waiters",
    )

    def __init__(self, name: str, capacity: int, bytes_max: int) -> None:
        self.name = name
        self.capacity = capacity
        self.bytes_max = bytes_max
        self._bodies: deque[bytes] = deque()
        self._stamps: deque[int] = deque()
        self.bytes = 0
        self.waiters: OrderedDict[Waiter, None] = OrderedDict()
        self.enqueued_total = 0
        self.dequeued_total = 0
        self.full_total = 0
        # Those of the dequeued that were not delivered and are in the queue again. Both only grow,
        # as counters must.
        self.returned_total = 0
        self.timeout_total = 0
        # Limits that somebody asked for; 0 when they are those of the settings.
        self.own_capacity = 0
        self.own_bytes_max = 0
        # How often messages came in other than by enqueue: put back, or loaded.
        self.refills = 0
        # Whether waiters are being given messages: who gives one back does not begin again.
        self.is_serving = False

    def __len__(self) -> int:
        return len(self._bodies)

    def facts(self) -> QueueFacts:
        return QueueFacts(
            self.name,
            len(self._bodies),
            self.bytes,
            self.capacity,
            self.bytes_max,
            self.enqueued_total,
            self.dequeued_total - self.returned_total,
            self.full_total,
            self.timeout_total,
            len(self.waiters),
        )

    def snapshot(self) -> list[Message]:
        """The messages now, oldest first. Bodies are shared, not copied."""
        return list(map(Message, self._bodies, self._stamps))

    def contents(self) -> tuple[list[bytes], list[int]]:
        """The same as columns, bodies and stamps, for a snapshot of many."""
        return list(self._bodies), list(self._stamps)

    def fill(self, contents: Contents) -> None:
        """What an empty queue is to hold."""
        assert not self._bodies
        self._bodies.extend(contents.bodies)
        self._stamps.extend(contents.stamps)
        self.bytes = contents.total_bytes
        self.refills += 1

    def push(self, body: bytes, stamp: int) -> None:
        self._bodies.append(body)
        self._stamps.append(stamp)
        self.bytes += len(body)

    def push_many(self, bodies: Sequence[bytes], stamp: int, size: int) -> None:
        self._bodies.extend(bodies)
        self._stamps.extend(repeat(stamp, len(bodies)))
        self.bytes += size

    def push_front(self, messages: Sequence[Message]) -> None:
        self._bodies.extendleft(message.body for message in reversed(messages))
        self._stamps.extendleft(message.stamp for message in reversed(messages))
        self.bytes += sum(len(message.body) for message in messages)
        self.refills += 1

    def pop(self) -> Message:
        body = self._bodies.popleft()
        self.bytes -= len(body)
        return Message(body, self._stamps.popleft())

    def pop_plain(self) -> tuple[bytes, int] | None:
        if not self._bodies:
            return None
        body = self._bodies.popleft()
        self.bytes -= len(body)
        return body, self._stamps.popleft()

    def pop_many(self, count: int) -> list[Message]:
        take_body, take_stamp = self._bodies.popleft, self._stamps.popleft
        bodies = [take_body() for _ in range(count)]
        self.bytes -= sum(map(len, bodies))
        stamps = [take_stamp() for _ in range(count)]
        # Half the time of calling the class.
        return list(map(Message._make, zip(bodies, stamps, strict=True)))

    def count_within(self, count_max: int, bytes_max: int) -> int:
        """How many of the oldest have at most so many bytes together; at least one, because one
        has to be taken whole."""
        if self.bytes <= bytes_max:
            return count_max
        size = 0
        for count, body in enumerate(islice(self._bodies, count_max)):
            size += len(body)
            if size > bytes_max:
                return max(count, 1)
        return count_max

    def drop_all(self) -> int:
        """Answers how many messages that were."""
        count = len(self._bodies)
        self._bodies.clear()
        self._stamps.clear()
        self.bytes = 0
        return count


class Queues:
    """All of them. `now_us` is the wall clock in microseconds."""

    __slots__ = ("_by_name", "_now_us", "bytes", "dequeue_misses", "gone", "is_closing", "limits")

    def __init__(self, limits: QueueLimits, now_us: Callable[[], int]) -> None:
        self.limits = limits
        self._now_us = now_us
        self._by_name: dict[str, Queue] = {}
        self.bytes = 0
        self.dequeue_misses = 0
        # What queues that were deleted had counted.
        self.gone = Counts()
        # Set when the broker stops: nobody should begin to wait.
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Queue]:
        return iter(self._by_name.values())

    # ---- queues

    def find(self, name: str) -> Queue | None:
        return self._by_name.get(name)

    def get(self, name: str) -> Queue:
        queue = self._by_name.get(name)
        if queue is None:
            check_queue_name(name)
            raise QueueUnknown(f"Queue '{name}' does not exist", queue_name=name)
        return queue

    def get_or_create(self, name: str) -> Queue:
        queue = self._by_name.get(name)
        return queue if queue is not None else self.configure(name, None, None)

    def configure(self, name: str, capacity: int | None, bytes_max: int | None) -> Queue:
        """Make a queue, or change the limits of one. It keeps what it holds."""
        queue = self._by_name.get(name)
        if queue is None:
            check_queue_name(name)
            if len(self._by_name) >= self.limits.queues_max:
                raise TooManyQueues(
                    f"there are {self.limits.queues_max} queues, which is the limit; "
                    "delete one, or raise `queues_max`",
                    queues_max=self.limits.queues_max,
                )
            queue = Queue(name, self.limits.capacity, self.limits.bytes_max)
            self._by_name[name] = queue
        if capacity is not None:
            queue.capacity = queue.own_capacity = capacity
        if bytes_max is not None:
            queue.bytes_max = queue.own_bytes_max = bytes_max
        return queue

    def clear(self, queue: Queue) -> int:
        """Drop what it holds; answers how many messages that were."""
        self.bytes -= queue.bytes
        return queue.drop_all()

    def delete(self, name: str) -> None:
        """Gone with its messages. Who waits on it gets nothing."""
        queue = self.get(name)
        self.clear(queue)
        del self._by_name[name]
        self.gone = self.gone.plus(queue)
        while queue.waiters:
            waiter, _ = queue.waiters.popitem(last=False)
            waiter.take([])

    # ---- messages

    def enqueue(self, queue: Queue, body: bytes, is_json: bool) -> int:
        """Append one message; answers when, in microseconds. Raises when there is no room."""
        size = len(body)
        limits = self.limits
        if size > limits.message_bytes_max:
            raise message_too_large(limits.message_bytes_max)
        now_us = self._now_us()
        stamp = now_us << 1 | is_json
        if queue.waiters:
            waiter, _ = queue.waiters.popitem(last=False)
            queue.enqueued_total += 1
            queue.dequeued_total += 1
            waiter.take([Message(body, stamp)])
            return now_us
        if len(queue) >= queue.capacity or queue.bytes + size > queue.bytes_max:
            raise self._full(queue)
        if self.bytes + size > limits.total_bytes_max:
            raise self._memory_full(queue)
        queue.push(body, stamp)
        self.bytes += size
        queue.enqueued_total += 1
        return now_us

    def enqueue_many(self, queue: Queue, bodies: Sequence[bytes], is_json: bool) -> int:
        """All of them, or none when they do not all fit."""
        limits = self.limits
        size = sum(map(len, bodies))
        if max(map(len, bodies), default=0) > limits.message_bytes_max:
            raise message_too_large(limits.message_bytes_max)
        if len(queue) + len(bodies) > queue.capacity or queue.bytes + size > queue.bytes_max:
            raise self._full(queue)
        if self.bytes + size > limits.total_bytes_max:
            raise self._memory_full(queue)
        now_us = self._now_us()
        stamp = now_us << 1 | is_json
        queue.push_many(bodies, stamp, size)
        self.bytes += size
        queue.enqueued_total += len(bodies)
        self.serve(queue)
        return now_us

    def fits(self, queue: Queue, bodies: Sequence[bytes]) -> bool:
        """Whether `enqueue_many` would take them."""
        size = sum(map(len, bodies))
        return (
            len(queue) + len(bodies) <= queue.capacity
            and queue.bytes + size <= queue.bytes_max
            and self.bytes + size <= self.limits.total_bytes_max
            and max(map(len, bodies), default=0) <= self.limits.message_bytes_max
        )

    def dequeue(self, queue: Queue, count_max: int) -> list[Message]:
        """The oldest messages, at most so many; none when it is empty."""
        count = min(count_max, len(queue))
        if not count:
            self.dequeue_misses += 1
            return []
        before = queue.bytes
        messages = [queue.pop()] if count == 1 else queue.pop_many(count)
        self.bytes -= before - queue.bytes
        queue.dequeued_total += count
        return messages

    def dequeue_one(self, queue: Queue) -> tuple[bytes, int] | None:
        """Body and stamp of the oldest message, for who is in a hurry."""
        found = queue.pop_plain()
        if found is None:
            self.dequeue_misses += 1
            return None
        self.bytes -= len(found[0])
        queue.dequeued_total += 1
        return found

    def wait(self, queue: Queue, waiter: Waiter) -> None:
        """Stand in line. `take` is called once, with messages, or with none when the queue goes;
        the waiter leaves the line then, and stands in it again if it wants more."""
        self.wait_all(queue, (waiter,))

    def wait_all(self, queue: Queue, waiters: Sequence[Waiter]) -> None:
        """Several at once: each sees how many stand in line when it is served."""
        if self._by_name.get(queue.name) is not queue:
            for waiter in waiters:
                waiter.take([])
            return
        for waiter in waiters:
            queue.waiters[waiter] = None
        self.serve(queue)

    def leave(self, queue: Queue, waiter: Waiter) -> bool:
        """Leave the line; False when it was served before."""
        return queue.waiters.pop(waiter, waiter) is None

    def serve(self, queue: Queue) -> None:
        """Give messages to who waits, first come first served. A thousand of them may be gone
        and put back what they get, one after the other."""
        if queue.is_serving:
            return
        queue.is_serving = True
        try:
            while queue.waiters and len(queue):
                waiter, _ = queue.waiters.popitem(last=False)
                waiter.take(self.dequeue(queue, waiter.count_max))
        finally:
            queue.is_serving = False

    def put_back(self, queue: Queue, messages: Sequence[Message]) -> None:
        """Messages that were taken and not delivered, to the front, in their order. They were
        in memory before, so no limit refuses them. They are gone if the queue is."""
        if self._by_name.get(queue.name) is not queue:
            return
        queue.push_front(messages)
        self.bytes += sum(len(message.body) for message in messages)
        queue.returned_total += len(messages)
        self.serve(queue)

    def replace(self, queue: Queue, contents: Contents, *, is_restored: bool = False) -> None:
        """What a snapshot holds, instead of what is there. What the broker held before a restart
        stays in the queue whatever the queue's limits are now; the limit of all queues holds."""
        size = contents.total_bytes
        if not is_restored:
            self._check_limits(queue, contents)
        if self.bytes - queue.bytes + size > self.limits.total_bytes_max:
            raise self._memory_full(queue)
        self.clear(queue)
        queue.fill(contents)
        self.bytes += size
        self.serve(queue)

    def _check_limits(self, queue: Queue, contents: Contents) -> None:
        if contents.longest_bytes > self.limits.message_bytes_max:
            raise message_too_large(self.limits.message_bytes_max)
        if len(contents.bodies) > queue.capacity or contents.total_bytes > queue.bytes_max:
            raise self._full(queue)

    # ---- refusals

    def _full(self, queue: Queue) -> QueueFull:
        queue.full_total += 1
        return queue_full(queue.name, queue.capacity, queue.bytes_max)

    def _memory_full(self, queue: Queue) -> MemoryFull:
        queue.full_total += 1
        return MemoryFull(
            f"all queues together hold {self.limits.total_bytes_max} bytes, which is the limit",
            queue_name=queue.name,
            limit_bytes=self.limits.total_bytes_max,
        )


def check_queue_name(name: str) -> None:
    # Clients take `.` and `..` out of an address before they send it.
    if not QUEUE_NAME.fullmatch(name) or name in (".", ".."):
        raise QueueNameInvalid(
            f"{name[:260]!r} is not a queue name: 1 to 255 of letters, digits, `.`, `_` and `-`, "
            "and neither `.` nor `..`",
            queue_name=name[:260],
        )


def queue_full(name: str, capacity: int, bytes_max: int) -> QueueFull:
    return QueueFull(
        f"Queue '{name}' is at capacity",
        queue_name=name,
        queue_capacity=capacity,
        queue_max_bytes=bytes_max,
    )


def message_too_large(limit_bytes: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"a message may have {limit_bytes} bytes; raise `message_bytes_max` to allow more",
        limit_bytes=limit_bytes,
    )


def body_too_large(limit_bytes: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"a body may have {limit_bytes} bytes; send less at once, or raise `body_bytes_max`",
        limit_bytes=limit_bytes,
    )
