"""What the sink was told, in one value that travels to every task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.spark.options import (
    BROKER_ROWS,
    SINK_ROWS,
    SOURCE_ROWS,
    BrokerPlace,
    option_invalid,
    read_options,
    read_place,
    was_given,
)
from millstream.wire.staged import WRITER_NAME

_WRITER = re.compile(WRITER_NAME)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    place: BrokerPlace
    topic: str | None
    compression: str
    batch_bytes: int
    # Of a broker that is not Millstream; None: what its topics take.
    request_bytes: int | None
    include_headers: bool
    to_dead_letters: bool
    # None: the query's id, or for a batch write a name of its own.
    writer: str | None
    # Of a batch write with `writer`.
    batch: int | None
    patience_s: float


def sink_options(
    given: Mapping[str, str], environment: Mapping[str, str], *, is_stream: bool
) -> SinkOptions:
    values = read_options(given, BROKER_ROWS + SINK_ROWS, SOURCE_ROWS)
    writer, batch = values["writer"], values["batch"]
    if writer is not None and _WRITER.fullmatch(str(writer)) is None:
        raise option_invalid(
            "writer", writer, "which is no name; use 1 to 249 letters, digits, dots, _ and -"
        )
    if is_stream and batch is not None:
        raise option_invalid(
            "batch", batch, "and a stream numbers its batches itself; leave it out"
        )
    if not is_stream and (writer is None) != (batch is None):
        name, value = ("batch", batch) if writer is None else ("writer", writer)
        other = "writer" if writer is None else "batch"
        raise option_invalid(
            name, value, f"and in a batch write it goes with the option {other}; give both or none"
        )
    batch_bytes, patience_ms = values["batchSize"], values["commitTimeout"]
    request_bytes = values["kafka.max.request.size"]
    assert isinstance(batch_bytes, int)
    assert isinstance(patience_ms, int)
    assert request_bytes is None or isinstance(request_bytes, int)
    assert batch is None or isinstance(batch, int)
    compression = values["compression"]
    if not was_given(given, "compression"):
        compression = values["kafka.compression.type"] or compression
    return SinkOptions(
        place=read_place(values, environment),
        topic=None if values["topic"] is None else str(values["topic"]),
        compression=str(compression),
        batch_bytes=batch_bytes,
        request_bytes=request_bytes,
        include_headers=bool(values["includeHeaders"]),
        to_dead_letters=values["onError"] == "deadletter",
        writer=None if writer is None else str(writer),
        batch=batch,
        patience_s=patience_ms / 1000,
    )
