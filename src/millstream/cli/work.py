"""`mill work`: run a program for each record of a topic."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple, Optional

import msgspec
import typer

from millstream.cli.remote import Ca, Server, tls_of
from millstream.errors import MillstreamError, SettingInvalid
from millstream.kinds import Duration
from millstream.wire.places import DEFAULT_SERVER

if TYPE_CHECKING:
    from millstream.client import AsyncClient, Leased

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# As sysexits.h has them: EX_TEMPFAIL and EX_DATAERR.
EXIT_RELEASE = 75
EXIT_REJECT = 65
# What the broker keeps of an error text.
ERROR_BYTES = 1_000
CHUNK_BYTES = 64 * 1024
# How long a program that was asked to end has, before it is ended.
END_S = 5.0
IDLE_LOOK_S = 0.05


class Task(NamedTuple):
    """What is to be run, and how."""

    topic: str
    group: str
    command: list[str]
    concurrency: int
    visibility_s: float | None
    count_max: int | None
    idle_s: float | None
    grace_s: float


@app.command()
def work(  # noqa: PLR0917  typer calls it by name
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Whose records.")],
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Which group works them off.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="The program, with its arguments.")
    ],
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=1, max=500, help="So many at a time.")
    ] = 1,
    visibility: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option(
            "--visibility",
            metavar="DURATION",
            help="How soon a record comes back if this worker dies; by default as its group or its "
            "topic says.",
        ),
    ] = None,
    count: Annotated[
        Optional[int],  # noqa: UP045  read at run time
        typer.Option("--count", metavar="N", min=1, help="End after so many runs."),
    ] = None,
    idle_exit: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--idle-exit", metavar="DURATION", help="End when nothing came for so long."),
    ] = None,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="DURATION", help="How long programs have to end after a signal."
        ),
    ] = "10s",
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
) -> None:
    """Run a program for each record: the record on its standard input.

    Exit 0 acks the record, 75 releases it (it comes again and does not count), 65 rejects it (to
    the dead letters). Anything else nacks it, with the end of standard error as the error text:
    it is tried again, and goes to the dead letters after its last try. Leases are extended while
    the program runs.

    The program finds in its environment MILLSTREAM_TOPIC, _PARTITION, _OFFSET, _KEY, _HEADERS
    (as JSON), _TIMESTAMP_MS, _LANE, _DELIVERIES, _RECEIPT and _GROUP. SIGINT and SIGTERM end the
    work in order: what has not begun is released, what runs may end.
    """
    if shutil.which(command[0]) is None:
        raise SettingInvalid(
            f"there is no program {command[0]!r}", setting="command", value=command[0]
        )
    task = Task(
        topic,
        group,
        command,
        concurrency,
        _seconds("visibility", visibility),
        count,
        _seconds("idle-exit", idle_exit),
        _seconds("grace", grace) or 0.0,
    )
    asyncio.run(_work(server, ca, task))


async def _work(server: str, ca: str | None, task: Task) -> None:
    from millstream.client import AsyncClient

    async with AsyncClient(server, tls=tls_of(server, ca)) as client:
        runner = _Runner(client, task)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, runner.stop)
        idle = loop.create_task(runner.stop_when_idle())
        try:
            await client.run_workers()
        finally:
            idle.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        print(runner.summary(), file=sys.stderr)
        # What it ended with, if it did so before this.
        with suppress(asyncio.CancelledError):
            await idle


class _Runner:
    def __init__(self, client: AsyncClient, task: Task) -> None:
        self._client = client
        self._task = task
        self._begun = 0
        self._runs: set[asyncio.Task[tuple[int, str]]] = set()
        self._is_stopping = False
        self._counts = dict.fromkeys(("acked", "nacked", "rejected", "released"), 0)
        self._last_s = asyncio.get_running_loop().time()
        # No more is received ahead than is going to run.
        ahead = (
            task.concurrency if task.count_max is None else min(task.concurrency, task.count_max)
        )
        client.worker(
            task.topic,
            group=task.group,
            concurrency=ahead,
            prefetch=ahead,
            visibility_s=task.visibility_s,
            # A signal gives programs their time, in `stop`; `--count` gives all that they need.
            grace_s=math.inf,
        )(self.handle)

    def summary(self) -> str:
        counts = dict(self._counts)
        # Their records come again, whatever the programs said.
        unsettled = sum(one.refused for one in self._client.worker_statistics())
        if unsettled:
            counts["of them not taken by the broker"] = unsettled
        return ", ".join(f"{count:,} {word}" for word, count in counts.items())

    def stop(self) -> None:
        """Begin no more. What runs has its time, and is ended then."""
        self._client.stop_workers()
        if not self._is_stopping:
            self._is_stopping = True
            asyncio.get_running_loop().call_later(self._task.grace_s, self._end_runs)

    def _end_runs(self) -> None:
        for run in self._runs:
            run.cancel()

    async def stop_when_idle(self) -> None:
        """A run in progress is not idle, and a broker that is away does not say that nothing is
        there: raises when it does not come back."""
        loop = asyncio.get_running_loop()
        while self._task.idle_s is not None:
            if self._runs:
                self._last_s = loop.time()
            elif loop.time() - self._last_s >= self._task.idle_s:
                begun = self._begun
                try:
                    is_more = await self._is_more()
                except MillstreamError:
                    self._client.stop_workers()
                    raise
                if not is_more and begun == self._begun:
                    self._client.stop_workers()
                    return
                self._last_s = loop.time()
            await asyncio.sleep(min(IDLE_LOOK_S, self._task.idle_s))

    async def _is_more(self) -> bool:
        """What comes here goes back, and then to where it is waited for."""
        messages = await self._client.receive(self._task.topic, group=self._task.group)
        for message in messages:
            await message.release()
        return bool(messages)

    async def handle(self, message: Leased) -> None:
        from millstream.client import Reject, Release, Retry

        task = self._task
        if self._is_stopping:
            raise Release
        if task.count_max is not None:
            if self._begun >= task.count_max:
                raise Release
            if self._begun == task.count_max - 1:
                self._client.stop_workers()
        self._begun += 1
        run = asyncio.ensure_future(_run(task.command, message, _environment(task.group, message)))
        self._runs.add(run)
        try:
            status, error = await run
        except asyncio.CancelledError:
            self._counts["released"] += 1
            worker = asyncio.current_task()
            if worker is not None and worker.cancelling():
                # It is not the program alone that is to end.
                raise
            raise Release from None
        finally:
            self._runs.discard(run)
        error = error or f"{task.command[0]} ended with {status}"
        if status == 0:
            self._counts["acked"] += 1
        elif status == EXIT_RELEASE:
            self._counts["released"] += 1
            raise Release
        elif status == EXIT_REJECT:
            self._counts["rejected"] += 1
            raise Reject(error)
        else:
            self._counts["nacked"] += 1
            raise Retry(error)


async def _run(command: list[str], message: Leased, environment: dict[str, str]) -> tuple[int, str]:
    """How it ended, and the end of what it complained."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        # Ctrl-C is for this worker, which gives programs their time.
        start_new_session=True,
    )
    try:
        _, _, error = await asyncio.gather(
            _feed(process.stdin, message.value or b""),
            _pass_on(process.stdout, sys.stdout),
            _pass_on(process.stderr, sys.stderr),
        )
        status = await process.wait()
    except asyncio.CancelledError:
        await _end(process)
        raise
    return status, error.decode(errors="replace").strip()


async def _feed(stdin: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stdin is not None
    try:
        stdin.write(data)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except ConnectionError:
        # It did not want all of it.
        pass


async def _pass_on(source: asyncio.StreamReader | None, target: object) -> bytes:
    """Show what it prints as it comes; its end is answered."""
    assert source is not None
    tail = b""
    while chunk := await source.read(CHUNK_BYTES):
        target.buffer.write(chunk)  # type: ignore[attr-defined]
        target.flush()  # type: ignore[attr-defined]
        tail = (tail + chunk)[-ERROR_BYTES:]
    return tail


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started, politely first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
            return
        except TimeoutError:
            continue


def _environment(group: str, message: Leased) -> dict[str, str]:
    facts = {
        "TOPIC": message.topic,
        "PARTITION": str(message.partition),
        "OFFSET": str(message.offset),
        "TIMESTAMP_MS": str(message.timestamp_ms),
        "LANE": message.lane,
        "DELIVERIES": str(message.deliveries),
        "RECEIPT": message.receipt,
        "GROUP": group,
        "HEADERS": _headers(message),
    }
    if message.key is not None:
        # What no environment can hold is left out.
        facts["KEY"] = message.key.decode(errors="replace").replace("\0", "")
    return {**os.environ, **{f"MILLSTREAM_{name}": text for name, text in facts.items()}}


def _headers(message: Leased) -> str:
    headers = {
        name: None if value is None else value.decode(errors="replace")
        for name, value in message.headers
    }
    return msgspec.json.encode(headers).decode()


def _seconds(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        milliseconds = Duration(0, 24 * 3_600_000).parse(text)
    except ValueError as error:
        raise SettingInvalid(
            f"--{name} is {text!r}, which {error}; use a duration such as 500ms, 30s or 5m",
            setting=name,
            value=text,
        ) from error
    assert milliseconds is not None
    return milliseconds / 1000
