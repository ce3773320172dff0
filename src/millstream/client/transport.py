"""A broker somewhere: connections that are kept open, and calls that are tried again.

`ask` is one call. The pool opens a connection when all are busy, up to a limit; past it calls wait
in line. Calls that the broker may hold for long (long polls) have connections beside that limit,
so that they never keep the others from being served; there is one for each caller at most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping

import millstream
from millstream.client.http import AnswerInvalid, Connection, Reply, Unheard, Unsent, request_head
from millstream.errors import (
    BrokerUnreachable,
    ClientClosed,
    MillstreamError,
    OutcomeUnknown,
)
from millstream.wire.places import Place
from millstream.wire.refusals import refusal, retry_after_s
from millstream.wire.retry import RetryPolicy

JSON = b"application/json"
RAW = b"application/octet-stream"
# What one answer may hold: a page of messages is at most 16 MiB of values, as JSON in base64.
ANSWER_BYTES_MAX = 64 * 2**20
CONNECT_S = 10.0
# A broker closes idle connections after 75 s. One that is used just then would lose its request.
IDLE_S_MAX = 60.0


class Transport:
    """Calls to one broker. To be used on one event loop."""

    def __init__(
        self,
        server: str,
        *,
        connections_max: int = 32,
        retry: RetryPolicy | None = None,
        answer_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.place = Place.of(server)
        self.retry = retry or RetryPolicy()
        self.tls = (tls or ssl.create_default_context()) if self.place.is_secure else None
        self._answer_s = answer_s
        self._connections_max = connections_max
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        # Calls under way that count against the limit, and those that wait for one of them.
        self._busy = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._is_closed = False
        self._all_ended: asyncio.Future[None] | None = None
        self._fixed = (
            f"host: {self.place.authority}\r\n"
            f"user-agent: millstream-python/{millstream.__version__}\r\naccept: "
        ).encode("ascii")

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        media: bytes = JSON,
        accept: bytes = JSON,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool | None = None,
        hold_s: float = 0.0,
        retry: RetryPolicy | None = None,
    ) -> Reply:
        """One call, tried again where that is safe; raises what the broker refuses.

        `is_repeatable` says that a second try does no harm when nobody knows about the first; by
        default that is so for GET, PUT and DELETE. The broker may hold its answer for `hold_s`.
        """
        if is_repeatable is None:
            is_repeatable = method in ("GET", "PUT", "DELETE")
        policy = retry or self.retry
        pauses = policy.pauses()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + policy.timeout_s + hold_s
        while True:
            wait_s = None
            try:
                reply = await self.ask_once(
                    method,
                    path,
                    body,
                    media=media,
                    accept=accept,
                    headers=headers,
                    hold_s=hold_s,
                )
            except (BrokerUnreachable, OutcomeUnknown) as caught:
                if isinstance(caught, OutcomeUnknown) and not is_repeatable:
                    raise
                error: MillstreamError = caught
            else:
                if reply.status < 400:
                    return reply
                error = refusal(self.place.url, reply.status, reply.body)
                is_unknown = isinstance(error, OutcomeUnknown) and is_repeatable
                is_stranger = isinstance(error, BrokerUnreachable)
                if is_stranger or not (error.retriable or is_unknown):
                    raise error
                wait_s = retry_after_s(reply.headers.get(b"retry-after"))
            pause_s = pauses.next_s(wait_s)
            if loop.time() + pause_s >= deadline_s:
                raise error
            await asyncio.sleep(pause_s)

    async def ask_once(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        media: bytes = JSON,
        accept: bytes = JSON,
        headers: Mapping[str, str] | None = None,
        hold_s: float = 0.0,
    ) -> Reply:
        """One try, whatever its status. BrokerUnreachable when nothing was sent, OutcomeUnknown
        when no whole answer came."""
        fixed = self._fixed + accept + b"\r\n"
        if headers:
            extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            assert extra.count("\n") == len(headers)
            fixed += extra.encode("latin-1")
        head = request_head(method, path, fixed, len(body), media if body else None)
        request = [head, body] if body else [head]
        is_counted = hold_s == 0.0
        if is_counted:
            await self._enter()
        try:
            return await self._exchange(request, self._answer_s + hold_s)
        finally:
            if is_counted:
                self._leave()

    async def close(self) -> None:
        """End all connections; calls that are under way fail."""
        self._is_closed = True
        for connection in list(self._open):
            connection.close()
        for waiter in self._line:
            if not waiter.done():
                waiter.set_exception(_closed())
        self._line.clear()
        if self._open:
            # The loop tells them in its next turn.
            self._all_ended = asyncio.get_running_loop().create_future()
            await self._all_ended

    @property
    def connections(self) -> int:
        return len(self._open)

    # ---- connections

    async def _exchange(self, request: list[bytes], answer_s: float) -> Reply:
        connection = await self._connection()
        waiter = connection.exchange(request)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(answer_s, connection.give_up, f"no answer in {answer_s:g} s")
        try:
            reply = await waiter
        except Unsent as error:
            raise self.unreachable(error) from error
        except AnswerInvalid as error:
            raise OutcomeUnknown(
                f"what answers at {self.place.url} is no broker: {error}"
            ) from error
        except Unheard as error:
            raise OutcomeUnknown(
                f"{self.place.url} did not answer: {error}; the broker may have done what was "
                "asked, or not"
            ) from error
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next call.
            connection.close()
            raise
        finally:
            timer.cancel()
        if connection.is_open and not self._is_closed:
            connection.idle_since_s = loop.time()
            self._idle.append(connection)
        return reply

    async def _connection(self) -> Connection:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and loop.time() - connection.idle_since_s < IDLE_S_MAX:
                return connection
            connection.close()
        if self._is_closed:
            raise _closed()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(ANSWER_BYTES_MAX, self._ended),
                    self.place.host,
                    self.place.port,
                    ssl=self.tls,
                )
        except (OSError, TimeoutError) as error:
            raise self.unreachable(error) from error
        self._open.add(connection)
        return connection

    def _ended(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._all_ended is not None and not self._open and not self._all_ended.done():
            self._all_ended.set_result(None)

    async def _enter(self) -> None:
        if self._busy < self._connections_max:
            self._busy += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave()
            raise

    def _leave(self) -> None:
        """The place goes to the next in line, if somebody waits."""
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._busy -= 1

    def unreachable(self, error: Exception) -> BrokerUnreachable:
        url = self.place.url
        if isinstance(error, ssl.SSLCertVerificationError):
            return BrokerUnreachable(
                f"the certificate of {url} is not trusted: {error.verify_message}; name who signed "
                "it, with --ca or MILLSTREAM_CA, with the option ca of Spark, or in Python with "
                "Client(…, tls=ssl.create_default_context(cafile=…))",
                server=url,
            )
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        what_to_do = (
            "start one with `mill serve`, or name another with --server or MILLSTREAM_SERVER"
        )
        if isinstance(error, ssl.SSLError):
            what_to_do = "a broker that speaks no TLS is called by http://"
        return BrokerUnreachable(f"no broker answers at {url}: {why}; {what_to_do}", server=url)


def _closed() -> ClientClosed:
    return ClientClosed("this client was closed; make another")
