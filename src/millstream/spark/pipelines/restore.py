"""`restore`: a part of an archive, back into a topic, each record once.

    mill pipeline run restore --from lake/ --topic orders --to orders-again --since 2026-11-01

What is to be restored is decided when a run begins, and kept with its state: the entries of the
archive, cut into numbered batches. Each batch is one write under a name of the run's own, which the
broker knows: one that it has is not written again. So a run that was killed goes on where it ended
when it is started again under the same name.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from millstream.errors import ArchiveInvalid, SettingInvalid, WriterUnknown
from millstream.spark.pipelines.archived import files_of
from millstream.spark.pipelines.context import FORMAT, Context
from millstream.spark.pipelines.lake import Entry, Lake
from millstream.spark.pipelines.registry import Option, Pipeline
from millstream.spark.pipelines.state import write_whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Since and until, in milliseconds.
Times: TypeAlias = tuple[int | None, int | None]

OPTIONS = (
    Option("from", "The lake: a folder, or s3a://….", metavar="DIR", is_required=True),
    Option("topic", "The topic as it was archived.", metavar="TOPIC", is_required=True),
    Option("to", "Where its records go.", metavar="TOPIC", is_required=True),
    Option(
        "since", "Only records from this time on, as 2026-11-19 or with a time.", metavar="TIME"
    ),
    Option("until", "Only records before this time.", metavar="TIME"),
    Option("uuid", "Which one, if several topics had the name.", metavar="UUID"),
    Option(
        "keep-partitions",
        "Into the partitions where they were; by default by their keys.",
        is_switch=True,
    ),
)


class Plan(msgspec.Struct):
    """What a run restores. Kept, so that a repeat restores just that."""

    writer: str
    options: dict[str, str]
    batches: list[list[str]]  # ids of entries
    is_done: bool = False


def run(context: Context) -> None:
    if context.is_continuous:
        raise SettingInvalid(
            "restore writes what the archive has now, and ends; leave out --continuous",
            setting="continuous",
            value="true",
        )
    options = context.options
    lake = Lake.at(options["from"])
    lake.finish_all()
    times = _time(context, "since"), _time(context, "until")
    entries = {entry.id: entry for entry in lake.entries()}
    path = context.directory / "plan.json"
    plan = _kept(path, context) or _planned(context, lake, list(entries.values()), times)
    write_whole(path, msgspec.json.encode(plan))
    if plan.is_done:
        context.say(f"restored already; another --name restores it again ({context.name})")
        return
    _restore(context, lake, entries, plan, times)
    if context.is_stopping():
        return
    plan.is_done = True
    write_whole(path, msgspec.json.encode(plan))
    # Of a time without records nothing was written, and no writer is known.
    with context.client() as client, suppress(WriterUnknown):
        client.writers.forget(plan.writer)
    context.say(f"restored {options['topic']} from {lake.url} to {options['to']}")


PIPELINE = Pipeline(
    name="restore",
    help="A part of an archive, back into a topic; each record once.",
    options=OPTIONS,
    run=run,
)


def _kept(path: Path, context: Context) -> Plan | None:
    """The plan of a run before."""
    if not path.exists():
        return None
    plan = msgspec.json.decode(path.read_bytes(), type=Plan)
    if plan.options != dict(context.options):
        context.options.refuse(
            "from", f"or another option changed since {context.name} began; use another --name"
        )
    return plan


def _planned(context: Context, lake: Lake, entries: list[Entry], times: Times) -> Plan:
    """Entries of the topic, in the order in which they were archived, some together."""
    topic, id = context.options["topic"], context.options.get("uuid")
    wanted = [entry for entry in entries if entry.has(topic, id) and _overlaps(entry, times)]
    if not any(entry.has(topic, id) for entry in entries):
        there = sorted({one.topic for entry in entries for one in entry.ranges})
        raise ArchiveInvalid(
            f"{lake.url} has nothing of {topic}; it has {', '.join(there) or 'no topic'}",
            archive=lake.url,
        )
    ids = {one.uuid for entry in wanted for one in entry.ranges if one.topic == topic}
    if id is None and len(ids) > 1:
        context.options.refuse(
            "uuid", f"is needed: {topic} was made anew: {', '.join(sorted(ids))}"
        )
    batches: list[list[str]] = []
    room = 0
    for entry in wanted:
        records = _records({entry.id: entry}, [entry.id], topic)
        if records > room or not batches:
            batches.append([])
            room = context.records_max
        batches[-1].append(entry.id)
        room -= records
    return Plan(f"restore-{uuid.uuid4()}", dict(context.options), batches)


def _restore(
    context: Context, lake: Lake, entries: dict[str, Entry], plan: Plan, times: Times
) -> None:
    """Batch for batch, beginning after the last that the broker has."""
    topic = context.options["topic"]
    left = sum(_records(entries, batch, topic) for batch in plan.batches)
    done = _done(context, plan.writer)
    for number, batch in enumerate(plan.batches):
        if context.is_stopping():
            return
        records = _records(entries, batch, topic)
        left -= records
        if number > done:
            found = files_of(context.spark, lake, [entries[id] for id in batch], topic)
            written = _write(context, _chosen(context, found, times), plan.writer, number)
            context.advance(written, left)


def _done(context: Context, writer: str) -> int:
    """The number of the last batch that the broker has."""
    with context.client() as client:
        try:
            last = client.writers.get(writer).last
        except WriterUnknown:
            return -1
    return -1 if last is None else last.batch


def _write(context: Context, frame: DataFrame, name: str, number: int) -> int:
    """Answers how many records there were."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    columns = ["key", "value", "headers", "lane", "timestamp"]
    if context.options.is_on("keep-partitions"):
        columns.append("partition")
    # Each partition is written by one task, in its order.
    ordered = frame.repartition("partition").sortWithinPartitions("partition", "offset")
    counted = Observation()
    chosen = ordered.select(*columns).observe(counted, f.count(f.lit(1)).alias("records"))
    writer = chosen.write.format(FORMAT).mode("append")
    writer = writer.options(**context.broker_options(), topic=context.options["to"])
    writer.option("writer", name).option("batch", str(number)).save()
    return int(counted.get["records"])


def _chosen(context: Context, frame: DataFrame, times: Times) -> DataFrame:
    from pyspark.sql import functions as f

    since, until = times
    if since is not None:
        frame = frame.where(f.col("timestamp") >= f.timestamp_millis(f.lit(since)))
    if until is not None:
        frame = frame.where(f.col("timestamp") < f.timestamp_millis(f.lit(until)))
    if "uuid" in context.options:
        frame = frame.where(f.col("topic_uuid") == context.options["uuid"])
    return frame


def _overlaps(entry: Entry, times: Times) -> bool:
    since, until = times
    return any(
        (since is None or (one.newest_ms is not None and one.newest_ms >= since))
        and (until is None or (one.oldest_ms is not None and one.oldest_ms < until))
        for one in entry.ranges
    )


def _records(entries: dict[str, Entry], ids: list[str], topic: str) -> int:
    return sum(one.records for id in ids for one in entries[id].ranges if one.topic == topic)


def _time(context: Context, name: str) -> int | None:
    text = context.options.get(name)
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        context.options.refuse(
            name, f"is {text!r}; it takes a time such as 2026-11-19 or 2026-11-19T08:30+01:00"
        )
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return int(when.timestamp() * 1000)
