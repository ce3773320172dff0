"""Settings of leases, retries and dead letters, as rows of the one table in config.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.kinds import Choice, Duration, Integer, Size

if TYPE_CHECKING:
    from millstream.kinds import Kind

_SECOND_MS = 1_000
_DAY_MS = 24 * 3_600_000

DELIVERY_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "visibility",
        "visibility_ms",
        Duration(100, _DAY_MS // 2),
        "30s",
        "How long a record that was received by lease is a worker's own, unless its topic, the "
        "group or the request says otherwise. Then it comes back. Shorter notices a dead worker "
        "sooner; longer spares slow ones from having to extend.",
    ),
    (
        "deliveries_max",
        "deliveries_max",
        Integer(1, 200),
        "4",
        "How often a record is given out before it goes to the dead letters, in topics that do "
        "not say otherwise: the first time, and three retries.",
    ),
    (
        "retry_delay",
        "retry_delay_ms",
        Duration(0, _DAY_MS),
        "1s",
        "How long a record waits after its first failure, in topics that do not say otherwise. "
        "It waits twice as long after each further one.",
    ),
    (
        "retry_delay_max",
        "retry_delay_max_ms",
        Duration(0, _DAY_MS),
        "60s",
        "The longest that a record waits after a failure, in topics that do not say otherwise.",
    ),
    (
        "dead_letters",
        "dead_letters",
        Choice(("on", "off")),
        "on",
        "Whether records that used up their deliveries go to the topic `<topic>.dlq`, in topics "
        "that do not say otherwise. `off` drops them, counts them and says so in the log.",
    ),
    (
        "schedules_max",
        "schedules_max",
        Integer(1, 1_000_000_000),
        "20000000",
        "How many records may be scheduled at a time; each takes about 25 bytes of memory. Past "
        "it, scheduling is refused with `too_many_schedules`.",
    ),
    (
        "receive_records_max",
        "receive_records_max",
        Integer(1, 100_000),
        "1000",
        "The most records that one receive gives.",
    ),
    (
        "receive_bytes_max",
        "receive_bytes_max",
        Size(1024, 1 << 30),
        "4M",
        "About how many bytes of records one receive gives at most; one record always comes whole.",
    ),
    (
        "member_inflight_max",
        "member_inflight_max",
        Integer(1, 10_000_000),
        "1000",
        "How many records a member of a group may have leased at a time. Past it, a receive waits "
        "until some are settled.",
    ),
    (
        "group_inflight_max",
        "group_inflight_max",
        Integer(1, 10_000_000),
        "100000",
        "How many records of a group may be leased or wait for a retry at a time. One that is "
        "leased takes about 150 bytes of memory, one that failed about 800. Past it, a receive "
        "waits until some are settled.",
    ),
    (
        "breaker_settlings_min",
        "breaker_settlings_min",
        Integer(1, 1_000_000),
        "20",
        "From how many settlings within `breaker_window` on a group is judged. When too many of "
        "them failed, its records are retried later instead of going to the dead letters.",
    ),
    (
        "breaker_window",
        "breaker_window_ms",
        Duration(_SECOND_MS, _DAY_MS),
        "60s",
        "Over how long the settlings of a group are judged.",
    ),
    (
        "breaker_failures_percent",
        "breaker_failures_percent",
        Integer(1, 100),
        "50",
        "How many settlings in a hundred have to fail before a group's dead letters pause.",
    ),
    (
        "redrives_max",
        "redrives_max",
        Integer(1, 1000),
        "10",
        "How many redrives of dead letters may run at a time. Each takes turns with everything "
        "else that the broker does; more of them leave it less time.",
    ),
    (
        "redrive_history",
        "redrive_history_ms",
        Duration(0, 365 * _DAY_MS),
        "1d",
        "How long a redrive that is over is listed, with what it did; at most the last 1,000 are.",
    ),
)
