"""Queues as they are seen from outside: totals on the metrics page, because ten thousand queues
must not make a scrape slow; each of them on a page of its own; some of them on the health page.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.queues import Counts
from millstream.observe.metrics import PREFIX, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.queues import Queue, Queues

# Probes read the health page every few seconds; it must not grow with the number of queues.
HEALTH_QUEUES_MAX = 100


class Totals(NamedTuple):
    """All queues together, and in `counts` also those that are gone."""

    size: int
    capacity: int
    waiting: int
    counts: Counts


def totals(queues: Queues) -> Totals:
    size = capacity = waiting = enqueued = dequeued = returned = full = timeouts = 0
    for queue in queues:
        size += len(queue)
        capacity += queue.capacity
        waiting += len(queue.waiters)
        enqueued += queue.enqueued_total
        dequeued += queue.dequeued_total
        returned += queue.returned_total
        full += queue.full_total
        timeouts += queue.timeout_total
    here = (enqueued, dequeued, returned, full, timeouts)
    return Totals(size, capacity, waiting, Counts(*map(add, here, queues.gone)))


def queue_metrics(queues: Queues) -> Iterator[Metric]:
    total = totals(queues)
    counts = total.counts
    yield gauge("queues", "Queues.", len(queues))
    yield gauge("queue_size", "Messages in all queues.", total.size)
    yield gauge("queue_bytes", "Bytes of messages in all queues.", queues.bytes)
    yield gauge("queue_capacity", "Messages that all queues may hold.", total.capacity)
    yield gauge("queue_waiting", "Consumers that wait for a message.", total.waiting)
    yield counter("enqueued", "Messages enqueued.", counts.enqueued)
    yield counter("dequeued", "Messages dequeued.", counts.dequeued)
    yield counter("returned", "Messages dequeued and put back undelivered.", counts.returned)
    yield counter("queue_full", "Enqueues refused for want of room.", counts.full)
    yield counter("dequeue_timeout", "Dequeues that waited in vain.", counts.timeouts)
    yield counter("dequeue_miss", "Dequeues that found nothing.", queues.dequeue_misses)


def process_values(queues: Queues, uptime_seconds: float) -> dict[str, object]:
    """The JSON form of the metrics page in short, by names that do not depend on Prometheus."""
    total = totals(queues)
    return {
        "uptime_sec": round(uptime_seconds, 3),
        "queue_length": total.size,
        "queue_bytes": queues.bytes,
        "enqueue_count": total.counts.enqueued,
        "dequeue_count": total.counts.dequeued - total.counts.returned,
        "dequeue_misses": queues.dequeue_misses,
        "threads": threading.active_count(),
        "open_files": _open_files(),
    }


def _open_files() -> int | None:
    """None where the system has no such folder."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def health_fields(queues: Queues) -> dict[str, object]:
    """The oldest queues, and how many of all they are."""
    listed = {queue.name: _health_of(queue) for queue in islice(queues, HEALTH_QUEUES_MAX)}
    return {"total_queues": len(queues), "queues_listed": len(listed), "queues": listed}


def _health_of(queue: Queue) -> dict[str, object]:
    return {
        "size": len(queue),
        "capacity": queue.capacity,
        "utilization": round(len(queue) / queue.capacity, 5),
        "enqueued_total": queue.enqueued_total,
        "dequeued_total": queue.dequeued_total - queue.returned_total,
        "queue_full_count": queue.full_total,
    }


class _Column(NamedTuple):
    name: str
    kind: str
    text: str
    value: Callable[[Queue], int]


_COLUMNS = (
    _Column("queue_size", "gauge", "Messages in the queue.", len),
    _Column("queue_capacity", "gauge", "Messages it may hold.", lambda q: q.capacity),
    _Column("queue_bytes", "gauge", "Bytes of its messages.", lambda q: q.bytes),
    _Column("queue_bytes_max", "gauge", "Bytes it may hold.", lambda q: q.bytes_max),
    _Column("queue_waiting", "gauge", "Consumers that wait.", lambda q: len(q.waiters)),
    _Column("enqueued_total", "counter", "Messages enqueued.", lambda q: q.enqueued_total),
    _Column("dequeued_total", "counter", "Messages dequeued.", lambda q: q.dequeued_total),
    _Column(
        "returned_total",
        "counter",
        "Messages dequeued and put back undelivered.",
        lambda q: q.returned_total,
    ),
    _Column("queue_full_total", "counter", "Enqueues refused.", lambda q: q.full_total),
    _Column(
        "dequeue_timeout_total",
        "counter",
        "Dequeues that waited in vain.",
        lambda q: q.timeout_total,
    ),
)


def detailed_page(queues: Queues) -> bytes:
    """Every queue, in Prometheus text. Written by hand: ten times as quick as by way of objects,
    and names of queues have no character that would have to be escaped."""
    everyone = list(queues)
    lines = []
    for name, kind, text, value in _COLUMNS:
        lines.append(f"# HELP {PREFIX}{name} {text}\n# TYPE {PREFIX}{name} {kind}\n")
        start = f'{PREFIX}{name}{{queue="'
        lines += [f'{start}{queue.name}"}} {value(queue)}\n' for queue in everyone]
    return "".join(lines).encode()
