"""The rows of the settings table for volatile queues and their snapshots."""

from __future__ import annotations

from millstream.kinds import Choice, Duration, Integer, Kind, Size

_SECOND_MS = 1_000
_HOUR_MS = 3_600_000
_KIB, _GIB = 1 << 10, 1 << 30

QUEUE_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "queue_capacity",
        "queue_capacity",
        Integer(1, 2**31 - 1),
        "100000",
        "How many messages a queue holds, unless `PUT /queues/{name}` says otherwise. One more is "
        "refused with 429 and `queue_full`.",
    ),
    (
        "queue_bytes_max",
        "queue_bytes_max",
        Size(_KIB, 1024 * _GIB),
        "256M",
        "How many bytes of messages a queue holds, unless `PUT /queues/{name}` says otherwise.",
    ),
    (
        "queues_bytes_max",
        "queues_bytes_max",
        Size(_KIB, 1024 * _GIB),
        "1G",
        "How many bytes of messages all queues hold together. Past it, enqueue is refused with "
        "429 and `memory_full`, whatever room a queue still has.",
    ),
    (
        "queues_max",
        "queues_max",
        Integer(1, 10_000_000),
        "1000",
        "How many queues there may be. Making one more is refused with 429 and `too_many_queues`.",
    ),
    (
        "message_bytes_max",
        "message_bytes_max",
        Size(1, _GIB),
        "128K",
        "The largest message of a queue, and the largest body of an enqueue. More is a 413.",
    ),
    (
        "body_bytes_max",
        "body_bytes_max",
        Size(_KIB, _GIB),
        "16M",
        "The largest body of any other request, such as a batch of messages. More is a 413.",
    ),
    (
        "snapshot_at_stop",
        "snapshot_at_stop",
        Choice(("on", "off")),
        "off",
        "Whether queues outlive a restart: what they hold when the broker stops is written to "
        "`snapshots/` in the data directory, and loaded at the next start. A broker that is "
        "killed writes nothing; the next start then loads the snapshot before, and messages that "
        "were dequeued since are there again.",
    ),
    (
        "snapshot_interval",
        "snapshot_interval_ms",
        Duration(_SECOND_MS, 24 * _HOUR_MS, otherwise="off"),
        "off",
        "How often queues that changed are written to `snapshots/`, to be loaded at the next "
        "start. A crash loses what was enqueued since, and brings back what was dequeued since.",
    ),
)
