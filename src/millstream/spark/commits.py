"""What a query tells its group: the offsets of micro-batches that are done."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.errors import BrokerUnreachable, KafkaRefused
from millstream.spark.kafka_client import Kafka
from millstream.spark.positions import Position, is_same_topic
from millstream.wire.kafka.codes import Code

logger = logging.getLogger("millstream.spark")

# A commit that was refused is tried again so much later: its group may have lost its members.
AGAIN_S = 10.0


def is_name_refused(error: Exception) -> bool:
    """Whether the broker takes no group of that name."""
    code = Code.INVALID_GROUP_ID
    return isinstance(error, KafkaRefused) and error.fields["kafka_code"] == code


class Commits:
    """Each position is told once. A broker that refuses it does not end the query, and is asked
    again later."""

    def __init__(self, group: str, clock: Callable[[], float]) -> None:
        self._group = group
        self._clock = clock
        self._done: Position | None = None
        self._refused: Position | None = None
        self._next_s = 0.0

    def make(self, kafka: Kafka, position: Position, known: Position) -> None:
        """`known` is what there is: a topic that is gone has no offsets to commit."""
        is_early = position == self._refused and self._clock() < self._next_s
        if position == self._done or is_early:
            return
        offsets = {
            part: offset
            for part, offset in position.offsets.items()
            if is_same_topic(position, known, part[0]) and part in known.offsets
        }
        try:
            if offsets:
                kafka.commit(self._group, offsets)
        except (KafkaRefused, BrokerUnreachable) as error:
            if is_name_refused(error):
                # That does not pass, and the first commit is made before the first batch.
                raise
            logger.warning("offsets of the group %s: %s", self._group, error.message)
            self._refused, self._next_s = position, self._clock() + AGAIN_S
        else:
            self._done = position
