"""What a source is asked for: its options, read and checked together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import OptionInvalid
from millstream.spark.options import (
    BROKER_ROWS,
    SINK_ROWS,
    SOURCE_ROWS,
    BrokerPlace,
    given_text,
    option_invalid,
    part_invalid,
    read_options,
    read_place,
    was_given,
)
from millstream.spark.positions import Limit, Part, check_batch, ending_limit, starting_limit
from millstream.spark.rows import KAFKA_COLUMNS, SQL_TYPES
from millstream.spark.typed_values import CORRUPT
from millstream.spark.value_schema import fields_of
from millstream.wire.groups import GROUP_NAME, GROUP_NAME_RULE

_STRATEGIES = ("assign", "subscribe", "subscribePattern")
_GROUP = re.compile(GROUP_NAME)
_STREAM_ONLY_ENDS = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    place: BrokerPlace
    # One of these three is there.
    topics: tuple[str, ...] | None
    pattern: str | None
    assigned: frozenset[Part] | None
    starting: Limit
    ending: Limit
    # When no record is as new as a starting time.
    falls_to_latest: bool
    max_offsets: int | None
    min_offsets: int | None
    max_bytes: int | None
    max_delay_s: float
    min_partitions: int | None
    max_records_per_partition: int | None
    is_failing_on_loss: bool
    # Names of columns in their order.
    columns: tuple[str, ...]
    value_format: str
    # Fields as SQL writes them.
    value_schema: str | None
    is_failing_fast: bool
    access: str
    group: str | None
    # Which of its two options named it.
    group_option: str
    isolation: int
    fetch_bytes: int
    pushes_filters: bool | None
    archive: str | None = None

    @property
    def schema(self) -> str:
        """The table's columns as SQL; Spark reads this."""
        return ", ".join(f"`{name}` {self._sql_type(name)}" for name in self.columns)

    def _sql_type(self, name: str) -> str:
        if name == "value" and self.value_format == "text":
            return "STRING"
        if name == "value" and self.value_format == "json":
            return f"STRUCT<{self.value_schema}>"
        return SQL_TYPES[name]


def read_source_options(
    given: Mapping[str, str], environment: Mapping[str, str], *, is_stream: bool | None
) -> SourceOptions:
    """`is_stream` is None while nobody knows yet: then only what both forbid is refused."""
    values: Mapping[str, Any] = read_options(given, (*BROKER_ROWS, *SOURCE_ROWS), SINK_ROWS)
    place = read_place(values, environment)
    topics, pattern, assigned = _which(given, values)
    group = _group(values, place)
    starting = starting_limit(given, values, "latest" if is_stream else "earliest")
    ending = ending_limit(given, values)
    if starting.kind == "committed" and group is None:
        raise option_invalid(
            "startingOffsets",
            "committed",
            "and there is no groupId whose offsets are meant; name one with groupId",
        )
    if is_stream is False:
        check_batch(starting, ending)
    if is_stream:
        for name in _STREAM_ONLY_ENDS:
            if was_given(given, name):
                text = given_text(given, name)
                raise option_invalid(name, text, "and streams do not end; leave it out")
    if is_stream and values["includeArchive"] is not None:
        raise option_invalid(
            "includeArchive",
            values["includeArchive"],
            "and streams do not take it; millstream.spark.pipelines.archived.read_with_archive "
            "makes a stream that begins with an archive",
        )
    _check_rates(values)
    return SourceOptions(
        place=place,
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=starting,
        ending=ending,
        falls_to_latest=values["startingOffsetsByTimestampStrategy"] == "latest",
        max_offsets=values["maxOffsetsPerTrigger"],
        min_offsets=values["minOffsetsPerTrigger"],
        max_bytes=values["maxBytesPerTrigger"],
        max_delay_s=values["maxTriggerDelay"] / 1000,
        min_partitions=values["minPartitions"],
        max_records_per_partition=values["maxRecordsPerPartition"],
        is_failing_on_loss=values["failOnDataLoss"],
        columns=_columns(values),
        value_format=values["valueFormat"],
        value_schema=_value_schema(values),
        is_failing_fast=values["valueMode"] == "failfast",
        access=values["access"],
        group=group,
        group_option=_group_option(values),
        isolation=1 if values["kafka.isolation.level"] == "read_committed" else 0,
        fetch_bytes=values["kafka.max.partition.fetch.bytes"],
        pushes_filters={"auto": None, "true": True, "false": False}[values["pushFilters"]],
        archive=values["includeArchive"],
    )


def _which(
    given: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[tuple[str, ...] | None, str | None, frozenset[Part] | None]:
    named = [name for name in _STRATEGIES if was_given(given, name)]
    if len(named) != 1:
        right = "one of " + ", ".join(_STRATEGIES)
        if not named:
            raise OptionInvalid(
                f"the option subscribe is missing, and so are the others; give {right}. A table "
                "has them as `CREATE TABLE … USING millstream OPTIONS (subscribe 'orders')`, "
                "without a list of columns",
                option="subscribe",
                value="",
            )
        shown = " and ".join(named)
        raise option_invalid(
            named[0], given_text(given, named[0]), f"and {shown} are given; give only {right}"
        )
    pattern = values["subscribePattern"]
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise option_invalid(
                "subscribePattern", pattern, f"which is no regular expression: {error}"
            ) from None
    page = values["assign"]
    assigned = None if page is None else _assigned(page, given_text(given, "assign"))
    return values["subscribe"], pattern, assigned


def _assigned(page: Mapping[str, Any], text: str) -> frozenset[Part]:
    found = set()
    for topic, numbers in page.items():
        is_right = isinstance(numbers, list) and all(
            isinstance(number, int) and not isinstance(number, bool) and number >= 0
            for number in numbers
        )
        if not is_right:
            raise option_invalid(
                "assign", text, f'and {topic!r} has no list of partitions; write {{"{topic}": [0]}}'
            )
        found |= {(topic, number) for number in numbers}
    if not found:
        raise option_invalid("assign", text, 'which names none; write {"orders": [0, 1]}')
    return frozenset(found)


def _group(values: Mapping[str, Any], place: BrokerPlace) -> str | None:
    ours, kafkas = values["groupId"], values["kafka.group.id"]
    if ours is not None and kafkas is not None and ours != kafkas:
        raise option_invalid("kafka.group.id", kafkas, f"and groupId is {ours!r}; give one of both")
    group: str | None = ours or kafkas
    # Another broker of the Kafka protocol has a rule of its own.
    if group is not None and place.url is not None and _GROUP.fullmatch(group) is None:
        raise group_invalid(_group_option(values), group)
    return group


def _group_option(values: Mapping[str, Any]) -> str:
    return "kafka.group.id" if values["groupId"] is None else "groupId"


def group_invalid(name: str, group: str) -> OptionInvalid:
    return option_invalid(name, group, f"which is no name of a group; {GROUP_NAME_RULE}")


def _check_rates(values: Mapping[str, Any]) -> None:
    least, most = values["minOffsetsPerTrigger"], values["maxOffsetsPerTrigger"]
    if least is not None and most is not None and least > most:
        raise option_invalid(
            "minOffsetsPerTrigger",
            least,
            f"and maxOffsetsPerTrigger is {most}; the least cannot be above the most",
        )


def _columns(values: Mapping[str, Any]) -> tuple[str, ...]:
    chosen = values["columns"]
    extra = [
        name
        for name, option in (
            ("headers", "includeHeaders"),
            ("lane", "includeLane"),
            ("dead_letter", "includeDeadLetter"),
        )
        if values[option]
    ]
    if chosen is None:
        is_json = values["valueFormat"] == "json" and values["valueMode"] == "permissive"
        return (*KAFKA_COLUMNS, *extra, *([CORRUPT] if is_json else []))
    by_lower = {name.lower(): name for name in SQL_TYPES}
    for name in chosen:
        if name.lower() not in by_lower:
            raise part_invalid(
                "columns", name, f"and there is no such column; use {', '.join(SQL_TYPES)}"
            )
    named = list(dict.fromkeys(by_lower[name.lower()] for name in chosen))
    return (*named, *(name for name in extra if name not in named))


def _value_schema(values: Mapping[str, Any]) -> str | None:
    schema: str | None = values["valueSchema"]
    is_json = values["valueFormat"] == "json"
    if schema is not None and not is_json:
        raise option_invalid(
            "valueSchema", schema, f"and valueFormat is {values['valueFormat']}; set it to json"
        )
    if is_json and schema is None:
        raise option_invalid(
            "valueFormat",
            "json",
            "and there is no valueSchema; name the fields, such as `id BIGINT, total DOUBLE`",
        )
    if schema is None:
        return None
    try:
        return fields_of(schema)
    except ValueError as error:
        raise option_invalid(
            "valueSchema",
            schema,
            f"and {error}; write columns as in SQL, such as `id BIGINT, total DOUBLE`",
        ) from None
