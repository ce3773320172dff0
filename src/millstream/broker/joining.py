"""What a member may ask for, and what it gets when it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream.broker.group_values import (
    ASSIGNORS,
    OFFSET_RESETS,
    Assignor,
    Join,
    OffsetReset,
    Poll,
)
from millstream.errors import ParameterInvalid

# Member ids go into paths and labels, and begin with the client id.
CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
# Kafka's clients choose ids of their own: UUIDs in base64, whichever alphabet of it they like.
MEMBER_ID = re.compile(r"[!-~]{1,200}")
# As many topics as one member needs; each is looked up at a join.
TOPICS_MAX = 1000
# Shorter ones end because of a busy machine, longer ones hold partitions of the dead for hours.
SESSION_TIMEOUT_MS_MIN = 500
SESSION_TIMEOUT_MS_MAX = 30 * 60 * 1000
AUTO_COMMIT_MS_MIN = 10
AUTO_COMMIT_MS_MAX = 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """As the settings have it."""

    session_timeout_ms: int = 30_000
    heartbeat_interval_ms: int = 3_000
    rebalance_timeout_ms: int = 60_000
    auto_commit_interval_ms: int = 5_000
    poll_records_max: int = 500
    poll_bytes_max: int = 4 * 1024 * 1024
    poll_wait_max_ms: int = 30_000
    assignor: Assignor = "sticky"
    auto_offset_reset: OffsetReset = "latest"
    groups_max: int = 10_000
    members_max: int = 1_000


def check_join(join: Join, options: GroupOptions) -> Join:
    """The join with everything filled in; ParameterInvalid for what is out of range."""
    if not 1 <= len(join.topics) <= TOPICS_MAX:
        raise _invalid("topics", f"a member reads 1 to {TOPICS_MAX} topics, not {len(join.topics)}")
    for name, value in (("client_id", join.client_id), ("instance_id", join.instance_id)):
        if value is not None and not CLIENT_ID.fullmatch(value):
            raise _invalid(name, f"{name} is 1 to 200 of letters, digits, `.`, `_`, `:` and `-`")
    if join.assignor is not None and join.assignor not in ASSIGNORS:
        raise _invalid("assignor", f"assignor is one of {', '.join(ASSIGNORS)}")
    reset = join.auto_offset_reset or options.auto_offset_reset
    if reset not in OFFSET_RESETS:
        raise _invalid("auto_offset_reset", f"it is one of {', '.join(OFFSET_RESETS)}")
    session_ms = _between(
        "session_timeout_ms",
        join.session_timeout_ms,
        options.session_timeout_ms,
        (SESSION_TIMEOUT_MS_MIN, SESSION_TIMEOUT_MS_MAX),
    )
    commit_ms = _between(
        "auto_commit_interval_ms",
        join.auto_commit_interval_ms,
        options.auto_commit_interval_ms,
        (AUTO_COMMIT_MS_MIN, AUTO_COMMIT_MS_MAX),
    )
    return join._replace(
        session_timeout_ms=session_ms,
        auto_offset_reset=reset,
        auto_commit_interval_ms=commit_ms,
    )


def check_poll(poll: Poll, options: GroupOptions) -> tuple[int, int, int]:
    """Records, bytes and milliseconds of waiting."""
    records, size, wait_ms = (
        options.poll_records_max,
        options.poll_bytes_max,
        options.poll_wait_max_ms,
    )
    return (
        _between("limit", poll.count_max, records, (1, records)),
        _between("bytes", poll.bytes_max, size, (1, size)),
        _between("timeout", poll.wait_ms, wait_ms, (0, wait_ms)),
    )


def _between(name: str, value: int | None, default: int, bounds: tuple[int, int]) -> int:
    if value is None:
        return default
    least, most = bounds
    if not least <= value <= most:
        raise _invalid(name, f"{name} lies between {least} and {most}; {value} does not")
    return value


def _invalid(parameter: str, message: str) -> ParameterInvalid:
    return ParameterInvalid(message, parameter=parameter)
