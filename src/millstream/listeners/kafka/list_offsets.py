"""Where offsets are: ListOffsets, and OffsetForLeaderEpoch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.fetch import check_epoch
from millstream.wire.kafka import list_offsets as wire
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context
    from millstream.log.partition import PartitionId
    from millstream.wire.kafka.list_offsets import Found, Part

NO_EPOCH = -1
# Some producers give no time, which is written as -1; those count as the oldest.
TIMESTAMP_MIN = -1
# Partitions that are looked at in one turn of the loop.
IN_TURN = 200


def list_offsets_apis(context: Context) -> list[Api]:
    return [
        Api(
            wire.KEY,
            "ListOffsets",
            wire.VERSIONS,
            wire.FLEXIBLE_FROM,
            lambda call: follow(_list(context, call)),
        ),
        control(OffsetForLeaderEpochRequest, (2, 4), lambda _, asked: epoch_ends(context, asked)),
    ]


# ---- ListOffsets


def _list(context: Context, call: Call) -> Generator[Pending[Any], Any, Reply]:
    topics: list[tuple[str, list[Found]]] = []
    asked = wire.read(call.body, call.version)
    counts = Counter((name, part.number) for name, parts in asked for part in parts)
    at = 0
    for name, parts in asked:
        found: list[Found] = []
        for part in parts:
            at += 1
            if at % IN_TURN == 0:
                yield context.pause()
            if counts[name, part.number] > 1:
                # As Kafka does.
                found.append(wire.Found(part.number, context.count(Code.INVALID_REQUEST)))
                continue
            try:
                found.append((yield from _find(context, call, name, part)))
            except MillstreamError as error:
                found.append(wire.Found(part.number, context.code(error)))
        topics.append((name, found))
    return wire.response(topics, call.version)


def _find(
    context: Context, call: Call, name: str, part: Part
) -> Generator[Pending[Any], Any, Found]:
    number, epoch, timestamp_ms = part
    if name == offsets_topic.NAME:
        return offsets_topic.find(context, number, timestamp_ms)
    id = context.broker.topics.partition_of(name, number)
    if epoch >= 0 and (code := check_epoch(context, id, epoch)):
        return wire.Found(number, code)
    engine = context.engine
    start, end = engine.offsets(id)
    own = engine.leader_epoch(id)
    if timestamp_ms == wire.LATEST:
        return wire.Found(number, Code.NONE, wire.NOWHERE, end, own)
    if timestamp_ms == wire.EARLIEST:
        return wire.Found(number, Code.NONE, wire.NOWHERE, start, _epoch_of(context, id, start))
    if timestamp_ms == wire.NEWEST and call.version >= wire.NEWEST_FROM:
        at = yield from _newest(context, id, start, end)
    elif timestamp_ms < 0:
        return wire.Found(number, context.count(Code.UNSUPPORTED_VERSION))
    else:
        at = yield engine.find(id, timestamp_ms)
    if at is None:
        return wire.Found(number, Code.NONE)
    return wire.Found(number, Code.NONE, at[1], at[0], _epoch_of(context, id, at[0]))


def _epoch_of(context: Context, id: PartitionId, offset: int) -> int:
    """In which a record was written; where there is none yet, that of who leads."""
    engine = context.engine
    own = engine.leader_epoch(id)
    epoch, end = engine.epoch_end(id, own)
    if end <= offset:
        return own
    while True:
        before, end = engine.epoch_end(id, epoch - 1)
        if before < 0 or end <= offset:
            return epoch
        epoch = before


def _newest(
    context: Context, id: PartitionId, start: int, end: int
) -> Generator[Pending[Any], Any, tuple[int, int] | None]:
    """Offset and time of the first record with the newest time: by looking for later and later
    ones, in steps that double and then halve, because the log can only be asked from a time on."""
    at: tuple[int, int] | None = None
    if start < end:
        at = yield context.engine.find(id, TIMESTAMP_MIN)
    step, is_growing = 1, True
    while at is not None and step:
        later = yield context.engine.find(id, at[1] + step)
        if later is None:
            is_growing = False
            step //= 2
        else:
            at = later
            step = step * 2 if is_growing else step
    return at


# ---- OffsetForLeaderEpoch


def epoch_ends(context: Context, asked: Any) -> Any:
    """Where epochs ended, by which a client finds out that what it read is gone."""
    Topic = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult  # noqa: N806  a class
    return OffsetForLeaderEpochResponse(
        throttle_time_ms=0,
        topics=[
            Topic(
                topic=topic.topic,
                partitions=[_epoch_end(context, topic.topic, part) for part in topic.partitions],
            )
            for topic in asked.topics
        ],
    )


def _epoch_end(context: Context, name: str, part: Any) -> Any:
    epoch, end, code = NO_EPOCH, wire.NOWHERE, Code.NONE
    if name == offsets_topic.NAME:
        return _epoch(part.partition, offsets_topic.EPOCH, 0, code)
    try:
        id = context.broker.topics.partition_of(name, part.partition)
        if part.current_leader_epoch >= 0:
            code = check_epoch(context, id, part.current_leader_epoch)
        own = context.engine.leader_epoch(id)
        if not code and part.leader_epoch == own:
            # Nothing may have been written in it yet.
            epoch, end = own, context.engine.offsets(id).high_watermark
        elif not code and part.leader_epoch < own:
            epoch, end = context.engine.epoch_end(id, part.leader_epoch)
    except MillstreamError as error:
        code = context.code(error)
    return _epoch(part.partition, epoch, end, code)


def _epoch(number: int, epoch: int, end: int, code: Code) -> Any:
    One = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult.EpochEndOffset  # noqa: N806
    return One(error_code=code, partition=number, leader_epoch=epoch, end_offset=end)
