"""Produce: each batch is one append, and the answer waits for all of them.

A batch that is refused says so in its partition's place; the others are stored all the same. The
bytes go to the engine as they lie in the request.

Who asks for no answer is waited for all the same: its requests have their place in the line and
count against the limits, or it would send more than the disk takes, and lose what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.engine.pending import Pending
from millstream.errors import BatchLengthInvalid, MillstreamError
from millstream.listeners.kafka.apis import Api
from millstream.listeners.kafka.codes import message_of
from millstream.log.partition import PartitionId
from millstream.wire.kafka import produce as wire
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.primitives import RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context
    from millstream.wire.kafka.produce import Part, Result

# What `acks` may be: nobody hears, the leader, all. On one broker the last two are the same.
UNHEARD = 0
ACKS = (-1, 0, 1)


def produce_apis(context: Context) -> list[Api]:
    return [
        Api(
            wire.KEY,
            "Produce",
            wire.VERSIONS,
            wire.FLEXIBLE_FROM,
            lambda call: produce(context, call),
            bytes_max=None,
        )
    ]


def produce(context: Context, call: Call) -> Reply | Pending[Reply]:
    request = wire.read(call.body, call.version)
    refusal = _refusal(request, call.version)
    gathered = _Gathered(call.version, is_heard=request.acks != UNHEARD)
    for name, parts in request.topics:
        results = [wire.Result(part.number, Code.UNKNOWN_SERVER_ERROR) for part in parts]
        gathered.topics.append((name, results))
        for at, part in enumerate(parts):
            if refusal is not None:
                code, message = refusal
                results[at] = wire.Result(part.number, context.count(code), message=message)
            else:
                _append(context, name, part, gathered.place(results, at))
    return gathered.outcome()


def _refusal(request: wire.Request, version: int) -> tuple[Code, str] | None:
    """Of the whole request."""
    if version < wire.BATCHES_FROM:
        return Code.UNSUPPORTED_VERSION, "records of this old format are not taken"
    if request.transactional_id is not None:
        return Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "this broker has no transactions"
    if request.acks not in ACKS:
        return Code.INVALID_REQUIRED_ACKS, f"acks are -1, 0 or 1, not {request.acks}"
    return None


def _append(context: Context, name: str, part: Part, done: Callable[[Result], None]) -> None:
    number, records = part

    def refused(error: BaseException) -> None:
        code = context.code(error)
        done(wire.Result(number, code, message=message_of(error)))

    try:
        if not records:
            raise BatchLengthInvalid("there is no batch to store")
        pending, append_time_ms = context.broker.sealed_batches.append(name, number, records)
        start = context.engine.offsets(PartitionId(name, number)).start
    except MillstreamError as error:
        refused(error)
        return

    def appended(one: Pending[int]) -> None:
        if one.error is not None:
            refused(one.error)
        else:
            done(wire.Result(number, Code.NONE, one.result(), append_time_ms, start))

    pending.then(appended)


class _Gathered:
    """The results of one request, as they come."""

    __slots__ = ("_is_heard", "_left", "_pending", "_version", "topics")

    def __init__(self, version: int, *, is_heard: bool) -> None:
        self._version = version
        self._is_heard = is_heard
        self._left = 0
        self._pending: Pending[Reply] | None = None
        self.topics: list[tuple[str, list[Result]]] = []

    def place(self, results: list[Result], at: int) -> Callable[[Result], None]:
        self._left += 1

        def done(result: Result) -> None:
            results[at] = result
            self._left -= 1
            if not self._left and self._pending is not None:
                try:
                    self._pending.succeed(self._reply())
                except RequestInvalid as refused:
                    self._pending.fail(refused)

        return done

    def outcome(self) -> Reply | Pending[Reply]:
        """Once all are under way."""
        if not self._left:
            return self._reply()
        self._pending = Pending()
        return self._pending

    def _reply(self) -> Reply:
        if self._is_heard:
            return wire.response(self.topics, self._version)
        for _, results in self.topics:
            for one in results:
                if one.code != Code.NONE:
                    # As Kafka does: the end of the connection is all that such a client hears.
                    raise RequestInvalid(f"a batch without acks was refused: {one.message}")
        return None
