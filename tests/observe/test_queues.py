"""Queues seen from outside: totals that only grow, and pages that stay small."""

from __future__ import annotations

import msgspec

from millstream.broker.queues import QueueLimits, Queues
from millstream.observe.metrics import Metrics
from millstream.observe.queues import detailed_page, health_fields, process_values, queue_metrics

TOTALS = ("enqueued", "dequeued", "returned", "queue_full", "dequeue_timeout", "dequeue_miss")


def make(capacity: int = 100) -> tuple[Queues, Metrics]:
    queues = Queues(QueueLimits(capacity=capacity, queues_max=20_000), lambda: 1)
    metrics = Metrics()
    metrics.register(lambda: queue_metrics(queues))
    return queues, metrics


def counted(metrics: Metrics) -> list[object]:
    values = metrics.values()
    return [values[f"millstream_{name}_total"] for name in TOTALS]


def test_totals_do_not_fall_when_a_queue_is_deleted() -> None:
    queues, metrics = make()
    queue = queues.get_or_create("q")
    for _ in range(5):
        queues.enqueue(queue, b"x", is_json=False)
    queues.put_back(queue, queues.dequeue(queue, 3))
    queues.dequeue(queue, 1)
    queue.full_total, queue.timeout_total = 7, 8
    before = counted(metrics)
    assert before == [5, 4, 3, 7, 8, 0]
    queues.delete("q")
    assert counted(metrics) == before
    queues.enqueue(queues.get_or_create("q"), b"x", is_json=False)
    assert counted(metrics) == [6, 4, 3, 7, 8, 0]


def test_what_is_put_back_is_not_counted_as_delivered_and_no_counter_falls() -> None:
    queues, metrics = make()
    queue = queues.get_or_create("q")
    queues.enqueue(queue, b"x", is_json=False)
    taken = queues.dequeue(queue, 1)
    before = counted(metrics)
    queues.put_back(queue, taken)
    after = counted(metrics)
    assert all(new >= old for new, old in zip(after, before, strict=True))  # type: ignore[operator]
    assert queue.facts().dequeued_total == 0
    assert process_values(queues, 1.0)["dequeue_count"] == 0
    assert b'millstream_returned_total{queue="q"} 1\n' in detailed_page(queues)


def test_the_page_of_totals_does_not_grow_with_the_number_of_queues() -> None:
    queues, metrics = make()
    queues.get_or_create("q")
    lines = len(metrics.text().splitlines())
    for number in range(10_000):
        queues.get_or_create(f"queue-{number}")
    assert len(metrics.text().splitlines()) == lines
    assert len(msgspec.json.encode(health_fields(queues))) < 20_000
