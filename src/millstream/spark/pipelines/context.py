"""What a pipeline is given when it runs."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client import Client
from millstream.errors import PipelineFailed, SettingInvalid
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.progress import Progress
from millstream.spark.pipelines.state import QueryState, Status
from millstream.wire.places import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FORMAT = "millstream"
# How often a run looks how far its queries are. A query that ends is noticed at once.
LOOK_S = 0.25
# A run that is to end lets the micro-batch that is under way end first, for so long. One that takes
# longer is left, and done again by the next run.
LAST_BATCH_S = 20.0
LAST_BATCH_LOOK_S = 0.02
_GROUP_OPTIONS = {"groupid", "kafka.group.id"}


@dataclass(slots=True)
class Context:
    """A session, the options, and ways to read topics and to run queries.

    `checkpoint` is where Spark keeps how far it is, `directory` the run's own folder on this
    machine. `name` is that of the run: it makes the names of its group and of its writers.
    """

    spark: SparkSession
    name: str
    options: Options
    server: str
    ca: str | None
    directory: Path
    checkpoint: str
    group: str
    records_max: int
    progress: Progress
    status: Status
    save: Callable[[Status], None]
    is_continuous: bool = False
    # Between two micro-batches of a continuous run: as soon as there is something, by default.
    every: str | None = None
    # A signal that ends the run in order.
    is_stopping: Callable[[], bool] = lambda: False
    _watched: dict[str, Watched] = field(default_factory=dict)
    # Topics whose offsets are committed to the run's group.
    _followed: set[str] = field(default_factory=set)

    # ---- reading

    def read(self, *topics: str, **options: str) -> DataFrame:
        """Records of topics as they come: a streaming frame.

        The first run begins with the oldest record, later ones where the one before ended. How far
        it is, is committed to the group, so that its lag is seen where all lag is seen.
        """
        given = {
            "groupId": self.group,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(self.records_max),
        }
        if not {name.lower() for name in options} & _GROUP_OPTIONS:
            self._followed |= set(topics)
        reader = self.spark.readStream.format(FORMAT)
        return reader.options(**self.source_options(*topics), **(given | options)).load()

    def table(self, *topics: str, **options: str) -> DataFrame:
        """All records that topics have now, as a frame that ends."""
        reader = self.spark.read.format(FORMAT)
        return reader.options(**self.source_options(*topics), **options).load()

    def source_options(self, *topics: str) -> dict[str, str]:
        return self.broker_options() | ({"subscribe": ",".join(topics)} if topics else {})

    def broker_options(self) -> dict[str, str]:
        return {"server": self.server} | ({"ca": self.ca} if self.ca else {})

    def client(self) -> Client:
        """A client of the broker; use it as a context manager."""
        return broker_client(self.server, self.ca)

    # ---- running

    def run(self, writer: DataStreamWriter, part: str = "main") -> None:
        """Start a query, and wait until it is done."""
        self.start(writer, part)
        self.wait()

    def start(
        self, writer: DataStreamWriter, part: str = "main", *, is_counted: bool = True
    ) -> StreamingQuery:
        """Start a query with the run's checkpoint and trigger. `part` tells apart the queries of a
        pipeline that has several; one that reads what another reads too is not counted again."""
        writer = writer.queryName(f"{self.name}.{part}" if part != "main" else self.name)
        writer = writer.option("checkpointLocation", f"{self.checkpoint}/{part}")
        if not self.is_continuous:
            writer = writer.trigger(availableNow=True)
        elif self.every is not None:
            writer = _triggered(writer, self.every)
        query = writer.start()
        self._watched[part] = Watched(query, is_counted)
        self.status.state = "running"
        self._look()
        return query

    def wait(self) -> None:
        """Until every query that was started has ended; the first error ends all of them."""
        try:
            while any(watched.query.isActive for watched in self._watched.values()):
                if self.is_stopping():
                    self._end_batches()
                    break
                active = [one.query for one in self._watched.values() if one.query.isActive]
                if active:
                    _await(active[0])
                self._look()
                self._raise_failed()
        finally:
            self.stop()
        self._look()
        self._raise_failed()
        if self.is_stopping():
            # Here, because it brings what else only Spark's own processes need.
            from millstream.spark.pipelines.last_commit import commit_finished

            ends = [end for watched in self._watched.values() for end in watched.offsets]
            commit_finished(self.broker_options(), self.group, self._followed, ends)

    def _end_batches(self) -> None:
        end = time.monotonic() + LAST_BATCH_S
        while any(_is_at_work(one.query) for one in self._watched.values()):
            if time.monotonic() >= end:
                return
            time.sleep(LAST_BATCH_LOOK_S)

    def stop(self) -> None:
        for watched in self._watched.values():
            if watched.query.isActive:
                watched.query.stop()

    def show(self, text: str) -> None:
        """What was asked for, such as a table: on standard output, which holds nothing else."""
        with self.progress.aside():
            print(text, flush=True)  # noqa: T201  of a command

    def say(self, text: str) -> None:
        """A result: shown now, and kept with the state of the run."""
        self.status.results.append(text)
        self.progress.say(text)

    def advance(self, records: int, behind: int | None = None) -> None:
        """So many more records are done, by something that is no streaming query."""
        self.status.state = "running"
        self.status.records += records
        self.status.records_ever += records
        self.status.batches += 1
        self.status.behind = behind
        self.progress.show(self.status.records, behind)
        self.save(self.status)

    # ---- watching

    def _look(self) -> None:
        """Take over what the queries did since the last look."""
        for part, watched in self._watched.items():
            rows = watched.take()
            if watched.is_counted:
                self.status.records += rows
                self.status.records_ever += rows
            self._describe(part, watched)
        self.status.batches = sum(one.batches for one in self._watched.values())
        self.status.behind = _behind(self._watched.values())
        self.progress.show(self.status.records, self.status.behind)
        self.save(self.status)

    def _describe(self, part: str, watched: Watched) -> None:
        known = next((one for one in self.status.queries if one.part == part), None)
        if known is None:
            known = QueryState(part)
            self.status.queries.append(known)
        known.id = str(watched.query.id)
        if watched.batch >= 0:
            known.batch, known.offsets = watched.batch, watched.offsets

    def _raise_failed(self) -> None:
        for part, watched in self._watched.items():
            error = watched.query.exception()
            if error is not None:
                raise PipelineFailed(
                    f"{self.name}: {plain_reason(str(error))}", name=self.name, part=part
                )


def _triggered(writer: DataStreamWriter, every: str) -> DataStreamWriter:
    from pyspark.errors import IllegalArgumentException

    try:
        return writer.trigger(processingTime=every)
    except IllegalArgumentException as error:
        raise SettingInvalid(
            f"--every is {every!r}, which Spark takes for no time; it takes one such as 10s",
            setting="every",
            value=every,
        ) from error


def broker_client(server: str, ca: str | None) -> Client:
    """Of a broker whose certificates are trusted as source and sink do: those that `ca` signed,
    besides those that this system trusts."""
    if ca is None or not Place.of(server).is_secure:
        return Client(server)
    tls = ssl.create_default_context()
    try:
        tls.load_verify_locations(ca)
    except OSError as error:
        why = "is no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingInvalid(
            f"--ca is {ca!r}, which cannot be used: {why}", setting="ca", value=ca
        ) from error
    return Client(server, tls=tls)


@dataclass(slots=True)
class Watched:
    """A query, and what of its progress was counted."""

    query: StreamingQuery
    is_counted: bool
    # When the trigger began that was told of last.
    seen: str = ""
    batch: int = -1
    batches: int = 0
    behind: int | None = None
    offsets: list[str] = field(default_factory=list)

    def take(self) -> int:
        """Records of micro-batches that ended since the last time."""
        rows = 0
        for progress in self.query.recentProgress:
            # Not by the number alone: that nothing comes is told under that of the next batch.
            if progress["timestamp"] <= self.seen:
                continue
            self.seen = str(progress["timestamp"])
            self.batch = int(progress["batchId"])
            sources = progress["sources"]
            # Over Connect the sum of them may be missing.
            taken = sum(int(source["numInputRows"] or 0) for source in sources)
            self.batches += taken > 0
            rows += taken
            self.offsets = [str(source["endOffset"]) for source in sources]
            self.behind = sum(
                left_between(source["endOffset"], source["latestOffset"]) for source in sources
            )
        return rows


def _behind(watched: Iterable[Watched]) -> int | None:
    """How many records are left for all of them: what several read is left for the slowest."""
    known = [one for one in watched if one.behind is not None]
    if not known:
        return None
    counted = sum(one.behind or 0 for one in known if one.is_counted)
    return max([counted, *(one.behind or 0 for one in known if not one.is_counted)])


def _await(query: StreamingQuery) -> None:
    """For a moment. That the query failed is found out by asking it."""
    from pyspark.errors import StreamingQueryException

    try:
        query.awaitTermination(LOOK_S)  # type: ignore[arg-type]  # fractions are meant to work
    except StreamingQueryException:
        return


def _is_at_work(query: StreamingQuery) -> bool:
    status = query.status
    return query.isActive and status["isTriggerActive"] and status["isDataAvailable"]


def left_between(end: Any, latest: Any) -> int:
    """How many offsets lie between two positions of a source: `{"topic": {"0": 5}}`."""
    at, last = _positions(end), _positions(latest)
    return sum(max(0, offset - at.get(place, offset)) for place, offset in last.items())


def _positions(told: Any) -> dict[tuple[str, str], int]:
    """What a source says of where it is; of other kinds of sources nothing is known."""
    try:
        page = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        return {}
    if not isinstance(page, dict):
        return {}
    return {
        (topic, partition): offset
        for topic, partitions in page.items()
        if isinstance(partitions, dict)
        for partition, offset in partitions.items()
        if isinstance(offset, int)
    }


# What Spark puts before and after the sentence that matters.
_NOISE = (
    re.compile(r"\n\s*(at |\.\.\. \d+ more).*"),
    re.compile(r"\n?(JVM stacktrace|=== Streaming Query ===).*", re.DOTALL),
)


def plain_reason(text: str) -> str:
    """An error of Spark without its stack: where an error of ours is inside, that one."""
    ours = re.findall(r"millstream\.errors\.\w+: (.+)", text)
    if ours:
        return str(ours[-1]).strip()
    for noise in _NOISE:
        text = noise.sub("", text)
    # What Java said comes below py4j's sentence, after a colon.
    named = r"^(?:: )?(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$"
    python = re.findall(named, text, re.MULTILINE)
    if python and ("Traceback" in text or "occurred while calling" in text):
        return f"{python[-1][0]}: {python[-1][1]}"
    return text.strip()
