"""The settings of topics and publishing, as rows of the one table in config.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.kinds import Choice, Duration, Integer, Size

if TYPE_CHECKING:
    from millstream.kinds import Kind

SECOND_MS = 1_000
HOUR_MS = 3_600_000

TOPIC_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "topic_partitions",
        "topic_partitions",
        Integer(1, 10_000),
        "3",
        "How many partitions a topic gets when its maker does not say.",
    ),
    (
        "topic_partitions_max",
        "topic_partitions_max",
        Integer(1, 10_000),
        "1000",
        "How many partitions one topic may have. More is a 400 with `partition_count_invalid`.",
    ),
    (
        "partitions_max",
        "partitions_max",
        Integer(1, 1_000_000),
        "10000",
        "How many partitions all topics may have together. Each costs a folder, an open file and "
        "some memory. Past it, making topics is refused with `too_many_topics`.",
    ),
    (
        "topics_max",
        "topics_max",
        Integer(1, 1_000_000),
        "10000",
        "How many topics there may be. Making one more is refused with `too_many_topics`.",
    ),
    (
        "topic_auto_create",
        "topic_auto_create",
        Choice(("on", "off")),
        "on",
        "Whether publishing to a topic that is not there makes it. `off` answers 404 with "
        "`topic_unknown`, so that a misspelt name is noticed.",
    ),
    (
        "topic_message_bytes_max",
        "topic_message_bytes_max",
        Size(1, 64 << 20),
        "1M",
        "The largest message of a topic that does not say otherwise: key, value and headers "
        "together, without the broker's own headers. More is a 413 with `message_too_large`. "
        "Batches of Kafka's clients are not opened: for them `batch_bytes_max` holds.",
    ),
    (
        "partitioner",
        "partitioner",
        Choice(("murmur2", "murmur3")),
        "murmur2",
        "Which hash of a key chooses its partition, in topics that do not say otherwise. With "
        "`murmur2` a key lands where Kafka's clients would put it.",
    ),
    (
        "idempotency_window",
        "idempotency_window_ms",
        Duration(SECOND_MS, 7 * 24 * HOUR_MS),
        "10m",
        "How long an idempotency key is remembered. A publish with the same key in the same topic "
        "is stored once in that time, also across a restart. Longer takes more memory.",
    ),
    (
        "idempotency_keys_max",
        "idempotency_keys_max",
        Integer(1, 100_000_000),
        "1000000",
        "How many idempotency keys are remembered at a time, of all topics. One more is refused "
        "with 429 and `too_many_idempotency_keys`. Each takes about 300 bytes of memory.",
    ),
    (
        "metrics_topics",
        "metrics_topics",
        Integer(0, 10_000),
        "100",
        "How many topics the metrics page lists by name: those with the most messages since the "
        "start. All others are in its totals. 0 lists none.",
    ),
    (
        "view_snapshot_interval",
        "view_snapshot_interval_ms",
        Duration(SECOND_MS, 24 * HOUR_MS),
        "60s",
        "How often a child process writes down what the broker's own topics add up to, such as "
        "committed offsets, where there is enough that is new. A start reads that, and only what "
        "came after it from the log.",
    ),
)
