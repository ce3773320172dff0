"""Records received by lease, and how they are settled.

Settlings that are asked for while others are on their way travel together, in the next request:
one alone goes at once, and a thousand at a time cost a few requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

import msgspec

from millstream.client.transport import Transport
from millstream.client.values import encode_json
from millstream.errors import ClientClosed, MillstreamError, ParameterInvalid
from millstream.wire.leases import MEDIA, LeasedFields, Settle
from millstream.wire.refusals import refusal
from millstream.wire.retry import RetryPolicy

LeaseStart: TypeAlias = Literal["earliest", "latest"]
# What the broker settles in one request.
SETTLES_MAX = 10_000
# One request of those that travel together: its answer should not take long.
TOGETHER_MAX = 1_000


class Settled(NamedTuple):
    """What became of a delivery, or why the broker refused to say."""

    receipt: str
    # acked, retried, released, dead, dropped, parked or extended; empty when it was refused.
    outcome: str
    # When it comes back, or its lease runs out; 0 where there is no such time.
    when_ms: int = 0
    error: MillstreamError | None = None


class Keeper(Protocol):
    """Who looks after the leases of messages."""

    def let_go(self, message: Leased) -> None:
        """It is being settled."""
        ...


class Leased(LeasedFields, array_like=True, eq=False, weakref=True, dict=True):
    """A record that is yours until its lease runs out. Settle it before."""

    # Beside the fields, which are those of the wire: set by whoever received it.
    if TYPE_CHECKING:
        _settler: Settler
        _keeper: Keeper | None
        # By the loop's clock: when it came, and when its lease runs out.
        _since_s: float
        _until_s: float

    @property
    def text(self) -> str:
        """The value as text; of a tombstone the empty one."""
        return "" if self.value is None else self.value.decode()

    def json(self) -> Any:
        """The value as JSON; None of a tombstone."""
        return None if self.value is None else msgspec.json.decode(self.value)

    async def ack(self) -> Settled:
        """Done: it does not come again."""
        return await self._settle(Settle("ack", self.receipt))

    async def nack(self, error: str = "", *, delay_s: float | None = None) -> Settled:
        """Failed: it comes again after a while, or is a dead letter when that was the last try."""
        return await self._settle(nack_of(self, error, delay_s))

    async def reject(self, error: str = "") -> Settled:
        """Failed for good: to the dead letters."""
        return await self._settle(Settle("reject", self.receipt, error=error))

    async def release(self) -> Settled:
        """Not begun: it comes again at once, and this delivery does not count."""
        return await self._settle(Settle("release", self.receipt))

    async def extend(self, visibility_s: float | None = None) -> Settled:
        """Not done yet: the lease is so long from now on, or as long as it was at first."""
        settled = await self._send(extend_of(self, visibility_s))
        if visibility_s is not None:
            self._until_s = asyncio.get_running_loop().time() + visibility_s
        return settled

    async def _settle(self, settle: Settle) -> Settled:
        if self._keeper is not None:
            self._keeper.let_go(self)
        return await self._send(settle)

    async def _send(self, settle: Settle) -> Settled:
        settled = await self._settler.settle(settle)
        if settled.error is not None:
            raise settled.error
        return settled


def nack_of(message: Leased, error: str, delay_s: float | None) -> Settle:
    return Settle("nack", message.receipt, delay_ms=milliseconds(delay_s), error=error)


def extend_of(message: Leased, visibility_s: float | None) -> Settle:
    return Settle("extend", message.receipt, visibility_ms=milliseconds(visibility_s))


def milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else math.ceil(seconds * 1000)


class ReceiveOptions(NamedTuple):
    """What a receive asks for; None is what the broker's settings say."""

    topics: tuple[str, ...]
    group: str
    visibility_s: float | None = None
    member: str | None = None
    start: LeaseStart | None = None
    bytes_max: int | None = None


class Helping(msgspec.Struct):
    """An answer to a receive."""

    visibility_ms: int
    messages: list[Leased]
    limited_by: str | None = None


class _Result(msgspec.Struct):
    outcome: str = ""
    when_ms: int = 0


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]
    refused: int


_helping = msgspec.msgpack.Decoder(Helping)
_results = msgspec.json.Decoder(_Results)
_result = msgspec.json.Decoder(_Result)
_ACKED = b'{"outcome":"acked"}'


class LeaseCalls:
    """What a worker asks of the broker."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._settler: Settler | None = None

    @property
    def settler(self) -> Settler:
        """The one for messages that were received by hand."""
        if self._settler is None or self._settler.is_closed:
            self._settler = Settler(self)
        return self._settler

    async def receive(
        self,
        options: ReceiveOptions,
        count_max: int,
        wait_s: float,
        *,
        settler: Settler | None = None,
        keeper: Keeper | None = None,
        retry: RetryPolicy | None = None,
    ) -> Helping:
        wish: dict[str, object] = {
            "topics": options.topics,
            "limit": count_max,
            "wait_ms": milliseconds(wait_s),
            "visibility_ms": milliseconds(options.visibility_s),
            "member": options.member,
            "start": options.start,
            "bytes": options.bytes_max,
        }
        body = encode_json({name: value for name, value in wish.items() if value is not None})
        reply = await self._transport.ask(
            "POST",
            f"/v1/groups/{quote(options.group, safe='')}/receive",
            body,
            accept=MEDIA,
            # Of an answer that gets lost the leases run out, or are given back at once.
            is_repeatable=True,
            hold_s=wait_s,
            retry=retry,
        )
        helping = _helping.decode(reply.body)
        settler = settler or self.settler
        now_s = asyncio.get_running_loop().time()
        until_s = now_s + helping.visibility_ms / 1000
        for message in helping.messages:
            message._settler, message._keeper = settler, keeper
            message._since_s, message._until_s = now_s, until_s
        return helping

    async def settle(
        self, settles: Sequence[Settle], retry: RetryPolicy | None = None
    ) -> list[Settled]:
        """Each with its own result, in their order. What is refused raises nothing here.

        It is tried again when nobody knows what became of it: then one that was settled by the
        first try is refused as stale by the second."""
        found: list[Settled] = []
        for first in range(0, len(settles), SETTLES_MAX):
            part = settles[first : first + SETTLES_MAX]
            if all(one.kind == "ack" for one in part):
                path, page = "/v1/messages/ack", {"receipts": [one.receipt for one in part]}
            else:
                path, page = "/v1/messages/settle", {"settles": part}  # type: ignore[dict-item]
            reply = await self._transport.ask(
                "POST", path, encode_json(page), is_repeatable=True, retry=retry
            )
            found += self._settled(part, reply.body)
        return found

    def _settled(self, settles: Sequence[Settle], body: bytes) -> list[Settled]:
        answer = _results.decode(body)
        found: list[Settled] = []
        for settle, raw in zip(settles, answer.results, strict=True):
            text = bytes(raw)
            if text == _ACKED:
                found.append(Settled(settle.receipt, "acked"))
                continue
            result = _result.decode(text)
            error = None
            if not result.outcome:
                error = refusal(self._transport.place.url, 409, text)
            found.append(Settled(settle.receipt, result.outcome, result.when_ms, error))
        return found


class Settler:
    """Settlings on their way: one request at a time, and all that came meanwhile in the next."""

    def __init__(self, calls: LeaseCalls, retry: RetryPolicy | None = None) -> None:
        self._calls = calls
        self._retry = retry
        self._waiting: list[tuple[Settle, asyncio.Future[Settled]]] = []
        self._task: asyncio.Task[None] | None = None
        self.is_closed = False

    def settle(self, settle: Settle) -> asyncio.Future[Settled]:
        """Its result, also when it was refused; an error when nobody knows."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Settled] = loop.create_future()
        if self.is_closed:
            future.set_exception(ClientClosed("this worker was closed; receive the record again"))
            return future
        self._waiting.append((settle, future))
        if self._task is None:
            self._task = loop.create_task(self._send())
        return future

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def flush(self) -> None:
        """Until all that was asked for has its result."""
        while self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        self.is_closed = True
        await self.flush()

    async def _send(self) -> None:
        try:
            while self._waiting:
                part = self._waiting[:TOGETHER_MAX]
                del self._waiting[:TOGETHER_MAX]
                try:
                    results = await self._calls.settle([one for one, _ in part], self._retry)
                except Exception as error:  # noqa: BLE001  each is told, whatever it is
                    for _, future in part:
                        if not future.done():
                            future.set_exception(error)
                            # Not everybody waits for it, and that is no bug to warn of.
                            future.exception()
                    continue
                for (_, future), result in zip(part, results, strict=True):
                    if not future.done():
                        future.set_result(result)
        finally:
            self._task = None


def receipts_of(messages: Leased | str | Iterable[Leased | str]) -> list[str]:
    """Of one message or many, as they are or by their receipts."""
    ones = (messages,) if isinstance(messages, Leased | str) else messages
    found = [one.receipt if isinstance(one, Leased) else one for one in ones]
    if not found:
        raise ParameterInvalid("give at least one message", parameter="messages")
    return found
