"""Dead letters as they are seen from outside: topics, redrives, and groups whose circuit breaker
is open. A scrape must not grow with the number of topics or groups, so only so many are named."""

from __future__ import annotations

from contextlib import suppress
from heapq import nlargest
from typing import TYPE_CHECKING

from millstream.broker.dead_letter_values import SUFFIX, is_dead_letter_topic
from millstream.errors import EngineStopped
from millstream.observe.metrics import counters, gauge, gauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.broker import Broker

# Groups on the health page; the metrics page has a setting.
NAMED_MAX = 100


def dead_letter_metrics(broker: Broker, named_max: int) -> Iterator[Metric]:
    """`named_max` is how many topics, and groups, are listed by name."""
    yield gauges(
        "dead_letters", "Dead letters that there are.", ("topic",), _left(broker, named_max)
    )
    moved = {
        (topic, reason): count
        for topic, reasons in broker.dead_letters.counts.items()
        for reason, count in reasons.items()
    }
    most = nlargest(2 * named_max, moved.items(), key=_number)
    yield counters(
        "dead_letters_moved", "Records that became dead letters.", ("topic", "reason"), dict(most)
    )
    redriven = nlargest(named_max, broker.redrive.redriven.items(), key=_number)
    yield counters(
        "dead_letters_redriven",
        "Dead letters that were put back.",
        ("topic",),
        {(topic,): count for topic, count in redriven},
    )
    yield gauge("redrives_running", "Redrives that run.", broker.redrive.running)
    yield from _breakers(broker, named_max)


def _left(broker: Broker, named_max: int) -> dict[tuple[str, ...], float]:
    names = [name for name in broker.topics.names() if is_dead_letter_topic(name)]
    found: dict[tuple[str, ...], float] = {}
    for name in names[:named_max]:
        # The page answers also while the log is closed.
        with suppress(EngineStopped):
            found[name.removesuffix(SUFFIX),] = broker.dead_letter_reading.left(name)
    return found


def _breakers(broker: Broker, named_max: int) -> Iterator[Metric]:
    facts = [one for one in broker.delivery.breakers() if one.openings]
    named = nlargest(named_max, facts, key=lambda one: (one.open_s is not None, one.openings))
    yield gauges(
        "dead_letters_paused",
        "1 while a group's records are retried instead of becoming dead letters.",
        ("group",),
        {(one.group,): int(one.open_s is not None) for one in named},
    )
    yield counters(
        "breaker_openings",
        "How often a group's circuit breaker opened.",
        ("group",),
        {(one.group,): one.openings for one in named},
    )


def dead_letter_notes(broker: Broker) -> dict[str, object]:
    """For the health page."""
    paused = [one.group for one in broker.delivery.paused()]
    return {"dead_letters_paused": sorted(paused)[:NAMED_MAX]}


def _number(item: tuple[object, int]) -> int:
    return item[1]
