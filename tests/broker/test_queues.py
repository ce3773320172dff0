"""Queues: their order, their limits, and who waits for what."""

from __future__ import annotations

import pytest

from millstream.broker.queues import Message, Queue, QueueLimits, Queues
from millstream.errors import (
    MemoryFull,
    MessageTooLarge,
    QueueFull,
    QueueNameInvalid,
    QueueUnknown,
    TooManyQueues,
)

LIMITS = QueueLimits(
    capacity=5, bytes_max=50, total_bytes_max=80, queues_max=3, message_bytes_max=20
)


class Taker:
    def __init__(self, count_max: int = 1) -> None:
        self.count_max = count_max
        self.taken: list[list[bytes]] = []

    def take(self, messages: list[Message]) -> None:
        self.taken.append([message.body for message in messages])


def make(limits: QueueLimits = LIMITS) -> tuple[Queues, Queue]:
    queues = Queues(limits, lambda: 1_700_000_000_000_000)
    return queues, queues.get_or_create("q")


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def test_messages_come_out_in_the_order_in_which_they_went_in() -> None:
    queues, queue = make()
    for body in (b"a", b"b", b"c"):
        assert queues.enqueue(queue, body, is_json=False) == 1_700_000_000_000_000
    assert bodies(queues.dequeue(queue, 2)) == [b"a", b"b"]
    assert bodies(queues.dequeue(queue, 2)) == [b"c"]
    assert queues.dequeue(queue, 2) == []
    assert (queue.enqueued_total, queue.dequeued_total, queues.bytes) == (3, 3, 0)


def test_a_queue_is_full_by_count_by_bytes_and_by_all_of_them_together() -> None:
    queues, queue = make()
    for _ in range(LIMITS.capacity):
        queues.enqueue(queue, b"x", is_json=False)
    with pytest.raises(QueueFull):
        queues.enqueue(queue, b"x", is_json=False)
    large = queues.get_or_create("large")
    queues.enqueue(large, b"y" * 20, is_json=False)
    queues.enqueue(large, b"y" * 20, is_json=False)
    with pytest.raises(QueueFull):
        queues.enqueue(large, b"y" * 11, is_json=False)
    queues.enqueue(large, b"y" * 10, is_json=False)
    third = queues.get_or_create("third")
    queues.enqueue(third, b"z" * 20, is_json=False)
    with pytest.raises(MemoryFull):
        queues.enqueue(third, b"z" * 6, is_json=False)
    queues.enqueue(third, b"z" * 5, is_json=False)
    assert queues.bytes == LIMITS.total_bytes_max


def test_a_batch_goes_in_whole_or_not_at_all() -> None:
    queues, queue = make()
    queues.enqueue_many(queue, [b"a", b"b", b"c"], is_json=True)
    with pytest.raises(QueueFull):
        queues.enqueue_many(queue, [b"d", b"e", b"f"], is_json=True)
    with pytest.raises(MessageTooLarge):
        queues.enqueue_many(queue, [b"d", b"e" * 21], is_json=True)
    assert bodies(queues.dequeue(queue, 10)) == [b"a", b"b", b"c"]


def test_names_and_the_number_of_queues_are_bounded() -> None:
    queues, _ = make()
    for name in ("", "a/b", "a b", "ü", "x" * 256):
        with pytest.raises(QueueNameInvalid):
            queues.get_or_create(name)
    queues.get_or_create("x" * 255)
    queues.get_or_create("A-z_0.9")
    with pytest.raises(TooManyQueues):
        queues.get_or_create("fourth")
    with pytest.raises(QueueUnknown):
        queues.get("fourth")


def test_who_waits_first_is_served_first_and_nobody_twice() -> None:
    queues, queue = make()
    first, second = Taker(), Taker()
    queues.wait(queue, first)
    queues.wait(queue, second)
    queues.enqueue(queue, b"a", is_json=False)
    queues.enqueue(queue, b"b", is_json=False)
    queues.enqueue(queue, b"c", is_json=False)
    assert (first.taken, second.taken) == ([[b"a"]], [[b"b"]])
    assert bodies(queues.dequeue(queue, 5)) == [b"c"]


def test_a_waiter_that_leaves_costs_nothing() -> None:
    queues, queue = make()
    gone, stays = Taker(), Taker()
    queues.wait(queue, gone)
    queues.wait(queue, stays)
    assert queues.leave(queue, gone)
    assert not queues.leave(queue, gone)
    queues.enqueue(queue, b"a", is_json=False)
    assert (gone.taken, stays.taken) == ([], [[b"a"]])


def test_what_could_not_be_delivered_goes_back_to_the_front_in_order() -> None:
    queues, queue = make()
    for body in (b"a", b"b", b"c"):
        queues.enqueue(queue, body, is_json=False)
    taken = queues.dequeue(queue, 2)
    queues.put_back(queue, taken)
    assert bodies(queues.dequeue(queue, 3)) == [b"a", b"b", b"c"]


def test_deleting_a_queue_ends_the_wait_of_its_waiters() -> None:
    queues, queue = make()
    waiter = Taker()
    queues.wait(queue, waiter)
    queues.delete("q")
    assert waiter.taken == [[]]
    with pytest.raises(QueueUnknown):
        queues.get("q")
