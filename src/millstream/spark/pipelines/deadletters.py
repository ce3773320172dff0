"""`deadletters`: what fails, where and why, as a report; and back into its topic, on request.

Each run looks at all dead letters that there are. Those of one topic, group, reason and shape of
their error are a kind, and a kind has a name that stays: `--redrive NAME` puts it back once its
cause is mended.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sql

from millstream.client.dead_letters import Reason
from millstream.errors import PipelineFailed, SettingInvalid
from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.letters import (
    NO_GROUP,
    Example,
    GoneRun,
    Kind,
    examples,
    gone_words,
    kinds,
    left,
    letters,
    over_time,
    search_for,
)
from millstream.spark.pipelines.plots import Bars, Lines, Point, step_s
from millstream.spark.pipelines.registry import Option, Pipeline
from millstream.spark.pipelines.report import (
    Command,
    Heading,
    Report,
    Table,
    Text,
    plain,
    show_span,
    show_time,
    write_report,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millstream.client import Client
    from millstream.client.dead_letters import RedriveFacts

# Of what there may be thousands of, a page shows the largest.
KINDS_SHOWN = 50
KINDS_WITH_EXAMPLES = 20
# A picture over time has so many kinds by name; the others are one.
KINDS_IN_PICTURE = 6
OTHERS = "others"
_REASONS: dict[str, Reason] = {"deliveries": "deliveries", "rejected": "rejected"}


class Findings(NamedTuple):
    """All that a report says."""

    kinds: Sequence[Kind]
    examples: Sequence[Example]
    step_s: int
    # By kind, or `others`: how many failed last in each step.
    over_time: dict[str, list[Point]]


def run(context: Context) -> None:
    if context.is_continuous:
        raise SettingInvalid(
            "deadletters looks at all there are and ends; leave out --continuous",
            setting="continuous",
            value="true",
        )
    options = context.options
    each = options.number("examples", minimum=1)
    with context.client() as client:
        found = find_letters(context, client, options.names("topics"))
        findings = Findings([], [], 1, {}) if found is None else look(found, each)
        context.status.records = sum(kind.letters for kind in findings.kinds)
        directory = Path(options.get("report", str(context.directory / "report")))
        page = write_report(report_of(findings), directory)
        count = f"{context.status.records:,} dead letters of {len(findings.kinds):,} kinds"
        context.say(f"{count}; the report is {page}")
        if "redrive" in options:
            done = redrive(context, client, found, findings.kinds)
            if done.state != "done" or not done.moved:
                raise PipelineFailed(f"{context.name}: {told(done)}", name=context.name)
            context.say(told(done))


def find_letters(context: Context, client: Client, topics: Sequence[str]) -> DataFrame | None:
    """Those that are left, of these topics or of all, up to the ends that there are now."""
    counts = {one.topic: one.dead_letter_topic for one in client.dead_letters.counts()}
    found = None
    for topic, name in counts.items():
        if topics and topic not in topics:
            continue
        ends = {str(one.partition): one.end for one in client.topics.offsets(name)}
        records = context.table(
            name,
            includeDeadLetter="true",
            includeHeaders="true",
            endingOffsets=json.dumps({name: ends}),
        )
        runs = [
            GoneRun(one.partition, one.first, one.last) for one in client.dead_letters.gone(topic)
        ]
        of_topic = left(letters(records), gone_words(context.spark, runs))
        found = of_topic if found is None else found.unionByName(of_topic)
    return found


def look(found: DataFrame, examples_each: int) -> Findings:
    """What a report says of these."""
    largest = [Kind(*row) for row in kinds(found).collect()]
    if not largest:
        return Findings([], [], 1, {})
    shown = [kind.kind for kind in largest[:KINDS_WITH_EXAMPLES]]
    of_shown = found.where(sql.col("kind").isin(shown))
    named = [kind.kind for kind in largest[:KINDS_IN_PICTURE]]
    in_picture = sql.when(sql.col("kind").isin(named), sql.col("kind")).otherwise(OTHERS)
    begin_ms = min(kind.since_ms for kind in largest)
    seconds = step_s(begin_ms, max(kind.last_failure_ms for kind in largest))
    steps: dict[str, list[Point]] = {}
    for row in over_time(found.withColumn("kind", in_picture), "kind", seconds).collect():
        begin = datetime.fromtimestamp(row["begin_s"], UTC)
        steps.setdefault(row["kind"], []).append((begin, row["letters"]))
    return Findings(
        largest,
        [Example(*row) for row in examples(of_shown, examples_each).collect()],
        seconds,
        {name: sorted(points) for name, points in sorted(steps.items())},
    )


# ---- the page


def report_of(findings: Findings) -> Report:
    report = Report("Dead letters")
    total = sum(kind.letters for kind in findings.kinds)
    if not findings.kinds:
        report.add(Text("There are none."))
        return report
    first = min(kind.first_failure_ms for kind in findings.kinds)
    last = max(kind.last_failure_ms for kind in findings.kinds)
    report.add(
        Text(
            f"{total:,} records were given up between {show_time(first)} and {show_time(last)}, of "
            f"{len(findings.kinds):,} kinds. Those of a kind have topic, group, reason and the "
            "shape of their error in common. In a shape, `<n>` stands for a number, `<text>` for "
            "what was quoted, `<id>`, `<time>`, `<url>` and the like for what they say."
        ),
        Heading("Over time"),
        Lines(
            "over-time.png",
            "When they failed last",
            f"dead letters in {show_span(findings.step_s)}",
            {_label(findings, name): points for name, points in findings.over_time.items()},
            is_stacked=True,
        ),
        Heading("Kinds"),
        Bars(
            "kinds.png",
            "Dead letters of each kind",
            "dead letters",
            [(_label(findings, kind.kind), kind.letters) for kind in findings.kinds],
        ),
        Table(
            ("kind", "letters", "topic", "group", "reason", "shape of the error", "last failure"),
            [
                (
                    kind.kind,
                    kind.letters,
                    kind.topic,
                    kind.group,
                    kind.reason,
                    kind.shape,
                    show_time(kind.last_failure_ms),
                )
                for kind in findings.kinds[:KINDS_SHOWN]
            ],
        ),
    )
    if len(findings.kinds) > KINDS_SHOWN:
        rest = findings.kinds[KINDS_SHOWN:]
        count = sum(kind.letters for kind in rest)
        report.add(Text(f"{len(rest):,} more kinds have {count:,} letters together."))
    report.add(Heading("By topic, group and reason"))
    for field in ("topic", "group", "reason"):
        counts: Counter[str] = Counter()
        for kind in findings.kinds:
            counts[getattr(kind, field)] += kind.letters
        report.add(Table((field, "letters"), counts.most_common(KINDS_SHOWN)))
    _add_examples(report, findings)
    return report


def _add_examples(report: Report, findings: Findings) -> None:
    for kind in findings.kinds[:KINDS_WITH_EXAMPLES]:
        again = (
            f", put back and given up again up to {kind.redrives} times" if kind.redrives else ""
        )
        report.add(
            Heading(f"{kind.kind}: {kind.shape}"),
            Text(
                f"{kind.letters:,} of {plain(kind.topic)}, given up by {plain(kind.group)} after "
                f"{_deliveries(kind)}, from "
                f"{show_time(kind.first_failure_ms)} to {show_time(kind.last_failure_ms)}{again}. "
                "Those that failed last:"
            ),
            Table(
                ("place", "key", "error", "value"),
                [
                    (f"{one.partition}/{one.offset}", one.key, one.error, one.value)
                    for one in findings.examples
                    if one.kind == kind.kind
                ],
            ),
            Text("When the cause is mended, this puts them back:"),
            Command(f"mill pipeline run deadletters --redrive {kind.kind}"),
        )


def _deliveries(kind: Kind) -> str:
    count = kind.deliveries or 0
    return "one delivery" if count == 1 else f"at most {count} deliveries"


def _label(findings: Findings, name: str) -> str:
    """What a kind is called in a picture."""
    shape = next((kind.shape for kind in findings.kinds if kind.kind == name), None)
    return name if shape is None else f"{name} {shape}"


# ---- putting them back


def redrive(
    context: Context, client: Client, found: DataFrame | None, largest: Sequence[Kind]
) -> RedriveFacts:
    """Start the redrive of a kind, and wait for its end."""
    options = context.options
    kind = next((one for one in largest if one.kind == options["redrive"]), None)
    if kind is None or found is None:
        options.refuse(
            "redrive", "names no kind of dead letters that there is; the report has them"
        )
    search = search_for(found, kind)
    if search.others and not options.is_on("others"):
        options.refuse(
            "redrive",
            f"would put {search.others:,} letters of other kinds back too: a redrive is told "
            "group, reason, time and a text, and theirs are the same. Add --others if they may go "
            "with it",
        )
    started = client.dead_letters.redrive(
        kind.topic,
        to=options.get("to"),
        rate=options.number("rate", minimum=1) if "rate" in options else None,
        reason=_REASONS.get(kind.reason),
        group=None if kind.group == NO_GROUP else kind.group,
        text=search.text,
        since_ms=kind.since_ms,
        until_ms=kind.last_failure_ms + 1,
    )
    return client.dead_letters.wait(started.id)


def told(done: RedriveFacts) -> str:
    """What a redrive did; where that is nothing, why."""
    left = [f"left {count:,}: {_WHY_LEFT.get(why, why)}" for why, count in done.skipped.items()]
    if done.error is not None:
        left.append(done.error)
    if done.moved:
        said = f"put {done.moved:,} back"
    else:
        said = "nothing was put back"
        left = left or ["none of these letters is there any more"]
    return f"redrive {done.id} {done.state}: {', '.join([said, *left])}"


# As docs/dead-letters.md has it.
_WHY_LEFT = {
    "topic_unknown": "their topic is gone; --to names another (topic_unknown)",
    "topic_compacted": "their topic is compacted; --to names another (topic_compacted)",
    "message_too_large": "their topic takes no message of that size (message_too_large)",
}


PIPELINE = Pipeline(
    name="deadletters",
    help="What fails, and why: a report of dead letters, and a redrive of those of one kind.",
    run=run,
    options=(
        Option("topics", "Only dead letters of these topics; by default of all.", metavar="TOPICS"),
        Option("report", "The folder of the report; by default beside the state.", metavar="DIR"),
        Option("examples", "How many of each kind are shown.", default="3", metavar="N"),
        Option("redrive", "Put the letters of this kind back.", metavar="KIND"),
        Option("others", "Even if letters of other kinds go with them.", is_switch=True),
        Option("to", "With --redrive: into this topic instead of their own.", metavar="TOPIC"),
        Option("rate", "With --redrive: at most so many a second.", metavar="N"),
    ),
)
