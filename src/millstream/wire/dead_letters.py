"""Dead letters as they are written: their topic, and the headers that say why one is there.

    ms-dead-topic           the topic that it was in, or was to go to
    ms-dead-partition       its partition there, and
    ms-dead-offset          its offset; not there when it never was in the topic
    ms-dead-group           the group that gave it up, or the writer that could not write it
    ms-dead-deliveries      how often the group was given it
    ms-dead-reason          `deliveries`: it used them all up; `rejected`: a worker said so, or it
                            could not be written
    ms-dead-error           what the last failure said, at most 1,000 bytes
    ms-dead-first-failure   when it failed first, and
    ms-dead-last-failure    when it failed last: milliseconds since 1970

All values are text, numbers in decimal, so that any Kafka client can read them.
"""

from __future__ import annotations

from hashlib import blake2b

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

# What is kept of an error text, as UTF-8.
ERROR_BYTES_MAX = 1_000
# What all of them take at most: names, the longest topic, group and error text, and numbers.
HEADERS_BYTES_MAX = 8 * 1024


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


def bounded_error(text: str) -> str:
    """An error text, cut to what is kept of it."""
    if text.isascii():
        return text[:ERROR_BYTES_MAX]
    raw = text.encode(errors="replace")[:ERROR_BYTES_MAX]
    return raw.decode(errors="ignore")
