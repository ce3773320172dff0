"""Ids of idempotent producers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.listeners.kafka.apis import Api, control
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.listeners.kafka.context import Context

# Epochs are 16 bits; past the last one a producer gets a new id.
EPOCH_MAX = 2**15 - 1


def producer_apis(context: Context) -> list[Api]:
    return [
        control(
            InitProducerIdRequest,
            (0, 4),
            lambda call, asked: follow(_init(context, call.version, asked)),
        )
    ]


def _init(context: Context, version: int, asked: Any) -> Generator[Pending[Any], Any, Any]:
    """A new id; or, for a producer that goes on after an error, its own with the next epoch: what
    it sent before and may still be on its way is then refused."""
    if asked.transactional_id is not None:
        return _refused(context.count(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
    if version >= 3 and asked.producer_id >= 0 and 0 <= asked.producer_epoch < EPOCH_MAX:
        return _given(asked.producer_id, asked.producer_epoch + 1)
    try:
        id = yield context.engine.producer_id()
    except MillstreamError as error:
        return _refused(context.code(error))
    return _given(id, 0)


def _given(id: int, epoch: int) -> Any:
    return InitProducerIdResponse(
        throttle_time_ms=0, error_code=Code.NONE, producer_id=id, producer_epoch=epoch
    )


def _refused(code: Code) -> Any:
    return InitProducerIdResponse(
        throttle_time_ms=0, error_code=code, producer_id=-1, producer_epoch=-1
    )
