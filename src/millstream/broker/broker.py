"""The face that listeners call: all parts of the broker, made and started together."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.broker.consuming import ConsumingOptions, make_consuming
from millstream.broker.dead_letter_marks import DeadLetterMarks
from millstream.broker.dead_letter_reading import DeadLetterReading
from millstream.broker.deadletters import DeadLetters
from millstream.broker.delivery import Delivery, DeliveryParts
from millstream.broker.delivery_values import DeliveryOptions
from millstream.broker.idempotency import Idempotency
from millstream.broker.lanes import Lanes
from millstream.broker.manifests import Manifests
from millstream.broker.named_schedules import NamedSchedules
from millstream.broker.publishing import Publisher
from millstream.broker.reading import Reader
from millstream.broker.redrive import Redrive
from millstream.broker.redrive_jobs import RedriveOptions
from millstream.broker.retention_hold import RetentionHold
from millstream.broker.schedules import ScheduleOptions, Schedules
from millstream.broker.sealed_batches import SealedBatches
from millstream.broker.share_sessions import ShareSessions
from millstream.broker.staged_values import StagedOptions
from millstream.broker.staged_writes import StagedParts, StagedWrites
from millstream.broker.surroundings import Surroundings
from millstream.broker.topic_settings import TopicDefaults
from millstream.broker.topics import TopicLimits, Topics
from millstream.broker.traffic import Traffic
from millstream.broker.view_snapshots import ViewSnapshots
from millstream.broker.views import Views
from millstream.broker.work_turns import WorkTurns
from millstream.engine.pending import Pending, follow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from millstream.broker.classic_groups import ClassicGroups
    from millstream.broker.consumer_groups import ConsumerGroups
    from millstream.broker.consuming import Consuming
    from millstream.broker.directory import Directory
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.groups import Groups
    from millstream.broker.lag import Lags
    from millstream.broker.queues import Queues
    from millstream.broker.sequential import Sequential
    from millstream.broker.share_groups import ShareGroups
    from millstream.broker.snapshots import Snapshots
    from millstream.broker.timers import Timers
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """How the broker is set up; the settings table fills it."""

    topic_defaults: TopicDefaults
    topic_limits: TopicLimits
    idempotency_window_ms: int = 600_000
    idempotency_keys_max: int = 1_000_000
    view_snapshot_interval_s: float = 60.0
    consuming: ConsumingOptions = field(default_factory=ConsumingOptions)
    delivery: DeliveryOptions = field(default_factory=DeliveryOptions)
    redrive: RedriveOptions = field(default_factory=RedriveOptions)
    schedules: ScheduleOptions = field(default_factory=ScheduleOptions)
    staged: StagedOptions = field(default_factory=StagedOptions)


@dataclass(slots=True)
class Broker:
    queues: Queues
    snapshots: Snapshots
    timers: Timers
    views: Views
    view_snapshots: ViewSnapshots
    topics: Topics
    idempotency: Idempotency
    publisher: Publisher
    sealed_batches: SealedBatches
    reader: Reader
    traffic: Traffic
    consuming: Consuming
    # Those of `consuming`, as listeners know them.
    groups: Groups
    classic_groups: ClassicGroups
    consumer_groups: ConsumerGroups
    share_groups: ShareGroups
    directory: Directory
    group_offsets: GroupOffsets
    lags: Lags
    sequential: Sequential
    dead_letters: DeadLetters
    dead_letter_reading: DeadLetterReading
    redrive: Redrive
    delivery: Delivery
    work_turns: WorkTurns
    share_sessions: ShareSessions
    schedules: Schedules
    named_schedules: NamedSchedules
    staged_writes: StagedWrites
    manifests: Manifests
    retention_hold: RetentionHold

    async def start(self) -> None:
        """After the engine: every view as it was, before any listener opens."""
        await self.begin()

    def begin(self) -> Pending[None]:
        """The same for a loop that a test turns."""
        return follow(self._begin())

    def _begin(self) -> Generator[Pending[Any], Any, None]:
        yield self.views.load()
        yield self.topics.load()
        yield self.redrive.load()
        yield self.consuming.start()
        yield self.delivery.start()
        self.redrive.start()
        yield self.schedules.start()
        self.named_schedules.start()
        yield self.staged_writes.start()
        self.retention_hold.is_loaded = True
        self.idempotency.start()
        self.view_snapshots.start()

    def stop(self) -> None:
        """Before the engine: what is under way ends with it."""
        self.redrive.stop()
        self.staged_writes.stop()
        self.schedules.stop()
        self.named_schedules.stop()
        self.delivery.stop()
        self.consuming.stop()
        self.view_snapshots.stop()
        self.idempotency.stop()


def make_broker(
    engine: Engine,
    queues: Queues,
    snapshots: Snapshots,
    options: BrokerOptions,
    *,
    clock: Clock,
    timers: Timers,
    turns: Turns,
    random_hex: Callable[[int], str] = secrets.token_hex,
) -> Broker:
    views = Views(engine, clock, turns)
    topics = Topics(engine, views, clock, options.topic_defaults, options.topic_limits)
    idempotency = Idempotency(
        engine,
        views,
        clock,
        timers,
        window_ms=options.idempotency_window_ms,
        keys_max=options.idempotency_keys_max,
    )
    traffic = Traffic()
    traffic.follow(topics)
    reader = Reader(engine, topics, traffic, timers)
    around = Surroundings(views, topics, reader, clock, timers, turns)
    schedules = Schedules(engine, around, traffic, options.schedules)
    publisher = Publisher(
        engine, topics, idempotency, schedules, traffic=traffic, clock=clock, turns=turns
    )
    consuming = make_consuming(around, options.consuming, random_hex)
    dead_letters = DeadLetters(around)
    marks = DeadLetterMarks(engine, around)
    reading = DeadLetterReading(marks)
    lanes = Lanes(engine, topics, clock, turns)
    parts = DeliveryParts(engine, consuming.groups, consuming.group_offsets, lanes, dead_letters)
    delivery = Delivery(around, parts, options.delivery, random_hex)
    staged = StagedParts(schedules, traffic, options.staged, random_hex)
    return Broker(
        queues=queues,
        snapshots=snapshots,
        timers=timers,
        views=views,
        view_snapshots=ViewSnapshots(engine, views, timers, options.view_snapshot_interval_s),
        topics=topics,
        idempotency=idempotency,
        publisher=publisher,
        sealed_batches=SealedBatches(engine, topics, publisher, idempotency, traffic, clock=clock),
        reader=reader,
        traffic=traffic,
        consuming=consuming,
        groups=consuming.groups,
        classic_groups=consuming.classic_groups,
        consumer_groups=consuming.consumer_groups,
        share_groups=consuming.share_groups,
        directory=consuming.directory,
        group_offsets=consuming.group_offsets,
        lags=consuming.lags,
        sequential=consuming.sequential,
        dead_letters=dead_letters,
        delivery=delivery,
        work_turns=WorkTurns(delivery, turns, options.delivery.receive_records_max),
        share_sessions=ShareSessions(around, consuming.share_groups, delivery),
        dead_letter_reading=reading,
        redrive=Redrive(marks, reading, options.redrive, random_hex),
        schedules=schedules,
        named_schedules=NamedSchedules(around),
        staged_writes=StagedWrites(engine, around, staged),
        manifests=Manifests(engine, around),
        retention_hold=RetentionHold(engine, topics, consuming.group_offsets, delivery.all_shares),
    )
