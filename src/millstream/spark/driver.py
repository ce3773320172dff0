"""What the driver of a query does: which partitions there are, where a batch begins and ends, and
what its tasks are.

Where partitions end is in `latest.py`, what a group is told in `commits.py`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from millstream.errors import (
    KafkaRefused,
    MillstreamError,
    OptionInvalid,
    PartitionUnknown,
    TopicUnknown,
)
from millstream.spark import fetching
from millstream.spark.commits import Commits, is_name_refused
from millstream.spark.kafka_client import GONE_S, Again, Broken, Kafka, TopicFacts
from millstream.spark.latest import Known, Latest
from millstream.spark.manifests import PartFiles, files_of, kafka_addresses, patiently
from millstream.spark.options import BrokerPlace, option_invalid, part_invalid
from millstream.spark.positions import (
    EARLIEST,
    LATEST,
    Limit,
    Part,
    Position,
    is_same_topic,
    name_of,
    show,
    show_all,
)
from millstream.spark.ranges import Range, limited_by_bytes, shared_out, tasks_of
from millstream.spark.slices import Task, data_lost
from millstream.spark.source_options import SourceOptions, group_invalid

logger = logging.getLogger("millstream.spark")

# With access=auto a smaller range is not worth a question for its files.
FILES_OFFSETS_MIN = 1000
# What is read to find out how large records are, and of how many partitions.
SAMPLE_BYTES = 64 * 1024
SAMPLES_MAX = 32
# Where the setting `http` of a broker is among its configs.
HTTP_CONFIG = "millstream.http"


class Bounds(NamedTuple):
    """What filters leave of a batch."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first_offset: int = 0
    # Exclusive.
    end_offset: int | None = None
    # Records before the first one of this time, or newer, are not wanted.
    timestamp_ms: int | None = None

    def allows(self, part: Part) -> bool:
        return (self.topics is None or part[0] in self.topics) and (
            self.partitions is None or part[1] in self.partitions
        )


EVERYTHING = Bounds()


@dataclass(slots=True)
class Loss:
    """What was gone before it was read, by this query."""

    is_failing: bool
    offsets: int = 0

    def found(self, part: Part, first: int, until: int | None, why: str) -> None:
        """`until` is None where nobody knows how many there were."""
        error = data_lost(part, first, until, why)
        if self.is_failing:
            raise error
        if until is not None:
            self.offsets += until - first
        logger.warning("%s: skipped; %d skipped by this query", error.message, self.offsets)


class Driver:
    """One query's view of the broker. Connects when it is asked something."""

    def __init__(
        self,
        options: SourceOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options = options
        self.loss = Loss(options.is_failing_on_loss)
        self._clock = clock
        self._sleep = sleep
        self._kafka: Kafka | None = None
        self._http: BrokerPlace | None = None
        self._has_looked_for_http = False
        self._latest = Latest(self, clock, sleep)
        self._commits = None if options.group is None else Commits(options.group, clock)

    def close(self) -> None:
        if self._kafka is not None:
            self._kafka.close()
            self._kafka = None

    @property
    def kafka(self) -> Kafka:
        if self._kafka is None:
            place = self.options.place
            servers = place.servers or kafka_addresses(place, clock=self._clock, sleep=self._sleep)
            self._kafka = Kafka(
                place,
                servers,
                isolation=self.options.isolation,
                clock=self._clock,
                sleep=self._sleep,
            )
        return self._kafka

    @property
    def servers(self) -> tuple[str, ...]:
        return self.kafka.servers

    @property
    def http(self) -> BrokerPlace | None:
        """Where the same broker answers HTTP; None when it is not one of ours."""
        if not self._has_looked_for_http:
            self._has_looked_for_http = True
            self._http = self._find_http()
        return self._http

    def _find_http(self) -> BrokerPlace | None:
        place = self.options.place
        if place.url is not None:
            return place
        try:
            address = self.kafka.broker_config(HTTP_CONFIG)
        except KafkaRefused:
            return None
        if not address or address.endswith(":0"):
            return None
        scheme = "https" if place.uses_tls else "http"
        return replace(place, url=address if "://" in address else f"{scheme}://{address}")

    # ---- what there is

    def known(self, *, is_start: bool) -> Known:
        """At the start what was named must be there; later what is gone is lost data."""
        options = self.options
        if options.pattern is not None:
            pattern = re.compile(options.pattern)
            facts = self.kafka.metadata(None).topics
            topics = {
                name: one
                for name, one in facts.items()
                if pattern.fullmatch(name) and not name.startswith("__")
            }
            return _known(topics)
        names = options.topics or tuple({topic for topic, _ in options.assigned or ()})
        topics = dict(self.kafka.metadata(names).topics)
        missing = sorted(set(names) - topics.keys())
        if missing and is_start:
            raise TopicUnknown(
                f"there is no topic {missing[0]!r} at {', '.join(self.servers)}; make it with "
                "`mill topic create`, or publish something to it",
                topic=missing[0],
            )
        known = _known(topics)
        if options.assigned is None:
            return known
        if is_start and (unknown := options.assigned - known.parts):
            topic, number = min(unknown)
            raise PartitionUnknown(
                f"the topic {topic} has no partition {number}; the option assign names it",
                topic=topic,
                partition=number,
            )
        return Known(known.parts & options.assigned, known.ids)

    # ---- where to start, where to end

    def starting(self) -> Position:
        known = self.known(is_start=True)
        limit = self.options.starting
        if limit.kind == "committed":
            return Position(self._committed(known), known.ids)
        return Position(self._resolved(limit, known, is_start=True), known.ids)

    def ending(self) -> Position:
        known = self.known(is_start=True)
        return Position(self._resolved(self.options.ending, known, is_start=False), known.ids)

    def require_order(self, start: Position, end: Position) -> None:
        """A batch ends where it starts, or later; where it ends by itself, at what there is."""
        limit = self.options.ending
        if limit.kind == "latest":
            return
        for part in sorted(start.offsets.keys() & end.offsets.keys()):
            first, until = start.offsets[part], end.offsets[part]
            if until < first and is_same_topic(start, end, part[0]):
                name = name_of("ending", limit)
                why = (
                    f"the batch would start at offset {first} and end at {until}; end at or after "
                    "the start"
                )
                if limit.kind == "timestamp":
                    raise option_invalid(name, limit.timestamp_ms, f"and of {show(part)} {why}")
                raise part_invalid(name, limit.numbers[part], f"and {why}", place=show(part))

    def _resolved(self, limit: Limit, known: Known, *, is_start: bool) -> dict[Part, int]:
        side = "starting" if is_start else "ending"
        if limit.kind in ("earliest", "latest"):
            word = EARLIEST if limit.kind == "earliest" else LATEST
            return self._all(dict.fromkeys(known.parts, word))
        if limit.kind == "timestamp":
            asked = dict.fromkeys(known.parts, limit.timestamp_ms)
            return self._by_time(asked, f"{side}Timestamp", is_start=is_start)
        _require_same(limit.numbers.keys(), known.parts, side, limit.kind)
        if limit.kind == "timestamps":
            name = f"{side}OffsetsByTimestamp"
            return self._by_time(limit.numbers, name, is_start=is_start)
        words = {part: number for part, number in limit.numbers.items() if number < 0}
        found = dict(limit.numbers) | self._all(words)
        return self._clamped(found, f"{side}Offsets") if is_start else self._ended(found)

    def _by_time(self, asked: Mapping[Part, int], name: str, *, is_start: bool) -> dict[Part, int]:
        found = self.kafka.list_offsets(asked)
        late = [part for part in asked if found.get(part) is None]
        if late and is_start and not self.options.falls_to_latest:
            why = (
                f"and {show_all(late)} has no record that new; start earlier, or set "
                "startingOffsetsByTimestampStrategy to latest"
            )
            if name == "startingTimestamp":
                raise option_invalid(name, asked[min(late)], why)
            raise part_invalid(name, asked[min(late)], why, place=show(min(late)))
        rest = self._all(dict.fromkeys(late, LATEST))
        return {part: number for part, number in found.items() if number is not None} | rest

    def _committed(self, known: Known) -> dict[Part, int]:
        """Where the group has committed nothing, from the start: nothing is passed over."""
        group = self.options.group
        assert group is not None
        with self._naming_group():
            found = self.kafka.committed(group, known.parts)
        rest = dict.fromkeys(known.parts - found.keys(), EARLIEST)
        return self._clamped(found | self._all(rest), "the committed offsets")

    def _clamped(self, offsets: dict[Part, int], what: str) -> dict[Part, int]:
        """Offsets that are in the log; others are lost data."""
        earliest = self._all(dict.fromkeys(offsets, EARLIEST))
        latest = self._all(dict.fromkeys(offsets, LATEST))
        found = {}
        for part, offset in offsets.items():
            low, high = earliest[part], latest[part]
            if offset < low:
                self.loss.found(part, offset, low, f"{what} start before the log does")
            elif offset > high:
                self.loss.found(part, high, offset, f"{what} lie past the log's end")
            found[part] = min(max(offset, low), high)
        return found

    def _ended(self, offsets: dict[Part, int]) -> dict[Part, int]:
        """Ends that a batch can reach."""
        latest = self._all(dict.fromkeys(offsets, LATEST))
        earliest: Mapping[Part, int] = {}
        if not self.loss.is_failing:
            # Where all that was asked for is gone, the start was moved past the end.
            earliest = self._all(dict.fromkeys(offsets, EARLIEST))
        for part in sorted(offsets):
            offset, high = offsets[part], latest[part]
            if offset <= high:
                continue
            if self.loss.is_failing:
                raise part_invalid(
                    "endingOffsets",
                    offset,
                    f"which can be read up to {high}; end there or before, or set failOnDataLoss "
                    "to false to read what is there",
                    place=show(part),
                )
            self.loss.found(part, high, offset, "endingOffsets lie past the log's end")
        return {
            part: max(min(offset, latest[part]), earliest.get(part, 0))
            for part, offset in offsets.items()
        }

    def _all(self, asked: Mapping[Part, int]) -> dict[Part, int]:
        """What must have an answer: words for offsets, in partitions that are there."""
        if not asked:
            return {}
        found = self.kafka.list_offsets(asked)
        gone = [part for part in asked if found.get(part) is None]
        if gone:
            self._sleep(GONE_S)
            found |= self.kafka.list_offsets({part: asked[part] for part in gone})
            gone = [part for part in gone if found.get(part) is None]
        if gone:
            raise TopicUnknown(
                f"{show_all(gone)} was deleted while the query began; start it again",
                topic=gone[0][0],
            )
        return {part: number for part, number in found.items() if number is not None}

    # ---- streams

    def latest(self, start: Position) -> Position:
        """The ends of all partitions, as fresh as `POLL_S` allows. What `start` has and the answer
        has not was looked for twice."""
        return self._latest.get(start)

    def fix_latest(self) -> None:
        """From now on nothing newer counts."""
        self._latest.fix()

    @property
    def seen(self) -> Position | None:
        """The ends as they were seen last."""
        return self._latest.position

    def limited(self, start: Position, end: Position) -> Position:
        """What a micro-batch takes of what there is."""
        options = self.options
        if options.max_offsets is None and options.max_bytes is None:
            return end
        begin = self.begin(start, end)
        offsets: Mapping[Part, int] = end.offsets
        if options.max_offsets is not None:
            offsets = shared_out(options.max_offsets, begin, offsets)
        if options.max_bytes is not None:
            each = self._bytes_each(begin, offsets)
            offsets = limited_by_bytes(options.max_bytes, begin, offsets, each)
        return Position(offsets, end.ids)

    def begin(self, start: Position, end: Position) -> dict[Part, int]:
        """Where each partition of `end` is read from: one that is new, from its earliest record,
        and so is one whose topic was made again."""
        is_known = {
            part: offset
            for part, offset in start.offsets.items()
            if is_same_topic(start, end, part[0])
        }
        new = dict.fromkeys((part for part in end.offsets if part not in is_known), EARLIEST)
        found = self.kafka.list_offsets(new) if new else {}
        begin = {part: is_known.get(part, found.get(part) or 0) for part in end.offsets}
        return {part: min(offset, end.offsets[part]) for part, offset in begin.items()}

    def _bytes_each(self, begin: Mapping[Part, int], end: Mapping[Part, int]) -> dict[Part, float]:
        """About how many bytes an offset has, by a look at what comes next."""
        waiting = sorted(
            (part for part in end if end[part] > begin[part]),
            key=lambda part: begin[part] - end[part],
        )
        found: dict[Part, float] = {}
        for part in waiting[:SAMPLES_MAX]:
            try:
                each = fetching.sample(self.kafka, part, begin[part], SAMPLE_BYTES)
            except (Broken, Again):
                self.kafka.close()
                continue
            if each is not None:
                found[part] = each
        mean = sum(found.values()) / len(found) if found else 1.0
        return {part: found.get(part, mean) for part in waiting}

    def require_all(self, start: Position, end: Position) -> None:
        """DataLost before a micro-batch is in the checkpoint. From then on Spark reads just that
        batch, and a query that no longer named a topic would fail the same way when it names it
        again. What may be skipped is skipped, and counted, when the batch is read."""
        if self.loss.is_failing:
            self._ranges(start, end)

    def waiting(self, start: Position, end: Position) -> int:
        """How many offsets there are to read."""
        begin = self.begin(start, end)
        return sum(end.offsets[part] - begin[part] for part in end.offsets)

    def commit(self, position: Position) -> None:
        """To the query's group; see `Commits`."""
        if self._commits is not None:
            with self._naming_group():
                self._commits.make(self.kafka, position, self.seen or position)

    @contextmanager
    def _naming_group(self) -> Iterator[None]:
        """A name that the broker refuses is a wrong option, whatever the rule is there."""
        try:
            yield
        except KafkaRefused as error:
            group = self.options.group
            if group is None or not is_name_refused(error):
                raise
            raise group_invalid(self.options.group_option, group) from error

    # ---- tasks

    def tasks(self, start: Position, end: Position, bounds: Bounds = EVERYTHING) -> list[Task]:
        """Of the offsets from `start` up to `end`."""
        ranges = self._ranges(start, end)
        if bounds != EVERYTHING:
            ranges = self._bounded(ranges, bounds)
        options = self.options
        cut = tasks_of(ranges, options.min_partitions, options.max_records_per_partition)
        files = self._files(cut)
        return [Task(one, end.ids.get(one.part[0]), _for(files.get(one.part), one)) for one in cut]

    def _ranges(self, start: Position, end: Position) -> list[Range]:
        gone = sorted(start.offsets.keys() - end.offsets.keys())
        for part in gone:
            why = f"{part[0]} is no longer subscribed, or was deleted"
            self.loss.found(part, start.offsets[part], None, why)
        found = []
        new = []
        for part in sorted(end.offsets):
            offset, until = start.offsets.get(part), end.offsets[part]
            if offset is None:
                new.append(part)
            elif not is_same_topic(start, end, part[0]):
                why = "its topic was deleted and made again"
                self.loss.found(part, offset, None, why)
                new.append(part)
            elif until < offset:
                self.loss.found(part, until, offset, "the log's end was lost")
            else:
                found.append(Range(part, offset, until))
        return found + self._new_ranges(new, end)

    def _new_ranges(self, new: list[Part], end: Position) -> list[Range]:
        if not new:
            return []
        earliest = self.kafka.list_offsets(dict.fromkeys(new, EARLIEST))
        found = []
        for part in new:
            first = earliest.get(part) or 0
            if first > 0:
                self.loss.found(part, 0, first, "the partition is new to the query")
            found.append(Range(part, min(first, end.offsets[part]), end.offsets[part]))
        return found

    def _bounded(self, ranges: Iterable[Range], bounds: Bounds) -> list[Range]:
        kept = [one for one in ranges if bounds.allows(one.part)]
        times: Mapping[Part, int | None] = {}
        if bounds.timestamp_ms is not None and kept:
            times = self.kafka.list_offsets({one.part: bounds.timestamp_ms for one in kept})
        found = []
        for part, start, end in kept:
            first = max(start, bounds.first_offset)
            until = end if bounds.end_offset is None else min(end, bounds.end_offset)
            if bounds.timestamp_ms is not None:
                at = times.get(part)
                # No record is that new.
                first = until if at is None else max(first, at)
            if first < until:
                found.append(Range(part, first, until))
        return found

    def _files(self, ranges: list[Range]) -> dict[Part, PartFiles]:
        """Of the partitions whose files a task may read."""
        access = self.options.access
        if access == "wire" or not ranges:
            return {}
        wanted: dict[str, set[int]] = {}
        for (topic, number), start, end in ranges:
            if access == "files" or end - start >= FILES_OFFSETS_MIN:
                wanted.setdefault(topic, set()).add(number)
        if not wanted:
            return {}
        place = self.http
        if place is None:
            if access == "files":
                raise option_invalid(
                    "access",
                    "files",
                    "and the broker does not say where its files are; name its HTTP address with "
                    "`server`, or use auto or wire",
                )
            return {}
        found: dict[Part, PartFiles] = {}
        for topic, numbers in wanted.items():
            ask = partial(files_of, place, topic, sorted(numbers))
            if access == "files":
                by_number = patiently(place, ask, clock=self._clock, sleep=self._sleep)
            else:
                try:
                    by_number = ask()
                except MillstreamError:
                    continue
            found |= {(topic, number): files for number, files in by_number.items()}
        return found


def _known(topics: Mapping[str, TopicFacts]) -> Known:
    parts = frozenset((name, number) for name, one in topics.items() for number in one.leaders)
    ids = {name: one.id for name, one in sorted(topics.items()) if one.id is not None}
    return Known(parts, ids)


def _require_same(named: Iterable[Part], there: Iterable[Part], side: str, kind: str) -> None:
    """As in Spark's connector: who names offsets names them all."""
    missing, extra = set(there) - set(named), set(named) - set(there)
    if not missing and not extra:
        return
    name = f"{side}Offsets" if kind == "offsets" else f"{side}OffsetsByTimestamp"
    why = f"and says nothing of {show_all(missing)}" if missing else ""
    if extra:
        why = f"{why}, and {show_all(extra)} is not read".lstrip(", ")
    shown, start = show_all(named), "-2" if kind == "offsets" else "0"
    raise OptionInvalid(
        f"the option {name} is for {shown}, {why}; name every partition that is read, {start} is "
        "its start",
        option=name,
        value=shown,
    )


def _for(files: PartFiles | None, one: Range) -> PartFiles | None:
    """Only the segments that a task needs, and the one after, which tells of gaps."""
    if files is None:
        return None
    segments = files.segments
    bases = [segment.base_offset for segment in segments]
    first = max((i for i, base in enumerate(bases) if base <= one.start), default=0)
    last = max((i for i, base in enumerate(bases) if base < one.end), default=0)
    return replace(files, segments=segments[first : last + 2])
