"""The topic in which Kafka keeps committed offsets, as clients of groups expect to see it.

Ours are in a view, in records of another form that nobody else reads. But a client may ask for this
topic by name, and one that takes every topic by a pattern, internal ones too, has it among them. So
it is there once a group was looked for, as in Kafka: internal, with one partition, in which nothing
is and nothing ever comes. It is read like any empty topic; who would write to it, change it or
delete it is refused, as with all that begins with `__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.list_offsets import EARLIEST, LATEST, NOWHERE, Found

if TYPE_CHECKING:
    from millstream.listeners.kafka.context import Context

NAME = "__consumer_offsets"
# The same everywhere, because it is the same nothing everywhere.
ID = UUID("6d696c6c-7374-4265-a16d-6f6666736574")
PARTITIONS = 1
EPOCH = 0


def is_there(context: Context) -> bool:
    """Whether it is listed: Kafka makes it when the first group looks for its coordinator."""
    if not context.has_groups:
        context.has_groups = context.broker.directory.has_groups()
    return context.has_groups


def code_of_partition(context: Context, number: int) -> Code:
    if 0 <= number < PARTITIONS:
        return Code.NONE
    return context.count(Code.UNKNOWN_TOPIC_OR_PARTITION)


def code_of_offset(context: Context, number: int, offset: int) -> Code:
    """Of a fetch from there."""
    code = code_of_partition(context, number)
    return code if code or offset == 0 else context.count(Code.OFFSET_OUT_OF_RANGE)


def find(context: Context, number: int, timestamp_ms: int) -> Found:
    """What ListOffsets says: its start is its end, and no time is in it."""
    code = code_of_partition(context, number)
    if code or timestamp_ms not in (LATEST, EARLIEST):
        return Found(number, code)
    return Found(number, code, NOWHERE, 0, EPOCH)
