"""What the listener knows of an API: its key, its versions, and who answers it.

An API whose messages are built by hand takes the body as bytes and answers pieces. All others have
their messages from kafka-python, whose classes are made from Kafka's own schemas: `control` puts
one around a handler that takes a message and answers one.

A handler answers at once or later (a `Pending`); None is no answer at all. The connection keeps the
order. What a handler raises is a fault of ours: it is logged and the connection ends, so each
handler puts the broker's errors into its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from millstream.engine.pending import Pending
from millstream.listeners.kafka.items import check_items
from millstream.wire.kafka.primitives import ITEMS_MAX, RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millstream.kinds import Address
    from millstream.wire.kafka.primitives import Pieces

    Reply: TypeAlias = Pieces | None
    Answer: TypeAlias = Callable[["Call"], Reply | Pending[Reply]]
    # Takes a call and a message of kafka-python's, answers one.
    Handler: TypeAlias = Callable[["Call", Any], Any]

# In which version the header of an API that has none becomes flexible.
NEVER = 1 << 15
# The largest message that is opened into objects. Those take about ten times as much memory, and
# the longest honest one (a thousand topics with their configs) stays below a megabyte.
CONTROL_BYTES_MAX = 4 * 1024 * 1024
# The largest request that has no batches in it: offsets of 20,000 partitions with 500 bytes of
# metadata each.
REQUEST_BYTES_MAX = 16 * 1024 * 1024


@dataclass(slots=True)
class Call:
    """One request, as handlers see it."""

    version: int
    client_id: str
    # Of the request, from its header on.
    body: memoryview
    flexible: bool
    # What the client is told to come back to: where it found us, unless a setting says otherwise.
    here: Address
    peer: str
    # Whether pieces of its answer may lie in files.
    takes_files: bool = False
    # Set by a handler that waits for something to come. Called when it may not wait longer,
    # because the client is gone or the broker stops: it then answers with what it has.
    on_hurry: Callable[[], None] | None = None

    def hurry(self) -> None:
        if self.on_hurry is not None:
            self.on_hurry()


class Api(NamedTuple):
    key: int
    name: str
    # The first and the last version that are advertised.
    versions: tuple[int, int]
    flexible_from: int
    answer: Answer
    # Of a request; None is what the listener takes at all.
    bytes_max: int | None = REQUEST_BYTES_MAX


def table_of(*groups: Iterable[Api]) -> dict[int, Api]:
    """By key; an API belongs to one group."""
    table: dict[int, Api] = {}
    for apis in groups:
        for api in apis:
            assert api.key not in table, f"{api.name} is there twice"
            table[api.key] = api
    return table


def control(request: Any, versions: tuple[int, int], handle: Handler) -> Api:
    """An API whose messages are of kafka-python's class `request` and the one that answers it."""
    flexible_from = next(
        (v for v in range(versions[1] + 1) if request.flexible_version_q(v)), NEVER
    )

    def answer(call: Call) -> Reply | Pending[Reply]:
        outcome = handle(call, decode(request, call))
        if not isinstance(outcome, Pending):
            return [outcome.encode(version=call.version)]
        encoded: Pending[Reply] = Pending()

        def done(one: Pending[Any]) -> None:
            if one.error is not None:
                encoded.fail(one.error)
                return
            try:
                encoded.succeed([one.result().encode(version=call.version)])
            except Exception as error:  # noqa: BLE001  whoever waits for the answer gets it
                encoded.fail(error)

        outcome.then(done)
        return encoded

    return Api(
        request.API_KEY, request.name.removesuffix("Request"), versions, flexible_from, answer
    )


def decode(request: Any, call: Call) -> Any:
    """The message; RequestInvalid when the bytes are none."""
    if len(call.body) > CONTROL_BYTES_MAX:
        raise RequestInvalid(f"a {request.name} of {len(call.body)} bytes")
    if len(call.body) > ITEMS_MAX:
        # Others are too short for so many. Before it is opened: objects are what takes long.
        check_items(request, call.body, call.version)
    try:
        message = request.decode(call.body, version=call.version)
    except Exception as error:
        raise RequestInvalid(f"no {request.name} of version {call.version}: {error}") from error
    _refuse_nulls(message, request.fields.values(), call.version)
    return message


def _refuse_nulls(message: Any, fields: Iterable[Any], version: int) -> None:
    """kafka-python reads null wherever a length says so; only some fields may have it."""
    for field in fields:
        if not field.for_version_q(version):
            continue
        value = getattr(message, field.name)
        if value is None:
            # The id of no topic, which is all zeros, is None to it too.
            if field.type_str != "uuid" and not field.nullable_for_version_q(version):
                raise RequestInvalid(f"the field {field.name} of a request is null")
        elif field.is_struct_array():
            for item in value:
                _refuse_nulls(item, field.fields.values(), version)
        elif isinstance(value, list) and None in value:
            raise RequestInvalid(f"the field {field.name} of a request has a null in it")
