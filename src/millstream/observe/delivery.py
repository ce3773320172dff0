"""Work queues on the metrics page: how deliveries end, and what is in flight, of so many groups as
a page can bear. The others are in the totals alone."""

from __future__ import annotations

from dataclasses import fields
from heapq import nlargest
from typing import TYPE_CHECKING

from millstream.broker.delivery_values import DeliveryCounts
from millstream.observe.metrics import counter, counters, gauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.delivery import Delivery

# How many groups are listed by name: the busiest; and, with five lanes each, how many topics of
# groups.
GROUPS_MAX = 100
LANE_SHARES_MAX = 100

TEXTS = {
    "delivered": "Records given out by lease.",
    "redelivered": "Of those, records that were given out before, and not released.",
    "acked": "Deliveries acknowledged.",
    "nacked": "Deliveries that failed.",
    "rejected": "Deliveries that failed for good.",
    "released": "Deliveries given back, uncounted.",
    "extended": "Leases extended.",
    "timeouts": "Leases that ran out.",
    "refused": "Settlings refused.",
    "dead": "Records that went to the dead letters.",
    "dropped": "Records that failed for good in topics without dead letters.",
    "parked": "Dead letters that failed again, and stay where they are.",
    "expired": "Records that retention removed before they were settled.",
    "lost": "Records that could not be given out, because they are damaged.",
}
NAMES = tuple(one.name for one in fields(DeliveryCounts))


def delivery_metrics(delivery: Delivery, groups_max: int = GROUPS_MAX) -> Iterator[Metric]:
    counts = delivery.counts
    listed = nlargest(groups_max, counts.items(), key=lambda one: one[1].delivered)
    for name in NAMES:
        text = TEXTS.get(name, f"Deliveries {name}.")
        total = sum(getattr(one, name) for one in counts.values())
        # Some receipts are of no group that there is.
        yield counter(f"delivery_{name}", text, delivery.refused if name == "refused" else total)
        yield counters(
            f"group_delivery_{name}",
            text,
            ("group",),
            {(group,): getattr(one, name) for group, one in listed},
        )
    shares = delivery.shares({group for group, _ in listed})
    for name, text in (
        ("leased", "Records that workers have."),
        ("waiting", "Records that failed, and come back after a while."),
        ("ready", "Records that nobody has, and that may go out."),
    ):
        yield gauges(
            f"group_delivery_{name}",
            text,
            ("group", "topic"),
            {(one.group, one.topic): getattr(one, name) for one in shares},
        )
    yield from lane_metrics(delivery)


def lane_metrics(delivery: Delivery, shares_max: int = LANE_SHARES_MAX) -> Iterator[Metric]:
    labels = ("group", "topic", "lane")
    found = delivery.lane_totals(shares_max)
    for name, text in (
        ("ready", "Records of a lane that nobody has, and that may go out."),
        ("inflight", "Records of a lane that workers have."),
    ):
        values: dict[tuple[str, ...], float] = {
            (one.group, one.topic, one.lane): getattr(one, name) for one in found
        }
        yield gauges(f"lane_{name}", text, labels, values)
    delivered: dict[tuple[str, ...], float] = {
        (one.group, one.topic, one.lane): one.delivered for one in found
    }
    yield counters("lane_delivered", "Records of a lane given out by lease.", labels, delivered)
