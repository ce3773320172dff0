"""The rows of the settings table for groups, their members and what they commit."""

from __future__ import annotations

from millstream.kinds import Choice, Duration, Integer, Kind, Size

_SECOND_MS = 1_000
_HOUR_MS = 3_600_000

GROUP_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "group_session_timeout",
        "group_session_timeout_ms",
        Duration(500, 30 * 60 * _SECOND_MS),
        "30s",
        "How long a member of a group may be silent before its partitions go to others, unless "
        "it asks for another time when it joins. Shorter notices a crash sooner, and takes a "
        "long pause for one.",
    ),
    (
        "group_heartbeat_interval",
        "group_heartbeat_interval_ms",
        Duration(100, 10 * 60 * _SECOND_MS),
        "3s",
        "How often members are told to send a heartbeat. A member that is busy with records "
        "hears that late of a rebalance.",
    ),
    (
        "group_rebalance_timeout",
        "group_rebalance_timeout_ms",
        Duration(500, _HOUR_MS),
        "60s",
        "How long a member may take to give up partitions that are to go to another. After that "
        "they are taken, and what it still does with them may be done twice.",
    ),
    (
        "group_forming",
        "group_forming_ms",
        Duration(0, 60 * _SECOND_MS),
        "100ms",
        "How long a group of Kafka's classic protocol that nobody is in waits for more members "
        "before it deals out partitions. Each that comes has it wait as long again. Consumers "
        "that start within that time make one rebalance, not one each.",
    ),
    (
        "group_assignor",
        "group_assignor",
        Choice(("sticky", "range", "round_robin")),
        "sticky",
        "How partitions are dealt out to members that do not ask for another way. `sticky`: even, "
        "and everybody keeps as much as possible. `range`: neighbouring partitions of each topic. "
        "`round_robin`: all partitions in turn.",
    ),
    (
        "group_auto_offset_reset",
        "group_auto_offset_reset",
        Choice(("earliest", "latest", "none")),
        "latest",
        "Where a group begins in a partition in which it has committed nothing, or what it "
        "committed was removed by retention, unless a member says otherwise. `none` answers "
        "`offset_unknown` instead.",
    ),
    (
        "group_auto_commit_interval",
        "group_auto_commit_interval_ms",
        Duration(10, _HOUR_MS),
        "5s",
        "How often the broker commits for members that do not commit by themselves. A crash of "
        "the member gives it the records since again.",
    ),
    (
        "poll_records_max",
        "poll_records_max",
        Integer(1, 100_000),
        "500",
        "The most records that one poll of a group gives.",
    ),
    (
        "poll_bytes_max",
        "poll_bytes_max",
        Size(1024, 1 << 30),
        "4M",
        "About how many bytes of records one poll of a group gives at most; one record always "
        "comes whole.",
    ),
    (
        "poll_timeout_max",
        "poll_timeout_max_ms",
        Duration(0, 10 * 60 * _SECOND_MS),
        "30s",
        "The longest time that a poll may wait for records. Proxies that end quiet requests "
        "sooner need less.",
    ),
    (
        "groups_max",
        "groups_max",
        Integer(1, 10_000_000),
        "10000",
        "How many groups there may be, with and without members. One more is refused with "
        "`too_many_groups`.",
    ),
    (
        "group_members_max",
        "group_members_max",
        Integer(1, 100_000),
        "1000",
        "How many members a group may have. One more is refused with `too_many_members`.",
    ),
    (
        "consumers_max",
        "consumers_max",
        Integer(1, 10_000_000),
        "100000",
        "How many sequential consumers have a position at the broker.",
    ),
    (
        "offsets_retention",
        "offsets_retention_ms",
        Duration(60 * _SECOND_MS, otherwise="unlimited"),
        "7d",
        "How long the offsets of a group without members are kept after the last commit, and the "
        "position of a sequential consumer after it last acked or asked for messages; while it is "
        "connected they are kept. A group that comes back later begins as a new one.",
    ),
)
