"""Topics as they are seen from outside: totals, and the busiest topics by name. A scrape must not
grow with the number of topics, so the others are in the totals alone."""

from __future__ import annotations

from contextlib import suppress
from heapq import nlargest
from typing import TYPE_CHECKING

from millstream.errors import EngineStopped, TopicUnknown
from millstream.observe.metrics import counter, counters, gauge, gauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.broker import Broker
    from millstream.broker.topics import Description
    from millstream.broker.traffic import TopicTraffic


def topic_metrics(broker: Broker, topics_max: int) -> Iterator[Metric]:
    """`topics_max` is how many are listed by name."""
    total, topics, views = broker.traffic.total(), broker.topics, broker.views.counts
    yield gauge("topics", "Topics of clients.", len(topics))
    yield gauge("topic_partitions", "Partitions of all topics.", topics.partitions_total)
    yield counter("messages_published", "Messages stored.", total.messages_in)
    yield counter("bytes_published", "Bytes of messages stored.", total.bytes_in)
    yield counter("messages_refused", "Messages that the log refused.", total.messages_failed)
    yield counter("publishes_repeated", "Known by their idempotency key.", total.repeats)
    yield counter("messages_read", "Messages read by offset.", total.messages_out)
    yield counter("bytes_read", "Bytes of messages read.", total.bytes_out)
    yield gauge("idempotency_keys", "Idempotency keys remembered.", len(broker.idempotency))
    yield counter("view_appends", "Appends that changed a view.", views.appends)
    yield counter("view_changes", "Changes of views.", views.changes)
    yield counter("view_changes_undone", "Appends of views refused and undone.", views.refused)
    yield counter("view_snapshots", "Snapshots of views written.", broker.view_snapshots.taken)
    yield counter(
        "view_snapshots_failed", "Snapshots of views not written.", broker.view_snapshots.failed
    )
    if topics_max:
        yield from _by_topic(broker, topics_max)


def _by_topic(broker: Broker, topics_max: int) -> Iterator[Metric]:
    traffic = broker.traffic.by_topic
    listed = nlargest(topics_max, traffic.items(), key=_activity)
    rows = (
        ("topic_messages_published", "Messages stored in the topic.", "messages_in"),
        ("topic_bytes_published", "Bytes stored in the topic.", "bytes_in"),
        ("topic_messages_refused", "Messages that the log refused.", "messages_failed"),
        ("topic_messages_read", "Messages read from the topic.", "messages_out"),
        ("topic_bytes_read", "Bytes read from the topic.", "bytes_out"),
    )
    for name, text, field in rows:
        samples: dict[tuple[str, ...], float] = {
            (topic,): getattr(one, field) for topic, one in listed
        }
        yield counters(name, text, ("topic",), samples)
    described = list(_described(broker, [topic for topic, _ in listed]))
    yield gauges(
        "topic_log_bytes",
        "Bytes of the topic's log.",
        ("topic",),
        {(one.topic.name,): _bytes_of(one) for one in described},
    )
    yield gauges(
        "topic_log_segments",
        "Files of the topic's log.",
        ("topic",),
        {(one.topic.name,): sum(part.segments for part in one.partitions) for one in described},
    )


def _described(broker: Broker, names: list[str]) -> Iterator[Description]:
    for name in names:
        # The page answers also while the log is closed.
        with suppress(TopicUnknown, EngineStopped):
            yield broker.topics.describe(name)


def _activity(item: tuple[str, TopicTraffic]) -> int:
    return item[1].messages_in + item[1].messages_out


def _bytes_of(description: Description) -> int:
    return sum(part.bytes for part in description.partitions)
