"""Dead letters as values: what a record says of its end, in headers that are added to it.

    ms-dead-topic           the topic that it was in
    ms-dead-partition       its partition there, and
    ms-dead-offset          its offset
    ms-dead-group           the group that gave it up
    ms-dead-deliveries      how often the group was given it
    ms-dead-reason          `deliveries`: it used them all up; `rejected`: a worker said so
    ms-dead-error           what the last failure said, at most 1,000 characters
    ms-dead-first-failure   when it failed first, and
    ms-dead-last-failure    when it failed last: milliseconds since 1970

All values are text, numbers in decimal, so that any Kafka client can read them. Key, value, time
and the other headers of the record stay as they were.

One that was put back says so, and keeps that when it becomes a dead letter again:

    ms-redrives             how often it was put back
    ms-first-time           the time that it had before the first of these
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.delivery_values import ERROR_TEXT_MAX
from millstream.log.batch import LANE_HEADER, LANES

if TYPE_CHECKING:
    from millstream.broker.delivery_values import Reason
    from millstream.log.batch import Headers, Record

SUFFIX = ".dlq"
# Kafka's limit, and ours.
TOPIC_NAME_MAX = 249
# Of a name that is too long for the suffix, so much is kept; a digest of all of it follows.
DIGEST_BYTES = 8
CUT_NAME_MAX = TOPIC_NAME_MAX - len(SUFFIX) - 2 * DIGEST_BYTES - 1

HEADER_PREFIX = "ms-dead-"
TOPIC_HEADER = "ms-dead-topic"
PARTITION_HEADER = "ms-dead-partition"
OFFSET_HEADER = "ms-dead-offset"
GROUP_HEADER = "ms-dead-group"
DELIVERIES_HEADER = "ms-dead-deliveries"
REASON_HEADER = "ms-dead-reason"
ERROR_HEADER = "ms-dead-error"
FIRST_FAILURE_HEADER = "ms-dead-first-failure"
LAST_FAILURE_HEADER = "ms-dead-last-failure"
REDRIVES_HEADER = "ms-redrives"
FIRST_TIME_HEADER = "ms-first-time"

# What all of them take at most: names, the longest topic, group and error text, and numbers.
HEADERS_BYTES_MAX = 8 * 1024

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


def is_dead_letter_topic(name: str) -> bool:
    """Such a topic has no dead letters of its own: what fails there stays there."""
    return name.endswith(SUFFIX) and len(name) > len(SUFFIX)


def dead_letter_topic(name: str) -> str:
    """Where the dead letters of a topic are. A name that has no room for the suffix is cut, and
    gets a digest of the whole, so that two long names never share their dead letters."""
    if len(name) + len(SUFFIX) <= TOPIC_NAME_MAX:
        return name + SUFFIX
    digest = blake2b(name.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return f"{name[:CUT_NAME_MAX]}-{digest}{SUFFIX}"


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
        (ERROR_HEADER, facts.error[:ERROR_TEXT_MAX]),
        (FIRST_FAILURE_HEADER, str(facts.first_failure_ms)),
        (LAST_FAILURE_HEADER, str(facts.last_failure_ms)),
    )
    return (*kept, *((name, text.encode(errors="replace")) for name, text in added))
