"""Child processes: work on sealed files that must not take the loop's time.

The child's side is `log/child.py`. A job goes in as one line of JSON, its result comes out.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, TypeVar

import msgspec

from millstream.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R", bound=msgspec.Struct)


class Children:
    """Those of one broker. `done` is always called on the loop, with a result or an error."""

    __slots__ = ("_loop", "_tasks")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self,
        module: str,
        job: msgspec.Struct,
        result: type[R],
        done: Callable[[R | None, BaseException | None], None],
    ) -> None:
        task = self._loop.create_task(self._run(module, job, result, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        module: str,
        job: msgspec.Struct,
        result: type[R],
        done: Callable[[R | None, BaseException | None], None],
    ) -> None:
        try:
            value = msgspec.json.decode(await _output_of(module, job), type=result)
        except (OSError, msgspec.MsgspecError, StorageFailed) as error:
            done(None, error)
        else:
            done(value, None)

    async def close(self) -> None:
        """End them all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _output_of(module: str, job: msgspec.Struct) -> bytes:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        # Left open: when this process is killed it closes, and the child ends too.
        child.stdin.write(msgspec.json.encode(job) + b"\n")
        output, errors = await asyncio.gather(child.stdout.read(), child.stderr.read())
        await child.wait()
    except asyncio.CancelledError:
        child.kill()
        await child.wait()
        raise
    finally:
        child.stdin.close()
    if child.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise StorageFailed(f"{module} ended with {child.returncode}: {last}")
    return output
