"""Dead letters as values. The headers that say why one is there are in `wire/dead_letters.py`.

Key, value, time and the other headers of the record stay as they were. One that was put back says
so, and keeps that when it becomes a dead letter again:

    ms-redrives             how often it was put back
    ms-first-time           the time that it had before the first of these
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.log.batch import LANE_HEADER, LANES
from millstream.wire.dead_letters import (
    DELIVERIES_HEADER,
    ERROR_HEADER,
    FIRST_FAILURE_HEADER,
    GROUP_HEADER,
    HEADER_PREFIX,
    HEADERS_BYTES_MAX,
    LAST_FAILURE_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    SUFFIX,
    TOPIC_HEADER,
    bounded_error,
    dead_letter_topic,
    is_dead_letter_topic,
)

if TYPE_CHECKING:
    from millstream.broker.delivery_values import Reason
    from millstream.log.batch import Headers, Record

__all__ = [
    "DELIVERIES_HEADER",
    "ERROR_HEADER",
    "FIRST_FAILURE_HEADER",
    "FIRST_TIME_HEADER",
    "GROUP_HEADER",
    "HEADERS_BYTES_MAX",
    "HEADER_PREFIX",
    "LAST_FAILURE_HEADER",
    "NORMAL_LANE",
    "OFFSET_HEADER",
    "PARTITION_HEADER",
    "REASON_HEADER",
    "REDRIVES_HEADER",
    "SUFFIX",
    "TOPIC_HEADER",
    "DeadFacts",
    "DeadLetter",
    "dead_headers",
    "dead_letter_topic",
    "is_dead_letter_topic",
]

REDRIVES_HEADER = "ms-redrives"
FIRST_TIME_HEADER = "ms-first-time"

NORMAL_LANE = LANES.index("normal")


class DeadFacts(NamedTuple):
    """Why a record is a dead letter."""

    group: str
    deliveries: int
    reason: Reason
    error: str
    first_failure_ms: int
    last_failure_ms: int


class DeadLetter(NamedTuple):
    """A record on its way to the dead letters, from a partition of its topic."""

    partition: int
    record: Record
    # Its index in LANES.
    lane: int
    facts: DeadFacts


def dead_headers(topic: str, letter: DeadLetter) -> Headers:
    """The headers of a record as a dead letter. Facts of an earlier end give way to these."""
    facts, record = letter.facts, letter.record
    kept = tuple(one for one in record.headers if not one[0].startswith(HEADER_PREFIX))
    if letter.lane != NORMAL_LANE and all(name != LANE_HEADER for name, _ in kept):
        kept = (*kept, (LANE_HEADER, LANES[letter.lane].encode()))
    added = (
        (TOPIC_HEADER, topic),
        (PARTITION_HEADER, str(letter.partition)),
        (OFFSET_HEADER, str(record.offset)),
        (GROUP_HEADER, facts.group),
        (DELIVERIES_HEADER, str(facts.deliveries)),
        (REASON_HEADER, facts.reason),
        (ERROR_HEADER, bounded_error(facts.error)),
        (FIRST_FAILURE_HEADER, str(facts.first_failure_ms)),
        (LAST_FAILURE_HEADER, str(facts.last_failure_ms)),
    )
    return (*kept, *((name, text.encode(errors="replace")) for name, text in added))
