"""`sql`: a query over topics, from a file or from the command line.

    mill pipeline run sql --query totals.sql                     shows the result, of all there is
    mill pipeline run sql --query totals.sql --to topic:totals   goes on where it ended, each time

Every topic that the query names is a table (`views` says with which columns). A file may have
several statements, with `;` between: the last one is the query, those before it may make views.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from millstream.errors import PipelineFailed, SettingInvalid
from millstream.spark.pipelines.context import Context, plain_reason
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.registry import Option, Pipeline
from millstream.spark.pipelines.statements import names_in, statements
from millstream.spark.pipelines.targets import MODES, Target, stream_to, target_of, write_to
from millstream.spark.pipelines.views import columns_of, keep_columns, make_view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Of those that there are, when a query names another.
TOPICS_SHOWN = 20

OPTIONS = (
    Option("query", "The file with the query; - is standard input.", metavar="FILE"),
    Option("sql", "The query itself.", metavar="SQL"),
    Option("to", "topic:NAME, parquet:DIR or terminal.", default="terminal", metavar="TARGET"),
    Option("key", "The column whose text is the key of a record.", metavar="COLUMN"),
    Option(
        "mode",
        "Spark's output mode: append, update or complete. By default append, or for a topic update "
        "where append cannot be.",
        metavar="MODE",
    ),
    Option(
        "schema",
        "Columns of topics, with ; between: 'orders: id BIGINT, total DOUBLE; users: name STRING'. "
        "By default as the newest records have them.",
        metavar="DDL",
    ),
    Option(
        "watermark",
        "How late rows may come, by a column, with ; between: 'orders.at: 10 minutes'.",
        metavar="TEXT",
    ),
    Option("batch", "Read all there is each time, instead of going on.", is_switch=True),
)


def run(context: Context) -> None:
    from pyspark.errors import PySparkException

    options = context.options
    *before, query = _statements(options)
    target = _target(options)
    mode = options.get("mode")
    if mode is not None and mode not in MODES:
        options.refuse("mode", f"is {mode!r}; it is one of {', '.join(MODES)}")
    # To be looked at is what there is; to be kept is what is new.
    is_batch = options.is_on("batch") or (target.kind == "terminal" and not context.is_continuous)
    if is_batch and context.is_continuous:
        options.refuse("batch", "reads what there is and ends; it cannot go with --continuous")
    kept = None if is_batch else context.directory / "columns.json"
    topics, columns = _make_views(context, "\n".join([*before, query]), kept)
    result = _result(context, before, query, topics)
    # Not before: a query that is refused changes nothing for the one that was before it.
    if kept is not None:
        keep_columns(kept, columns)
    try:
        if is_batch or not result.isStreaming:
            write_to(context, result, target, key=options.get("key"))
            return
        _start(context, result, target, mode)
        context.wait()
    except (PySparkException, PipelineFailed) as error:
        if "[CAST_INVALID_INPUT]" not in str(error):
            raise
        raise PipelineFailed(
            f"{plain_reason(str(error)).partition(' SQLSTATE')[0]} A field that is not of one type "
            "in all records is text; --schema says of which type it is, and what does not fit is "
            "null then",
            name=context.name,
        ) from error


PIPELINE = Pipeline(
    name="sql",
    help="SQL over topics: the result goes to a topic, to Parquet files, or is shown here.",
    options=OPTIONS,
    run=run,
)


# ---- what was asked


def _statements(options: Options) -> list[str]:
    if ("query" in options) == ("sql" in options):
        options.refuse(
            "query", "or --sql is needed, and not both: a file with the query, or its text"
        )
    text = options["sql"] if "sql" in options else _file(options)
    found = statements(text)
    if not found:
        options.refuse("sql" if "sql" in options else "query", "has no statement")
    return found


def _file(options: Options) -> str:
    if options["query"] == "-":
        return sys.stdin.read()
    try:
        return Path(options["query"]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        options.refuse("query", f"is {options['query']!r}, which cannot be read: {why}")


def _target(options: Options) -> Target:
    try:
        return target_of(options["to"])
    except ValueError as error:
        options.refuse("to", str(error))


def _pairs(options: Options, name: str) -> dict[str, str]:
    """`a: x; b: y`, where an x may have colons inside."""
    found = {}
    for part in options.get(name, "").split(";"):
        if not part.strip():
            continue
        topic, colon, text = part.partition(":")
        if not (colon and topic.strip() and text.strip()):
            options.refuse(name, f"has {part.strip()!r}, which is not NAME: TEXT")
        found[topic.strip()] = text.strip()
    return found


# ---- views and the query


def _make_views(
    context: Context, sql: str, kept: Path | None
) -> tuple[list[str], Mapping[str, str]]:
    """A view for each topic that the query names; answers all topics there are, and the columns of
    those that are known."""
    given = _pairs(context.options, "schema")
    marks = _watermarks(context.options)
    with context.client() as client:
        known = [topic.name for topic in client.topics.list() if not topic.name.startswith("__")]
        named = names_in(sql, known)
        _require_different(named, sql)
        columns = columns_of(client, named, given, kept)
    for name, text in (("schema", given), ("watermark", marks)):
        for topic in text:
            if topic not in named:
                context.options.refuse(name, f"is about {topic}, and the query names no such topic")
    for topic in named:
        _make_view(context, topic, columns[topic], marks.get(topic), is_batch=kept is None)
    return known, columns


def _require_different(names: list[str], sql: str) -> None:
    """Spark has one table for names that differ by case alone."""
    by_lower: dict[str, str] = {}
    for name in names:
        other = by_lower.setdefault(name.lower(), name)
        if other != name:
            raise SettingInvalid(
                f"the topics {other} and {name} differ by case alone, and Spark takes them for one "
                "table; name one of them in a query, written as it is",
                setting="query",
                value=sql,
            )


def _make_view(
    context: Context, topic: str, columns: str, mark: tuple[str, str] | None, *, is_batch: bool
) -> None:
    from pyspark.errors import AnalysisException, IllegalArgumentException

    try:
        make_view(context, topic, columns, mark, is_batch=is_batch)
    except KeyError as error:
        context.options.refuse("watermark", f"names {error}, which {topic} does not have")
    except (AnalysisException, IllegalArgumentException) as error:
        reason = plain_reason(str(error))
        if mark is not None and "INTERVAL" in reason:
            context.options.refuse(
                "watermark", f"has {mark[1]!r}, which is no time; it takes one such as 10 minutes"
            )
        if topic in _pairs(context.options, "schema"):
            context.options.refuse(
                "schema", f"has {columns!r} for {topic}, which are no columns: {reason}"
            )
        raise


def _watermarks(options: Options) -> dict[str, tuple[str, str]]:
    found = {}
    for place, delay in _pairs(options, "watermark").items():
        topic, dot, column = place.rpartition(".")
        if not dot:
            options.refuse("watermark", f"is about {place!r}; it takes TOPIC.COLUMN: DELAY")
        found[topic] = (column, delay)
    return found


def _result(context: Context, before: list[str], query: str, topics: list[str]) -> DataFrame:
    from pyspark.errors import AnalysisException, ParseException

    try:
        for statement in before:
            context.spark.sql(statement)
        return context.spark.sql(query)
    except ParseException as error:
        raise SettingInvalid(
            f"the query cannot be read: {plain_reason(str(error))}", setting="query", value=query
        ) from error
    except AnalysisException as error:
        _explain(error, query, topics)


def _explain(error: Exception, query: str, topics: list[str]) -> NoReturn:
    """What Spark says of a query that makes no sense, with what a user can do."""
    # After its sentence comes the plan, as a tree that says no more.
    reason = plain_reason(str(error)).partition(";\n")[0]
    missing = re.search(r"TABLE_OR_VIEW_NOT_FOUND\].*?(`[^`]+`(?:\.`[^`]+`)*)", reason)
    if missing:
        name = missing[1].replace("`", "")
        there = ", ".join([*topics[:TOPICS_SHOWN], *["…"][: len(topics) > TOPICS_SHOWN]]) or "none"
        raise SettingInvalid(
            f"the query names the table {name}, and there is no such topic: each topic is a table "
            f"of its name, between backticks where that has a dash or a dot; there are: {there}",
            setting="query",
            value=query,
        ) from error
    raise SettingInvalid(f"the query makes no sense: {reason}", setting="query", value=query) from (
        error
    )


def _start(context: Context, result: DataFrame, target: Target, mode: str | None) -> None:
    from pyspark.errors import AnalysisException

    key = context.options.get("key")
    try:
        stream_to(context, result, target, mode=mode or "append", key=key)
    except AnalysisException as error:
        is_about_mode = "output mode" in str(error).lower()
        if is_about_mode and mode is None and target.kind != "parquet":
            context.say("results change as records come, so each change is written (--mode update)")
            stream_to(context, result, target, mode="update", key=key)
            return
        hint = (
            "; add --watermark, which tells when a result is final, choose another --mode, or read "
            "all there is with --batch"
            if is_about_mode
            else "; what a stream cannot do, --batch can"
        )
        raise PipelineFailed(plain_reason(str(error)) + hint, name=context.name) from error
