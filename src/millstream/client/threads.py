"""An event loop in a thread, and how blocking calls reach it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from millstream.errors import ClientClosed

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="millstream-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for it here."""
        if not self.is_running:
            work.close()
            raise ClientClosed("this client was closed; make another")
        assert threading.current_thread() is not self._thread, "a blocking call inside the loop"
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C, for one, must not leave it running.
            future.cancel()
            raise

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


class Face(Protocol[A_co]):
    """Something of the asyncio client, with the thread that it lives in."""

    @property
    def inner(self) -> A_co: ...
    @property
    def thread(self) -> LoopThread: ...


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Face[A], P], T]:
    """The same method, waited for."""

    @functools.wraps(method)
    def call(self: Face[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.thread.run(method(self.inner, *args, **kwargs))

    return call


def iterate(thread: LoopThread, source: AsyncIterator[T]) -> Iterator[T]:
    try:
        while (item := thread.run(_advance(source))) is not None:
            yield item[0]
    finally:
        with suppress(ClientClosed):
            thread.run(_close(source))


def next_of(thread: LoopThread, source: AsyncIterator[T]) -> T:
    item = thread.run(_advance(source))
    if item is None:
        raise StopIteration
    return item[0]


async def _advance(source: AsyncIterator[T]) -> tuple[T] | None:
    # StopAsyncIteration cannot cross into a future.
    async for item in source:
        return (item,)
    return None


async def _close(source: AsyncIterator[Any]) -> None:
    if isinstance(source, AsyncGenerator):
        await source.aclose()
