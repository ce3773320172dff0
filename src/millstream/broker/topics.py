"""Topics: made, listed, described, changed, purged and deleted.

The engine keeps a topic's name, UUID and partitions; its settings are a record in the internal
topic `__topics`, under its UUID, so a topic made again under an old name inherits nothing.

Made: first the settings, then the topic. Deleted: first the topic, then the settings. So a crash
in between leaves settings of a topic that is not there, and the next start takes them away.
"""

from __future__ import annotations

import uuid as uuids
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from millstream.broker.topic_settings import (
    StoredTopic,
    TopicDefaults,
    TopicSettings,
    known_settings,
    merge,
    parse_settings,
)
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    MillstreamError,
    PartitionCountInvalid,
    PartitionUnknown,
    TooManyTopics,
    TopicExists,
    TopicReserved,
)
from millstream.log.partition import PartitionId
from millstream.log.store import check_topic_name, topic_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from millstream.broker.topic_settings import Given
    from millstream.broker.views import Change, Views
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine

INTERNAL_PREFIX = "__"


class Topic(NamedTuple):
    name: str
    uuid: uuids.UUID
    partitions: int
    settings: TopicSettings
    created_ms: int
    # What was set for it; all else in `settings` is the broker's default.
    given: Given
    # Whether it ever had, or is about to have, a record of another lane than normal.
    uses_lanes: bool = False
    # As it is stored.
    opened_to: tuple[int, ...] = ()

    @property
    def is_append_time(self) -> bool:
        """Whether the time that a publisher gives is not looked at."""
        return self.settings.timestamps == "append"


class PartitionFacts(NamedTuple):
    partition: int
    start: int
    # The high watermark: the offset that the next visible record will have.
    end: int
    bytes: int
    segments: int
    leader_epoch: int


class Description(NamedTuple):
    topic: Topic
    partitions: list[PartitionFacts]


@dataclass(frozen=True, slots=True)
class TopicLimits:
    topics_max: int = 10_000
    # Of one topic, and of all of them together.
    partitions_max: int = 1000
    partitions_total_max: int = 20_000
    partitions_default: int = 3
    is_auto_create: bool = True


class SettingsView:
    """UUID of a topic → what only the broker knows of it."""

    __slots__ = ("_stored",)

    name = "topics"
    partition = PartitionId("__topics", 0)

    def __init__(self) -> None:
        self._stored: dict[bytes, bytes] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            if value is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = value

    def value_of(self, key: bytes) -> bytes | None:
        return self._stored.get(key)

    def entries(self) -> Iterable[Change]:
        return list(self._stored.items())


class Topics:
    """Every topic but the internal ones."""

    __slots__ = (
        "_busy",
        "_clock",
        "_defaults",
        "_deleted",
        "_engine",
        "_ensuring",
        "_grown",
        "_limits",
        "_partitions",
        "_purged",
        "_purging",
        "_view",
        "_views",
        "by_id",
        "by_name",
    )

    def __init__(
        self,
        engine: Engine,
        views: Views,
        clock: Clock,
        defaults: TopicDefaults,
        limits: TopicLimits,
    ) -> None:
        self._engine = engine
        self._views = views
        self._clock = clock
        self._defaults = defaults
        self._limits = limits
        self._view = SettingsView()
        views.add(self._view)
        # To be read by the publisher, once a record: a call less.
        self.by_name: dict[str, Topic] = {}
        # The same by the bytes of their UUIDs, as Kafka's newer messages name them.
        self.by_id: dict[bytes, Topic] = {}
        # Partitions that there are, and those that are being made.
        self._partitions = 0
        # Topics that are being changed: done when the change is.
        self._busy: dict[str, Pending[None]] = {}
        self._ensuring: dict[str, Pending[Topic]] = {}
        self._deleted: list[Callable[[Topic], None]] = []
        self._grown: list[Callable[[Topic], None]] = []
        self._purged: list[Callable[[Topic], None]] = []
        self._purging: list[Callable[[Topic], Pending[None]]] = []

    # ---- looking

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def partitions_total(self) -> int:
        return sum(topic.partitions for topic in self.by_name.values())

    def names(self) -> list[str]:
        return sorted(self.by_name)

    def get(self, name: str) -> Topic:
        """TopicUnknown, or TopicReserved for one of the broker's own."""
        topic = self.by_name.get(name)
        if topic is None:
            refuse_reserved(name)
            check_topic_name(name)
            raise topic_unknown(name)
        return topic

    def partition_of(self, name: str, number: int) -> PartitionId:
        """Raises when there is no such topic, or no such partition in it."""
        topic = self.get(name)
        if not 0 <= number < topic.partitions:
            raise partition_unknown(topic, number)
        return PartitionId(name, number)

    def batch_bytes_max(self, topic: Topic) -> int:
        """The largest batch that its partitions take."""
        return self._defaults.for_engine(topic.settings).batch_bytes_max

    def describe(self, name: str) -> Description:
        topic = self.get(name)
        return Description(topic, [self._facts(name, n) for n in range(topic.partitions)])

    def _facts(self, name: str, number: int) -> PartitionFacts:
        id = PartitionId(name, number)
        offsets, extent = self._engine.offsets(id), self._engine.extent(id)
        return PartitionFacts(number, *offsets, *extent)

    def watch_deleted(self, call: Callable[[Topic], None]) -> None:
        self._deleted.append(call)

    def watch_partitions(self, call: Callable[[Topic], None]) -> None:
        """Told of a topic that was made, or has more partitions than before."""
        self._grown.append(call)

    def watch_purging(self, call: Callable[[Topic], Pending[None]]) -> None:
        """Told of a topic that is about to be purged, and waited for: what is on its way to the
        topic is then in it, and is purged too, or will not come."""
        self._purging.append(call)

    def watch_purged(self, call: Callable[[Topic], None]) -> None:
        """Told of a topic whose records are all gone."""
        self._purged.append(call)

    # ---- changing

    def create(
        self,
        name: str,
        partitions: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Pending[Topic]:
        return follow(self._create(name, partitions, settings or {}))

    def ensure(self, name: str, check: Callable[[Topic], object] | None = None) -> Pending[Topic]:
        """The topic; made when it is not there and the settings allow that. Those who ask in
        the same moment share one making. `check` raises for what the topic is not to be made for,
        and gets it as it would be."""
        topic = self.by_name.get(name)
        if topic is not None:
            return Pending.of(topic)
        if check is not None and self._limits.is_auto_create:
            try:
                check(self.imagine(name))
            except MillstreamError as error:
                return Pending.failed(error)
        making = self._ensuring.get(name)
        if making is not None:
            return making
        making = follow(self._ensure(name))
        if not making.is_done:
            self._ensuring[name] = making
            making.then(lambda _: self._ensuring.__delitem__(name))
        return making

    def _ensure(self, name: str) -> Generator[Pending[Any], Any, Topic]:
        if not self._limits.is_auto_create:
            return self.get(name)
        try:
            topic: Topic = yield self.create(name)
        except TopicExists:
            return self.get(name)
        return topic

    def _create(
        self, name: str, partitions: int | None, settings: Mapping[str, object]
    ) -> Generator[Pending[Any], Any, Topic]:
        refuse_reserved(name)
        check_topic_name(name)
        given = merge({}, parse_settings(settings))
        effective = self._defaults.effective(given)
        count = self._limits.partitions_default if partitions is None else partitions
        self._check_count(count)
        yield from self._free(name)
        if name in self.by_name:
            raise TopicExists(f"there is a topic {name} already", topic=name)
        self._check_room(count, is_new=True)
        uuid = uuids.uuid4()
        stored = StoredTopic(name, self._clock.wall_ms(), given)
        with self._changing(name, adding=count):
            yield self._views.change(self._view, [(uuid.bytes, msgspec.json.encode(stored))])
            try:
                yield self._engine.create(
                    name, count, self._defaults.for_engine(effective), uuid.bytes
                )
            except MillstreamError:
                self._forget_settings(uuid)
                raise
            topic = Topic(name, uuid, count, effective, stored.created_ms, given)
            self._show(topic)
        for call in self._grown:
            call(topic)
        return topic

    def imagine(
        self,
        name: str,
        partitions: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Topic:
        """The topic that `create` would make; raises what that would. Nothing is made."""
        refuse_reserved(name)
        check_topic_name(name)
        given = merge({}, parse_settings(settings or {}))
        count = self._limits.partitions_default if partitions is None else partitions
        self._check_count(count)
        if name in self.by_name:
            raise TopicExists(f"there is a topic {name} already", topic=name)
        self._check_room(count, is_new=True)
        effective = self._defaults.effective(given)
        return Topic(name, uuids.UUID(int=0), count, effective, self._clock.wall_ms(), given)

    def imagine_settings(self, name: str, settings: Mapping[str, object]) -> None:
        """Raises what `alter` would."""
        self.get(name)
        parse_settings(settings)

    def imagine_partitions(self, name: str, count: int) -> None:
        """Raises what `add_partitions` would."""
        self._check_more(self.get(name), count)

    def alter(self, name: str, settings: Mapping[str, object]) -> Pending[Topic]:
        """Change settings; a None takes one back to the default."""
        return follow(self._alter(name, settings))

    def _alter(
        self, name: str, settings: Mapping[str, object]
    ) -> Generator[Pending[Any], Any, Topic]:
        changes = parse_settings(settings)
        self.get(name)
        yield from self._free(name)
        topic = self.get(name)
        given = merge(topic.given, changes)
        effective = self._defaults.effective(given)
        opened_to = topic.opened_to
        if topic.settings.inspect and not effective.inspect:
            opened_to = self._ends(topic)
        stored = StoredTopic(name, topic.created_ms, given, topic.uses_lanes, opened_to)
        with self._changing(name):
            yield self._views.change(self._view, [(topic.uuid.bytes, msgspec.json.encode(stored))])
            topic = topic._replace(settings=effective, given=given, opened_to=opened_to)
            self._show(topic)
            yield self._engine.alter(name, settings=self._defaults.for_engine(effective))
        return topic

    def _show(self, topic: Topic) -> None:
        """As it is from now on."""
        self.by_name[topic.name] = self.by_id[topic.uuid.bytes] = topic

    def use_lanes(self, name: str) -> Pending[Topic]:
        """From now on the topic may have records of every lane; done when that is durable. Those
        who ask in the same moment wait for each other."""
        return follow(self._use_lanes(name))

    def _use_lanes(self, name: str) -> Generator[Pending[Any], Any, Topic]:
        self.get(name)
        yield from self._free(name)
        topic = self.get(name)
        if topic.uses_lanes:
            return topic
        stored = StoredTopic(
            name, topic.created_ms, topic.given, uses_lanes=True, opened_to=topic.opened_to
        )
        with self._changing(name):
            yield self._views.change(self._view, [(topic.uuid.bytes, msgspec.json.encode(stored))])
            topic = topic._replace(uses_lanes=True)
            self._show(topic)
        return topic

    def add_partitions(self, name: str, count: int) -> Pending[Topic]:
        """`count` is the new total."""
        return follow(self._add_partitions(name, count))

    def _add_partitions(self, name: str, count: int) -> Generator[Pending[Any], Any, Topic]:
        self.get(name)
        yield from self._free(name)
        topic = self.get(name)
        self._check_more(topic, count)
        with self._changing(name, adding=count - topic.partitions):
            yield self._engine.alter(name, partitions=count)
            topic = topic._replace(partitions=count)
            self._show(topic)
        for call in self._grown:
            call(topic)
        return topic

    def delete(self, name: str) -> Pending[None]:
        return follow(self._delete(name))

    def _delete(self, name: str) -> Generator[Pending[Any], Any, None]:
        self.get(name)
        yield from self._free(name)
        topic = self.get(name)
        with self._changing(name):
            yield self._engine.delete(name)
            del self.by_name[name], self.by_id[topic.uuid.bytes]
            for call in self._deleted:
                call(topic)
            try:
                # One append with what the watchers changed in other views.
                yield self._forget_settings(topic.uuid)
            except MillstreamError as error:
                # The topic is gone for good; what is left of it nobody can see.
                _logger().warning("left for the next start", topic=name, error=str(error))

    def purge(self, name: str) -> Pending[None]:
        """Remove all records there are now. Offsets go on where they were."""
        return follow(self._purge(name))

    def _purge(self, name: str) -> Generator[Pending[Any], Any, None]:
        self.get(name)
        yield from self._free(name)
        topic = self.get(name)
        with self._changing(name):
            for announce in self._purging:
                yield announce(topic)
            ids = [PartitionId(name, number) for number in range(topic.partitions)]
            # All in one turn, so that they are in one round.
            trims = [self._engine.trim(id, self._engine.offsets(id).high_watermark) for id in ids]
            yield from trims
            for call in self._purged:
                call(topic)

    def trim(self, name: str, number: int, offset: int | None = None) -> Pending[int]:
        """Remove a partition's records before an offset, or all; the first offset then."""
        return follow(self._trim(name, number, offset))

    def _trim(
        self, name: str, number: int, offset: int | None
    ) -> Generator[Pending[Any], Any, int]:
        id = self.partition_of(name, number)
        end = self._engine.offsets(id).high_watermark
        yield self._engine.trim(id, end if offset is None else offset)
        return self._engine.offsets(id).start

    def _forget_settings(self, uuid: uuids.UUID) -> Pending[None]:
        """What this fails to remove, the next start removes."""
        return self._views.change(self._view, [(uuid.bytes, None)])

    def _free(self, name: str) -> Generator[Pending[Any], Any, None]:
        """Wait until nobody else changes the topic."""
        while name in self._busy:
            yield self._busy[name]

    @contextmanager
    def _changing(self, name: str, adding: int = 0) -> Iterator[None]:
        done = self._busy[name] = Pending[None]()
        self._partitions += adding
        try:
            yield
        finally:
            self._partitions -= adding
            del self._busy[name]
            done.succeed(None)

    def _check_more(self, topic: Topic, count: int) -> None:
        self._check_count(count)
        if count < topic.partitions:
            raise PartitionCountInvalid(
                f"topic {topic.name} has {topic.partitions} partitions; it cannot have fewer",
                topic=topic.name,
                partitions=count,
            )
        self._check_room(count - topic.partitions, is_new=False)

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self._limits.partitions_max:
            raise PartitionCountInvalid(
                f"a topic has 1 to {self._limits.partitions_max} partitions, not {count}",
                partitions=count,
                limit=self._limits.partitions_max,
            )

    def _check_room(self, more: int, *, is_new: bool) -> None:
        limits = self._limits
        total = self.partitions_total + self._partitions
        if total + more > limits.partitions_total_max:
            raise TooManyTopics(
                f"there are {total} partitions, and {limits.partitions_total_max} are allowed; "
                "delete a topic, or raise partitions_total_max",
                limit=limits.partitions_total_max,
            )
        if is_new and len(self.by_name) + len(self._busy) >= limits.topics_max:
            raise TooManyTopics(
                f"there are {len(self.by_name)} topics, and {limits.topics_max} are allowed; "
                "delete one, or raise topics_max",
                limit=limits.topics_max,
            )

    # ---- the start

    def load(self) -> Pending[None]:
        """After the views: settings are given to the engine again."""
        return follow(self._load())

    def _load(self) -> Generator[Pending[Any], Any, None]:
        orphans = {key for key, _ in self._view.entries()}
        for made in self._engine.topics():
            if made.name.startswith(INTERNAL_PREFIX):
                continue
            orphans.discard(made.uuid)
            stored = self._stored(made.uuid, made.name)
            effective = self._defaults.effective(stored.settings)
            uuid = uuids.UUID(bytes=made.uuid)
            topic = Topic(
                made.name,
                uuid,
                made.partitions,
                effective,
                stored.created_ms,
                stored.settings,
                stored.uses_lanes,
                stored.opened_to,
            )
            self._show(topic)
            self._forget_sequences(topic)
            settings = self._defaults.for_engine(effective)
            if settings != self._defaults.partition:
                yield self._engine.alter(made.name, settings=settings)
        if orphans:
            yield self._views.change(self._view, [(key, None) for key in orphans])

    def _ends(self, topic: Topic) -> tuple[int, ...]:
        ids = [PartitionId(topic.name, number) for number in range(topic.partitions)]
        return tuple(self._engine.offsets(id).high_watermark for id in ids)

    def _forget_sequences(self, topic: Topic) -> None:
        """Those from before batches were opened: the log was not told of later ones."""
        ends = self._ends(topic) if topic.settings.inspect else topic.opened_to
        for number, end in enumerate(ends[: topic.partitions]):
            self._engine.forget_producers(PartitionId(topic.name, number), end)

    def _stored(self, uuid: bytes, name: str) -> StoredTopic:
        """A topic without a record, as another program may have made it, has the defaults."""
        value = self._view.value_of(uuid)
        if value is None:
            return StoredTopic(name, 0)
        try:
            stored = msgspec.json.decode(value, type=StoredTopic)
        except msgspec.MsgspecError as error:
            _logger().error("settings of a topic not readable", topic=name, error=str(error))
            return StoredTopic(name, 0)
        good, bad = known_settings(stored.settings)
        if bad:
            _logger().warning("settings of a topic not known", topic=name, settings=bad)
        return StoredTopic(name, stored.created_ms, good, stored.uses_lanes, stored.opened_to)


def refuse_reserved(name: str) -> None:
    if name.startswith(INTERNAL_PREFIX):
        raise TopicReserved(
            f"{name} is one of the broker's own topics; names of others do not begin with "
            f"{INTERNAL_PREFIX}",
            topic=name,
        )


def partition_unknown(topic: Topic, number: int) -> PartitionUnknown:
    return PartitionUnknown(
        f"topic {topic.name} has partitions 0 to {topic.partitions - 1}, not {number}",
        topic=topic.name,
        partition=number,
    )


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
