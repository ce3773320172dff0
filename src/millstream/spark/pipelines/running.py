"""A run of a pipeline: its folder, its session, and how it ends."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.clock import Clock, SystemClock
from millstream.errors import MillstreamError, OptionInvalid, PipelineFailed, SettingInvalid
from millstream.spark.pipelines.context import Context, plain_reason
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.progress import Progress, SilentProgress
from millstream.spark.pipelines.registry import Pipeline
from millstream.spark.pipelines.state import DEFAULT_FOLDER, RunFolder, Status, checkpoint_locked
from millstream.spark.session import spark_session
from millstream.wire.groups import GROUP_NAME, GROUP_NAME_RULE
from millstream.wire.places import DEFAULT_SERVER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Over a Unix socket a worker notices at once that nobody listens to it any more, and each run would
# end with stacks of workers that Spark has ended.
QUIET_SETTINGS = {"spark.python.unix.domain.socket.enabled": "false"}


@dataclass(slots=True)
class RunSettings:
    """What holds for every pipeline; each is a flag of `mill pipeline run`."""

    server: str = DEFAULT_SERVER
    ca: str | None = None
    # Of the run; by default the pipeline's own. Each name has its own place to go on from.
    name: str | None = None
    folder: Path = Path(DEFAULT_FOLDER)
    # Where Spark keeps how far it is, when that cannot be a folder of this machine.
    checkpoint: str | None = None
    group: str | None = None
    is_continuous: bool = False
    every: str | None = None
    records_max: int | None = None
    master: str = "local[*]"
    remote: str | None = None
    spark_settings: Mapping[str, str] = field(default_factory=dict)


def run_pipeline(
    pipeline: Pipeline,
    given: Mapping[str, str | None],
    settings: RunSettings,
    *,
    progress: Progress | None = None,
    session: SparkSession | None = None,
    clock: Clock | None = None,
) -> Status:
    """Run it to its end, and answer how it went.

    With a `session` of the caller's that one is used, and is left open.
    """
    shown = progress or SilentProgress()
    stop = threading.Event()
    clock = clock or SystemClock()
    options = Options(pipeline.options, given)
    name = settings.name or pipeline.name
    folder = RunFolder(settings.folder, name)
    _check(settings)
    try:
        with folder.locked(), checkpoint_locked(settings.checkpoint, name):
            before = folder.read()
            status = _begin(folder, before, pipeline, options, settings, clock)
            with (
                _ending(folder, before, status, clock, stop.is_set),
                _session(session, name, settings) as spark,
                # After the session: Spark has a way with SIGINT of its own.
                _signals(stop),
            ):
                context = Context(
                    spark=spark,
                    name=name,
                    options=options,
                    server=settings.server,
                    ca=settings.ca,
                    directory=folder.path,
                    checkpoint=status.checkpoint,
                    group=status.group,
                    records_max=settings.records_max or pipeline.records_max,
                    progress=shown,
                    status=status,
                    save=_saver(folder, clock),
                    is_continuous=settings.is_continuous,
                    every=settings.every,
                    is_stopping=stop.is_set,
                )
                pipeline.run(context)
                status.state = "stopped" if stop.is_set() else "finished"
            return status
    finally:
        shown.close()


def _check(settings: RunSettings) -> None:
    """What can be wrong with the flags that every pipeline has."""
    if settings.every is not None and not settings.is_continuous:
        raise SettingInvalid(
            "--every goes with --continuous; a run without it ends when it has caught up",
            setting="every",
            value=settings.every,
        )
    if settings.group is not None and not re.fullmatch(GROUP_NAME, settings.group):
        raise SettingInvalid(
            f"--group is {settings.group!r}, which is no name of a group; {GROUP_NAME_RULE}",
            setting="group",
            value=settings.group,
        )


def _begin(  # noqa: PLR0917  called once
    folder: RunFolder,
    before: Status | None,
    pipeline: Pipeline,
    options: Options,
    settings: RunSettings,
    clock: Clock,
) -> Status:
    if before is not None and before.pipeline != pipeline.name:
        raise SettingInvalid(
            f"{folder.path} belongs to the pipeline {before.pipeline}; run {pipeline.name} under "
            "another --name",
            setting="name",
            value=folder.name,
        )
    now = clock.wall_ms()
    status = Status(
        name=folder.name,
        pipeline=pipeline.name,
        started_ms=now,
        changed_ms=now,
        is_continuous=settings.is_continuous,
        options=dict(options),
        server=settings.server,
        group=settings.group or f"pipeline-{folder.name}",
        master=settings.remote or settings.master,
        checkpoint=settings.checkpoint or str((folder.path / "checkpoint").resolve()),
        records_ever=before.records_ever if before else 0,
        queries=before.queries if before else [],
    )
    folder.write(status)
    return status


@contextmanager
def _session(
    given: SparkSession | None, name: str, settings: RunSettings
) -> Iterator[SparkSession]:
    """The caller's, which is left open, or one for this run."""
    if given is not None:
        yield given
        return
    say_errors_once()
    spark = spark_session(
        f"millstream {name}",
        master=settings.master,
        remote=settings.remote,
        settings=(QUIET_SETTINGS if settings.remote is None else {})
        | dict(settings.spark_settings),
    )
    try:
        yield spark
    finally:
        spark.stop()


def say_errors_once() -> None:
    """What a query fails of is raised; PySpark would log it too, as a page of JSON."""
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _ending(
    folder: RunFolder,
    before: Status | None,
    status: Status,
    clock: Clock,
    is_stopping: Callable[[], bool],
) -> Iterator[None]:
    """However the run ends, its state says so. One that was refused before it did anything is no
    run: the state of the one before is put back.

    A signal that goes to all processes of a run ends the JVM too, and whatever is asked of Spark
    from then on fails. That is no failure of the run: what its last micro-batch wanted is done by
    the next run, which would also meet what else was wrong.
    """
    is_run = True
    try:
        yield
    except MillstreamError as error:
        is_run = status.state != "starting" or not isinstance(error, _REFUSALS)
        status.state, status.error = "failed", f"{error.code}: {error.message}"
        if not (is_stopping() and isinstance(error, PipelineFailed)):
            raise
        status.state = "stopped"
    except KeyboardInterrupt:
        status.state = "stopped"
        raise
    except Exception as error:
        is_sparks = _is_sparks(error)
        status.state, status.error = "failed", plain_reason(str(error))
        if is_stopping() and (is_sparks or isinstance(error, OSError | EOFError)):
            status.state, status.error = "stopped", None
        elif is_sparks:
            raise PipelineFailed(f"{status.name}: {status.error}", name=status.name) from error
        else:
            raise
    finally:
        if is_run:
            status.changed_ms = clock.wall_ms()
            folder.write(status)
        else:
            folder.put_back(before)


# Of what was asked, which the next run may ask otherwise. What else keeps a run from starting, such
# as a broker that is away, is in its state: who looks there is to see that nothing is done.
_REFUSALS = (SettingInvalid, OptionInvalid)


def _is_sparks(error: Exception) -> bool:
    """Whether Spark refused something, which no traceback of ours explains."""
    return type(error).__module__.startswith(("pyspark.", "py4j."))


def _saver(folder: RunFolder, clock: Clock) -> Callable[[Status], None]:
    last: list[object] = [None]

    def save(status: Status) -> None:
        shown = (status.state, status.records, status.batches, status.behind, len(status.results))
        if shown == last[0]:
            return
        last[0] = shown
        status.changed_ms = clock.wall_ms()
        folder.write(status)

    return save


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and the first SIGINT end a run in order; a second SIGINT ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
