"""Queues against a model: any sequence of operations on several of them, and what is seen outside.

The model is lists of bodies, and the rules of the design written down as plainly as they can be.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as some
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from log.effort import effort
from millstream.broker.queues import Contents, Message, Queue, QueueLimits, Queues
from millstream.errors import (
    MemoryFull,
    MessageTooLarge,
    MillstreamError,
    QueueFull,
    QueueUnknown,
    TooManyQueues,
)
from millstream.observe.queues import totals

LIMITS = QueueLimits(
    capacity=5, bytes_max=60, total_bytes_max=100, queues_max=3, message_bytes_max=30
)
NAMES = some.sampled_from(["a", "b", "c", "d"])
SIZES = some.integers(0, 32)


class Taker:
    """Somebody who waits, and remembers what came."""

    def __init__(self, name: str, count_max: int) -> None:
        self.name = name
        self.count_max = count_max
        self.taken: list[list[bytes]] = []

    def take(self, messages: list[Message]) -> None:
        self.taken.append([message.body for message in messages])


class ModelQueue:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.waiting: deque[Taker] = deque()
        self.capacity, self.bytes_max = LIMITS.capacity, LIMITS.bytes_max

    @property
    def size(self) -> int:
        return sum(map(len, self.bodies))

    def serve(self) -> list[tuple[Taker, list[bytes]]]:
        served = []
        while self.waiting and self.bodies:
            taker = self.waiting.popleft()
            taken, self.bodies = (
                self.bodies[: taker.count_max],
                self.bodies[taker.count_max :],
            )
            served.append((taker, taken))
        return served


class Machine(RuleBasedStateMachine):
    held: Bundle[tuple[str, Queue, list[Message]]] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.clock_us = 0
        self.queues = Queues(LIMITS, self.now_us)
        self.model: dict[str, ModelQueue] = {}
        self.number = 0
        self.counted: tuple[int, ...] = (0, 0, 0, 0, 0)

    def now_us(self) -> int:
        self.clock_us += 1
        return self.clock_us

    # ---- what the model says

    def body(self, size: int) -> bytes:
        self.number += 1
        return (b"%d" % self.number).ljust(size, b".")

    def refusal(self, name: str, bodies: list[bytes]) -> type[MillstreamError] | None:
        """Why a queue cannot take these, looked at in the order that the broker promises."""
        queue = self.model[name]
        size = sum(map(len, bodies))
        if max(map(len, bodies), default=0) > LIMITS.message_bytes_max:
            return MessageTooLarge
        if len(queue.bodies) + len(bodies) > queue.capacity or queue.size + size > queue.bytes_max:
            return QueueFull
        if self.total + size > LIMITS.total_bytes_max:
            return MemoryFull
        return None

    @property
    def total(self) -> int:
        return sum(queue.size for queue in self.model.values())

    def check_served(self, served: list[tuple[Taker, list[bytes]]]) -> None:
        for taker, bodies in served:
            assert taker.taken == [bodies]

    def found(self, name: str) -> Queue | None:
        """The queue, which both make when there is room for one more; None when neither does."""
        if name not in self.model:
            if len(self.model) == LIMITS.queues_max:
                with pytest.raises(TooManyQueues):
                    self.queues.get_or_create(name)
                return None
            self.model[name] = ModelQueue()
        return self.queues.get_or_create(name)

    # ---- messages

    @rule(name=NAMES, size=SIZES)
    def enqueue(self, name: str, size: int) -> None:
        queue = self.found(name)
        if queue is None:
            return
        body, model = self.body(size), self.model[name]
        if len(body) <= LIMITS.message_bytes_max and model.waiting:
            # It passes by, and no limit of what lies in a queue is in its way.
            self.queues.enqueue(queue, body, is_json=False)
            assert model.waiting.popleft().taken == [[body]]
            return
        why = self.refusal(name, [body])
        if why is not None:
            with pytest.raises(why):
                self.queues.enqueue(queue, body, is_json=False)
            return
        self.queues.enqueue(queue, body, is_json=False)
        model.bodies.append(body)

    @rule(name=NAMES, sizes=some.lists(some.integers(0, 12), max_size=6))
    def enqueue_many(self, name: str, sizes: list[int]) -> None:
        queue = self.found(name)
        if queue is None:
            return
        bodies = [self.body(size) for size in sizes]
        why = self.refusal(name, bodies)
        assert self.queues.fits(queue, bodies) is (why is None)
        if why is not None:
            with pytest.raises(why):
                self.queues.enqueue_many(queue, bodies, is_json=True)
            return
        self.queues.enqueue_many(queue, bodies, is_json=True)
        self.model[name].bodies += bodies
        self.check_served(self.model[name].serve())

    @rule(target=held, name=NAMES, count=some.integers(1, 4))
    def dequeue(self, name: str, count: int) -> tuple[str, Queue, list[Message]]:
        queue = self.found(name)
        if queue is None:
            return name, Queue(name, 1, 1), []
        model = self.model[name]
        expected, model.bodies = model.bodies[:count], model.bodies[count:]
        messages = self.queues.dequeue(queue, count)
        assert [message.body for message in messages] == expected
        return name, queue, messages

    @rule(taken=held)
    def put_back(self, taken: tuple[str, Queue, list[Message]]) -> None:
        name, queue, messages = taken
        self.queues.put_back(queue, messages)
        if self.queues.find(name) is queue:
            model = self.model[name]
            model.bodies[:0] = [message.body for message in messages]
            self.check_served(model.serve())
        messages.clear()

    # ---- who waits

    @rule(name=NAMES, count=some.integers(1, 3))
    def wait(self, name: str, count: int) -> None:
        queue = self.found(name)
        if queue is None:
            return
        taker = Taker(name, count)
        self.model[name].waiting.append(taker)
        self.queues.wait(queue, taker)
        self.check_served(self.model[name].serve())

    @rule(name=NAMES, data=some.data())
    def leave(self, name: str, data: some.DataObject) -> None:
        model = self.model.get(name)
        if model is None or not model.waiting:
            return
        leaving = data.draw(some.sampled_from(list(model.waiting)))
        model.waiting.remove(leaving)
        assert self.queues.leave(self.queues.get(name), leaving)
        assert not self.queues.leave(self.queues.get(name), leaving)
        assert leaving.taken == []

    # ---- queues

    @rule(name=NAMES, capacity=some.integers(1, 8), bytes_max=some.integers(1, 80))
    def configure(self, name: str, capacity: int, bytes_max: int) -> None:
        if self.found(name) is not None:
            self.queues.configure(name, capacity, bytes_max)
            model = self.model[name]
            model.capacity, model.bytes_max = capacity, bytes_max

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        queue = self.found(name)
        if queue is not None:
            assert self.queues.clear(queue) == len(self.model[name].bodies)
            self.model[name].bodies = []

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        model = self.model.pop(name, None)
        if model is None:
            with pytest.raises(QueueUnknown):
                self.queues.delete(name)
            return
        self.queues.delete(name)
        assert all(taker.taken == [[]] for taker in model.waiting)

    @rule(name=NAMES, sizes=some.lists(SIZES, max_size=7))
    def replace(self, name: str, sizes: list[int]) -> None:
        queue = self.found(name)
        if queue is None:
            return
        model = self.model[name]
        bodies = [self.body(size) for size in sizes]
        before, model.bodies = model.bodies, []
        why = self.refusal(name, bodies)
        lengths = [*map(len, bodies)]
        contents = Contents(bodies, [2] * len(bodies), sum(lengths), max(lengths, default=0))
        if why is not None:
            model.bodies = before
            with pytest.raises(why):
                self.queues.replace(queue, contents)
            return
        self.queues.replace(queue, contents)
        model.bodies = bodies
        self.check_served(model.serve())

    # ---- what holds at all times

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        assert {queue.name for queue in self.queues} == set(self.model)
        for name, model in self.model.items():
            queue = self.queues.get(name)
            assert [message.body for message in queue.snapshot()] == model.bodies
            assert (len(queue), queue.bytes) == (len(model.bodies), model.size)
            assert list(queue.waiters) == list(model.waiting)
            assert not (model.waiting and model.bodies)
        assert self.queues.bytes == self.total

    @invariant()
    def counters_never_fall(self) -> None:
        counts = tuple(totals(self.queues).counts)
        assert all(now >= before for now, before in zip(counts, self.counted, strict=True))
        self.counted = counts


TestQueues = Machine.TestCase
TestQueues.settings = effort(40, steps=50)
