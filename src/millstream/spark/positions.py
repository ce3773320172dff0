"""Where a query stands in each partition, and where its options say that it starts and ends.

A position goes into Spark's checkpoint as JSON, in the form of Spark's Kafka connector, with the
ids of the topics beside it. By them a topic that was deleted and made again under the old name is
told apart from the old one:

    {"orders": {"0": 23, "1": 42}, "@ids": {"orders": "0f2a…"}}

Spark compares the text, so topics and partitions have a fixed order. An offset is that of the next
record to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from millstream.errors import OptionInvalid
from millstream.spark.options import (
    INT64_MAX,
    given_text,
    option_invalid,
    part_invalid,
    was_given,
)

# Topic and partition.
Part: TypeAlias = tuple[str, int]

# No topic can have this name.
IDS = "@ids"
# Instead of an offset.
LATEST, EARLIEST = -1, -2


@dataclass(frozen=True, slots=True)
class Position:
    offsets: Mapping[Part, int] = field(default_factory=dict)
    # By topic. A broker that has none for its topics has none here.
    ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        page: dict[str, object] = {}
        for topic, partition in sorted(self.offsets):
            of_topic = page.setdefault(topic, {})
            assert isinstance(of_topic, dict)
            of_topic[str(partition)] = self.offsets[topic, partition]
        ids = {topic: self.ids[topic] for topic in page if topic in self.ids}
        return page | {IDS: ids} if ids else page

    @classmethod
    def from_json(cls, page: Mapping[str, object]) -> Position:
        offsets: dict[Part, int] = {}
        ids = page.get(IDS, {})
        assert isinstance(ids, dict)
        for topic, of_topic in page.items():
            if topic != IDS:
                assert isinstance(of_topic, dict)
                offsets |= {(topic, int(number)): offset for number, offset in of_topic.items()}
        return cls(offsets, ids)

    def topics(self) -> list[str]:
        return sorted({topic for topic, _ in self.offsets})


def is_same_topic(one: Position, other: Position, topic: str) -> bool:
    """Where either has no ids, names are all there is."""
    mine, yours = one.ids.get(topic), other.ids.get(topic)
    return mine is None or yours is None or mine == yours


# ---- limits: where to start and where to end

Kind: TypeAlias = Literal["earliest", "latest", "committed", "offsets", "timestamp", "timestamps"]


@dataclass(frozen=True, slots=True)
class Limit:
    """`numbers` are offsets, or times in milliseconds, as the kind says."""

    kind: Kind
    numbers: Mapping[Part, int] = field(default_factory=dict)
    timestamp_ms: int = 0

    def time_of(self, part: Part) -> int:
        return self.numbers[part] if self.kind == "timestamps" else self.timestamp_ms


def starting_limit(given: Mapping[str, str], values: Mapping[str, object], default: Kind) -> Limit:
    """Times for all come before times for each, and those before offsets, as in the connector."""
    return _limit(given, values, "starting", default, ("earliest", "latest", "committed"))


def ending_limit(given: Mapping[str, str], values: Mapping[str, object]) -> Limit:
    return _limit(given, values, "ending", "latest", ("latest",))


def _limit(
    given: Mapping[str, str],
    values: Mapping[str, object],
    side: Literal["starting", "ending"],
    default: Kind,
    words: tuple[Kind, ...],
) -> Limit:
    by_time, by_times, by_offsets = (
        f"{side}Timestamp",
        f"{side}OffsetsByTimestamp",
        f"{side}Offsets",
    )
    if was_given(given, by_time):
        timestamp_ms = values[by_time]
        assert isinstance(timestamp_ms, int)
        return Limit("timestamp", timestamp_ms=timestamp_ms)
    if was_given(given, by_times):
        page = values[by_times]
        assert isinstance(page, dict)
        text = given_text(given, by_times)
        return Limit("timestamps", _numbers(by_times, text, page, least=0))
    if not was_given(given, by_offsets):
        return Limit(default)
    text = str(values[by_offsets])
    if text.startswith("{"):
        page = _object(by_offsets, text)
        return Limit("offsets", _numbers(by_offsets, text, page, least=EARLIEST))
    for word in words:
        if text.lower() == word:
            return Limit(word)
    if text.lower() == "earliest":
        raise option_invalid(
            by_offsets, text, "and a batch cannot end at the earliest offset; use latest"
        )
    right = ", ".join((*words, 'or a JSON object such as {"orders": {"0": 23}}'))
    raise option_invalid(by_offsets, text, f"which is no place to {_VERBS[side]} at; use {right}")


_VERBS = {"starting": "start", "ending": "end"}


def _object(name: str, text: str) -> dict[str, object]:
    try:
        page = json.loads(text)
    except ValueError:
        page = None
    if not isinstance(page, dict):
        raise option_invalid(
            name, text, 'which is no JSON; use an object such as {"orders": {"0": 23}}'
        )
    return page


def _numbers(name: str, text: str, page: dict[str, object], least: int) -> dict[Part, int]:
    """Of `{"topic": {"0": 23}}`."""
    found: dict[Part, int] = {}
    for topic, of_topic in page.items():
        if not isinstance(of_topic, dict) or not of_topic:
            raise option_invalid(
                name, text, f'and {topic!r} has no partitions; write {{"{topic}": {{"0": 23}}}}'
            )
        for number, value in of_topic.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not number.isdecimal() or not is_number or not least <= value <= INT64_MAX:
                raise option_invalid(
                    name,
                    text,
                    f"and partition {number!r} of {topic!r} has {value!r}; partitions are numbers "
                    f"from 0, and their values whole numbers from {least}",
                )
            found[topic, int(number)] = value
    return found


def check_batch(starting: Limit, ending: Limit) -> None:
    """What a batch cannot do, and a stream can."""
    if starting.kind == "latest":
        raise option_invalid(
            "startingOffsets", "latest", "and a batch cannot start at the end; use earliest"
        )
    if starting.kind == "offsets":
        why = "a batch cannot start at the end (-1); use -2, the start"
        _refuse("startingOffsets", starting, LATEST, why)
    if ending.kind == "offsets":
        why = "a batch cannot end at the start (-2); use -1, the end"
        _refuse("endingOffsets", ending, EARLIEST, why)
    if starting.kind == ending.kind and starting.kind in ("offsets", "timestamps"):
        _check_same(starting, ending)
    elif starting.kind in _TIMES and ending.kind in _TIMES:
        _check_times(starting, ending)


def _refuse(name: str, limit: Limit, number: int, why: str) -> None:
    for part, value in limit.numbers.items():
        if value == number:
            raise part_invalid(name, value, f"and {why}", place=show(part))


def _check_same(starting: Limit, ending: Limit) -> None:
    suffix = "Offsets" if starting.kind == "offsets" else "OffsetsByTimestamp"
    if starting.numbers.keys() != ending.numbers.keys():
        name, shown = f"ending{suffix}", show_all(ending.numbers)
        raise OptionInvalid(
            f"the option {name} is for {shown}, and starting{suffix} is for "
            f"{show_all(starting.numbers)}; name the same partitions",
            option=name,
            value=shown,
        )
    for part, start in starting.numbers.items():
        end = ending.numbers[part]
        if start > end >= 0:
            raise part_invalid(
                f"ending{suffix}",
                end,
                f"and starting{suffix} has {start}; end at or after the start",
                place=show(part),
            )


_TIMES = ("timestamp", "timestamps")
_SUFFIXES = {"timestamp": "Timestamp", "timestamps": "OffsetsByTimestamp"}
# Of one time, or of one of several.
_VERBS_OF_TIMES = {"timestamp": "is", "timestamps": "has"}


def _check_times(starting: Limit, ending: Limit) -> None:
    """One of both is a time for all partitions."""
    for part in starting.numbers.keys() | ending.numbers.keys() or [None]:
        start = starting.timestamp_ms if part is None else starting.time_of(part)
        end = ending.timestamp_ms if part is None else ending.time_of(part)
        if start > end:
            name, verb = name_of("ending", ending), _VERBS_OF_TIMES[starting.kind]
            place = "" if part is None else show(part)
            other = f"and {name_of('starting', starting)} {verb} {start}"
            to_do = "end at or after the start"
            if ending.kind == "timestamp":
                where = f" for {place}" if place else ""
                raise option_invalid(name, end, f"{other}{where}; {to_do}")
            raise part_invalid(name, end, f"{other}; {to_do}", place=place)


def name_of(side: Literal["starting", "ending"], limit: Limit) -> str:
    """The option that a limit comes from, or would."""
    return side + _SUFFIXES.get(limit.kind, "Offsets")


def show(part: Part) -> str:
    return f"{part[0]}/{part[1]}"


def show_all(parts: Iterable[Part]) -> str:
    return ", ".join(map(show, sorted(parts))) or "none"
