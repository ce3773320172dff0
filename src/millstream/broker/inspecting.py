"""Batches of Kafka's clients that are opened, because their topic's setting `inspect` asks for it:
their records may have a lane, or be for later, and say so in headers.

    ms-lane         one of the five lanes, or its number
    ms-delay        milliseconds, or a text such as `30s`
    ms-deliver-at   a time in milliseconds since 1970, or as ISO 8601

These headers are taken out: a record that is read and published again must not wait again. The
records are published like those of HTTP, in batches of the broker's own making. Sequences of
idempotent producers are not in those, so a repeated batch is known by an idempotency key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.outgoing import Outgoing
from millstream.engine.pending import Pending
from millstream.errors import BatchRecordInvalid
from millstream.log import batch as batches
from millstream.log.producers import has_sequence
from millstream.wire.lanes import LANE_HEADER, NORMAL, lane_of_word
from millstream.wire.times import delay_ms_of, time_ms_of

if TYPE_CHECKING:
    from millstream.broker.outgoing import Published
    from millstream.broker.publishing import Publisher
    from millstream.log.batch import Data, Header, Record

DELAY_HEADER = "ms-delay"
TIME_HEADER = "ms-deliver-at"
HEADERS = frozenset((LANE_HEADER, DELAY_HEADER, TIME_HEADER))
# The answer when all records are for later: then no offset is known.
NO_OFFSET = -1


def publish_opened(
    publisher: Publisher, topic: str, number: int, data: Data, header: Header
) -> Pending[int] | None:
    """The offset of the first record that is not for later. None for a batch that may as well stay
    closed: nothing in it asks for anything."""
    records = batches.decode(data)
    is_asking = any(name in HEADERS for one in records for name, _ in one.headers)
    if not is_asking and not has_sequence(header):
        return None
    asked = [_outgoing(record, number) for record in records]
    key = None
    if has_sequence(header):
        key = f"kafka-{header.producer_id}-{header.producer_epoch}-{number}-{header.base_sequence}"
    done: Pending[int] = Pending()

    def published(one: Pending[Published]) -> None:
        if one.error is not None:
            done.fail(one.error)
            return
        result = one.result()
        now = (at for at in range(len(result.placed)) if at not in result.scheduled)
        first = next(now, None)
        done.succeed(NO_OFFSET if first is None else result.placed[first].offset)

    publisher.publish(topic, asked, idempotency_key=key).then(published)
    return done


def _outgoing(record: Record, number: int) -> Outgoing:
    lane, delay_ms, due_ms = NORMAL, None, None
    kept = []
    for name, value in record.headers:
        if name not in HEADERS:
            kept.append((name, value))
            continue
        word = _word(name, value)
        if name == LANE_HEADER:
            lane = lane_of_word(word)
        elif name == DELAY_HEADER:
            delay_ms = delay_ms_of(word)
        else:
            due_ms = time_ms_of(word)
    return Outgoing(
        record.key,
        record.value,
        tuple(kept),
        max(record.timestamp, 0),
        number,
        lane,
        delay_ms,
        due_ms,
    )


def _word(name: str, value: bytes | None) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        raise BatchRecordInvalid(f"the header {name} of a record is not a text") from None
