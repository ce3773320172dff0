"""Puts the house together: engine, broker, listeners; start, drain, stop.

The order is the promise. Start: limits, lock, addresses, health pages, engine (recovery), then
the listeners, then `ready`. Stop: `draining`, listeners, engine, lock, health pages. So no client
is served before recovery is done, and the health pages can tell what the broker is doing from the
first moment to the last.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

import uvloop

import millstream
from millstream.broker.broker import Broker, BrokerOptions, make_broker
from millstream.broker.classic_groups import ClassicOptions
from millstream.broker.consuming import ConsumingOptions
from millstream.broker.delivery_values import DeliveryOptions
from millstream.broker.joining import GroupOptions
from millstream.broker.queues import DEFAULT_QUEUE, QueueLimits, Queues
from millstream.broker.redrive_jobs import RedriveOptions
from millstream.broker.schedules import ScheduleOptions
from millstream.broker.snapshots import Snapshots
from millstream.broker.staged_values import StagedOptions
from millstream.broker.timers import Timers
from millstream.broker.topic_settings import TopicDefaults
from millstream.broker.topics import TopicLimits
from millstream.clock import Clock, SystemClock
from millstream.engine.collector import calm_collector
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.turns import LoopTurns
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import MillstreamError, SettingInvalid, StoreLocked
from millstream.kinds import Address
from millstream.listeners.http.app import http_app, metrics_app
from millstream.listeners.http.guard import Guard, guard_metrics
from millstream.listeners.http.lanes import Lanes
from millstream.listeners.http.listener import HttpListener
from millstream.listeners.http.queue_lane import BodyLimits, QueueLane
from millstream.listeners.http.request_log import LoggedApp, LoggedRoutes
from millstream.listeners.http.stream_sockets import StreamSockets
from millstream.listeners.http.tls import Certificates
from millstream.listeners.http.topic_lane import TopicLane
from millstream.listeners.http.v1 import V1, Bounds
from millstream.listeners.http.websocket import SocketCounts
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionSettings
from millstream.log.segment import Intervals
from millstream.log.snapshot import SnapshotFolder
from millstream.log.store import StoreOptions
from millstream.observe.dead_letters import dead_letter_metrics, dead_letter_notes
from millstream.observe.delivery import delivery_metrics
from millstream.observe.groups import group_metrics
from millstream.observe.logs import configure_logs, get_logger
from millstream.observe.metrics import Metrics, families
from millstream.observe.queues import queue_metrics
from millstream.observe.schedules import schedule_metrics
from millstream.observe.staged import staged_metrics
from millstream.observe.status import Status, Whereabouts
from millstream.observe.topics import topic_metrics
from millstream.process import bind, lock_owner, notify_systemd, raise_open_files

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp

    from millstream.config import Settings
    from millstream.engine.protocol import Engine
    from millstream.listeners.http.hot import HotRoutes
    from millstream.listeners.kafka.listener import KafkaListener

LOCK_FILE = "lock"
SNAPSHOT_FOLDER = "snapshots"
# Inside the other; a file that a user names cannot begin with a dot.
OWN_SNAPSHOT_FOLDER = ".own"
# The journal is cut by files: with a few of them, a cut frees most of it.
JOURNAL_FILES = 4
# An engine that is told to stop gets at least this long, also when requests used up the drain.
ENGINE_STOP_SECONDS_MIN = 1.0
# And so long to write the queues, when that is asked for: a gigabyte takes about three seconds.
SNAPSHOT_STOP_SECONDS_MIN = 5.0
# The health pages answer in microseconds; a request that takes longer is not being sent.
METRICS_STOP_SECONDS = 0.5
# Whoever watches has a connection or two.
METRICS_CONNECTIONS_MAX = 100

# The listeners that clients come to; the other one is for who looks after the broker.
CLIENTS = ("http", "kafka")
# The settings by which the Kafka listener has its addresses.
KAFKA_DOORS = ("kafka", "kafka_tls")

log = get_logger("server")


class Listener(Protocol):
    async def start(self) -> None: ...

    async def stop(self, within_seconds: float) -> None: ...


def open_engine(settings: Settings, clock: Clock, turns: LoopTurns | None = None) -> Engine:
    """The local log on the data directory. It takes the lock when it starts."""
    try:
        os.makedirs(settings.data, mode=0o750, exist_ok=True)
    except OSError as error:
        raise _data_unusable(settings, error) from error
    options = engine_options(settings)
    return LocalEngine(SystemDisk(), settings.data, clock, options, turns=turns)


def queue_limits(settings: Settings) -> QueueLimits:
    return QueueLimits(
        capacity=settings.queue_capacity,
        bytes_max=settings.queue_bytes_max,
        total_bytes_max=settings.queues_bytes_max,
        queues_max=settings.queues_max,
        message_bytes_max=settings.message_bytes_max,
    )


def open_snapshots(settings: Settings, queues: Queues) -> Snapshots:
    """In the data directory. Folders are made when the first file is written."""
    asked = os.path.join(settings.data, SNAPSHOT_FOLDER)
    own = os.path.join(asked, OWN_SNAPSHOT_FOLDER)
    disk = SystemDisk(follows_links=False)
    return Snapshots(queues, SnapshotFolder(disk, asked), SnapshotFolder(disk, own))


def read_certificates(settings: Settings) -> Certificates | None:
    """None without TLS. The settings come in pairs, which is checked where they are read."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key)


def _bound_to(bound: socket.socket) -> Address:
    host, port = bound.getsockname()[:2]
    return Address(host, port)


def broker_options(settings: Settings) -> BrokerOptions:
    """What the settings mean for the broker."""
    return BrokerOptions(
        topic_defaults=TopicDefaults(
            partition=partition_defaults(settings),
            message_bytes_max=settings.topic_message_bytes_max,
            partitioner=settings.partitioner,
            visibility_ms=settings.visibility_ms,
            deliveries_max=settings.deliveries_max,
            retry_delay_ms=settings.retry_delay_ms,
            retry_delay_max_ms=settings.retry_delay_max_ms,
            dead_letters=settings.dead_letters == "on",
        ),
        topic_limits=TopicLimits(
            topics_max=settings.topics_max,
            partitions_max=settings.topic_partitions_max,
            partitions_total_max=settings.partitions_max,
            partitions_default=settings.topic_partitions,
            is_auto_create=settings.topic_auto_create == "on",
        ),
        idempotency_window_ms=settings.idempotency_window_ms,
        idempotency_keys_max=settings.idempotency_keys_max,
        view_snapshot_interval_s=settings.view_snapshot_interval_ms / 1000,
        consuming=consuming_options(settings),
        delivery=delivery_options(settings),
        redrive=RedriveOptions(settings.redrives_max, settings.redrive_history_ms),
        schedules=ScheduleOptions(settings.schedules_max),
        staged=StagedOptions(
            writers_max=settings.writers_max,
            parts_max=settings.staged_parts_max,
            commit_parts_max=settings.commit_parts_max,
            bytes_max=settings.staged_bytes_max,
            retention_ms=settings.staged_retention_ms,
        ),
    )


def delivery_options(settings: Settings) -> DeliveryOptions:
    """What the settings mean for leases."""
    return DeliveryOptions(
        receive_records_max=settings.receive_records_max,
        receive_bytes_max=settings.receive_bytes_max,
        receive_wait_max_ms=settings.poll_timeout_max_ms,
        member_inflight_max=settings.member_inflight_max,
        group_inflight_max=settings.group_inflight_max,
        breaker_settlings_min=settings.breaker_settlings_min,
        breaker_window_ms=settings.breaker_window_ms,
        breaker_failures_percent=settings.breaker_failures_percent,
    )


def consuming_options(settings: Settings) -> ConsumingOptions:
    """What the settings mean for groups and sequential consumers."""
    return ConsumingOptions(
        group=GroupOptions(
            session_timeout_ms=settings.group_session_timeout_ms,
            heartbeat_interval_ms=settings.group_heartbeat_interval_ms,
            rebalance_timeout_ms=settings.group_rebalance_timeout_ms,
            auto_commit_interval_ms=settings.group_auto_commit_interval_ms,
            poll_records_max=settings.poll_records_max,
            poll_bytes_max=settings.poll_bytes_max,
            poll_wait_max_ms=settings.poll_timeout_max_ms,
            assignor=settings.group_assignor,
            auto_offset_reset=settings.group_auto_offset_reset,
            groups_max=settings.groups_max,
            members_max=settings.group_members_max,
        ),
        classic=ClassicOptions(
            forming_ms=settings.group_forming_ms,
            groups_max=settings.groups_max,
            members_max=settings.group_members_max,
        ),
        offsets_retention_ms=settings.offsets_retention_ms,
        consumers_max=settings.consumers_max,
    )


def partition_defaults(settings: Settings) -> PartitionSettings:
    return PartitionSettings(
        fsync=settings.fsync,
        segment_bytes=settings.segment_bytes,
        segment_age_ms=settings.segment_age_ms,
        intervals=Intervals(settings.index_interval_bytes, settings.time_index_interval_ms),
        retention_age_ms=settings.retention_age_ms,
        retention_bytes=settings.retention_bytes,
        tombstone_age_ms=settings.tombstone_retention_ms,
        batch_bytes_max=settings.batch_bytes_max,
    )


def engine_options(settings: Settings) -> LocalOptions:
    """What the settings mean for the local log."""
    defaults = partition_defaults(settings)
    return LocalOptions(
        store=StoreOptions(
            settings_for=lambda _topic: defaults,
            journal_file_bytes=settings.journal_bytes // JOURNAL_FILES,
            producer_expiry_ms=settings.producer_expiry_ms,
        ),
        upkeep=UpkeepSettings(
            fsync_interval_s=settings.fsync_interval_ms / 1000,
            checkpoint_interval_s=settings.checkpoint_interval_ms / 1000,
            journal_bytes=settings.journal_bytes,
            retention_interval_s=settings.retention_check_interval_ms / 1000,
            compaction_interval_s=settings.compaction_interval_ms / 1000,
            file_delete_delay_s=settings.file_delete_delay_ms / 1000,
        ),
        bypass_bytes=settings.bypass_bytes,
    )


def _data_unusable(settings: Settings, error: OSError) -> SettingInvalid:
    return SettingInvalid(
        f"the data directory {settings.data} cannot be used: {error.strerror}; "
        "choose one that this user may write to",
        setting="data",
        value=settings.data,
    )


def refuse_second_broker(data: str) -> None:
    """StoreLocked when a broker runs on the data directory.

    The engine takes the lock; this looks first, because two brokers on one directory are often on
    the same addresses too, and the directory is the better thing to complain about.
    """
    pid = lock_owner(os.path.join(data, LOCK_FILE))
    if pid is None:
        return
    raise StoreLocked(
        f"the data directory {data} is in use by the broker with process id {pid}; "
        "stop that one, or choose another directory",
        path=data,
        pid=int(pid) if pid.isdecimal() else None,
    )


def serve(settings: Settings) -> None:
    """Run a broker until a signal ends it. Errors of the start are raised."""
    configure_logs(settings.log_level, settings.log_format)
    server = Server(settings, clock=SystemClock())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.run())


class Server:
    """One broker process."""

    def __init__(self, settings: Settings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._stop = asyncio.Event()
        self._status = Status(node_id=settings.node_id, clock=clock)
        self._metrics = Metrics()
        self._metrics.register(self._status.metrics)
        self._queues = Queues(queue_limits(settings), lambda: time.time_ns() // 1000)
        self._queues.get_or_create(DEFAULT_QUEUE)
        self._metrics.register(lambda: queue_metrics(self._queues))
        self._snapshots = open_snapshots(settings, self._queues)
        self._keeping: asyncio.Task[None] | None = None
        self._lane: Lanes | None = None
        self._guards: list[Guard] = []
        self._certificates = read_certificates(settings)
        self._connections_max = METRICS_CONNECTIONS_MAX
        self._metrics.register(lambda: guard_metrics(self._guards))

    async def run(self) -> None:
        """From the first step of the start to the last of the stop."""
        settings = self._settings
        self._catch_signals()
        for warning in settings.warnings:
            log.warning(warning)
        open_files = raise_open_files(settings.open_files)
        self._connections_max = settings.connections_max or open_files * 4 // 5
        log.info(
            "starting",
            version=millstream.__version__,
            pid=os.getpid(),
            node_id=settings.node_id,
            data=settings.data,
            open_files=open_files,
        )
        refuse_second_broker(settings.data)
        turns = LoopTurns(asyncio.get_running_loop())
        engine = open_engine(settings, self._clock, turns)
        broker = self._make_broker(engine, turns)
        # Bound before recovery, so that an address in use ends the start at once; connections are
        # refused until a listener starts.
        listeners = self._bind_listeners(engine, broker)
        try:
            await self._serve(engine, broker, listeners)
        finally:
            await self._drain(engine, broker, listeners)
        log.info("stopped")

    def _make_broker(self, engine: Engine, turns: LoopTurns) -> Broker:
        loop = asyncio.get_running_loop()
        return make_broker(
            engine,
            self._queues,
            self._snapshots,
            broker_options(self._settings),
            clock=self._clock,
            timers=Timers(self._clock, loop.call_later),
            turns=turns,
        )

    async def _serve(self, engine: Engine, broker: Broker, listeners: dict[str, Listener]) -> None:
        self._status.health = engine.health
        self._status.notes = lambda: dead_letter_notes(broker)
        self._metrics.register(lambda: families(engine.metrics()))
        self._metrics.register(lambda: topic_metrics(broker, self._settings.metrics_topics))
        self._metrics.register(lambda: group_metrics(broker.consuming))
        self._metrics.register(lambda: delivery_metrics(broker.delivery))
        self._metrics.register(lambda: dead_letter_metrics(broker, self._settings.metrics_topics))
        self._metrics.register(lambda: schedule_metrics(broker.schedules, broker.named_schedules))
        self._metrics.register(lambda: staged_metrics(broker.staged_writes))
        if "metrics" in listeners:
            await listeners["metrics"].start()
        try:
            if not await self._unless_stopped(engine.start()):
                return
        except OSError as error:
            raise _data_unusable(self._settings, error) from error
        if not await self._unless_stopped(broker.start()):
            return
        if not await self._unless_stopped(self._restore_queues()):
            return
        for name in CLIENTS:
            if name in listeners:
                await listeners[name].start()
        self._warn_of_open_doors()
        calm_collector()
        self._status.phase = "ready"
        notify_systemd("READY=1\nSTATUS=serving")
        log.info("ready")
        await self._stop.wait()

    async def _drain(self, engine: Engine, broker: Broker, listeners: dict[str, Listener]) -> None:
        """Within `drain_timeout`; what is acknowledged is durable, so cutting off loses nothing."""
        self._status.phase = "draining"
        notify_systemd("STOPPING=1\nSTATUS=draining")
        bound_seconds = self._settings.drain_timeout_ms / 1000
        log.info("draining", bound_seconds=bound_seconds)
        deadline = self._clock.monotonic() + bound_seconds
        if self._lane is not None:
            self._lane.drain()
        open_ones = [listeners[name] for name in CLIENTS if name in listeners]
        await asyncio.gather(*(one.stop(bound_seconds) for one in open_ones))
        if self._keeping is not None:
            self._keeping.cancel()
        if self._settings.snapshot_at_stop == "on":
            rest = max(deadline - self._clock.monotonic(), SNAPSHOT_STOP_SECONDS_MIN)
            await self._keep_queues(within_seconds=rest)
        broker.stop()
        rest = max(deadline - self._clock.monotonic(), ENGINE_STOP_SECONDS_MIN)
        try:
            await asyncio.wait_for(engine.stop(), rest)
        except TimeoutError:
            log.warning("the engine did not stop in time; the next start recovers")
        if "metrics" in listeners:
            await listeners["metrics"].stop(METRICS_STOP_SECONDS)

    async def _restore_queues(self) -> None:
        """Queues as they were, when they are meant to outlive a restart."""
        settings = self._settings
        if settings.snapshot_at_stop == "off" and settings.snapshot_interval_ms is None:
            return
        restored, refused = await self._snapshots.restore()
        for one in restored:
            log.info("queue restored", queue=one.queue_name, messages=one.messages)
        for bad in refused:
            log.error("snapshot refused", file=bad.file, kept_as=bad.kept_as, why=bad.why)
        if settings.snapshot_interval_ms is not None:
            seconds = settings.snapshot_interval_ms / 1000
            self._keeping = asyncio.create_task(self._keep_at_intervals(seconds))

    async def _keep_at_intervals(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._keep_queues()

    async def _keep_queues(self, within_seconds: float | None = None) -> None:
        try:
            async with asyncio.timeout(within_seconds):
                kept = await self._snapshots.keep()
        except TimeoutError:
            log.error("queues not kept", why=f"the disk took more than {within_seconds:.0f} s")
        except MillstreamError as error:
            # The broker goes on: its queues are in memory, and the next time may be better.
            log.error("queues not kept", why=error.message)
        else:
            if kept:
                messages = sum(one.messages for one in kept)
                log.info("queues kept", queues=len(kept), messages=messages)

    def _addresses(self) -> dict[str, Address]:
        settings = self._settings
        wanted = {
            "http": settings.http,
            "kafka": settings.kafka,
            "kafka_tls": settings.kafka_tls,
            "metrics": settings.metrics,
        }
        return {name: address for name, address in wanted.items() if address is not None}

    def _bind_listeners(self, engine: Engine, broker: Broker) -> dict[str, Listener]:
        bound: dict[str, socket.socket] = {}
        try:
            for name, address in self._addresses().items():
                bound[name] = bind(name, address)
        except BaseException:
            for taken in bound.values():
                taken.close()
            raise
        self._status.whereabouts = self._whereabouts(bound)
        listeners: dict[str, Listener] = {}
        if "http" in bound:
            listeners["http"] = self._http_listener(bound["http"], broker)
        doors = {name: bound[name] for name in KAFKA_DOORS if name in bound}
        if doors:
            listeners["kafka"] = self._kafka_listener(doors, engine, broker)
        if "metrics" in bound:
            listeners["metrics"] = self._metrics_listener(bound["metrics"], broker)
        return listeners

    def _whereabouts(self, bound: dict[str, socket.socket]) -> Whereabouts:
        settings = self._settings
        found = {name: _bound_to(taken) for name, taken in bound.items()}
        return Whereabouts(
            http=found.get("http"),
            kafka=(settings.kafka_advertised or found["kafka"]) if "kafka" in found else None,
            kafka_tls=(settings.kafka_tls_advertised or found["kafka_tls"])
            if "kafka_tls" in found
            else None,
            is_secure=self._certificates is not None,
            data_directory=os.path.abspath(settings.data),
        )

    def _kafka_listener(
        self, bound: dict[str, socket.socket], engine: Engine, broker: Broker
    ) -> KafkaListener:
        # Here, because kafka-python takes a third of a second that most starts do not need.
        from millstream.listeners.kafka.assemble import kafka_listener
        from millstream.listeners.kafka.listener import Door

        settings, certificates = self._settings, self._certificates
        tls = certificates.context if certificates is not None else None
        advertised = {
            "kafka": settings.kafka_advertised,
            "kafka_tls": settings.kafka_tls_advertised,
        }
        doors = [
            Door(
                name,
                taken,
                address=str(_bound_to(taken)),
                # Beside one with TLS, the other is the plain one.
                tls=None if name == "kafka" and "kafka_tls" in bound else tls,
                advertised=advertised[name],
            )
            for name, taken in bound.items()
        ]
        listener = kafka_listener(
            doors,
            engine,
            broker,
            LoopTurns(asyncio.get_running_loop()),
            settings,
            http=self._status.whereabouts.http,
            connections_max=settings.kafka_connections_max or max(1, self._connections_max // 2),
        )
        self._metrics.register(listener.metrics)
        return listener

    def _http_listener(self, bound: socket.socket, broker: Broker) -> HttpListener:
        settings = self._settings
        bounds = Bounds(
            settings.topic_partitions_max,
            settings.poll_records_max,
            settings.poll_bytes_max,
            settings.poll_timeout_max_ms / 1000,
            delivery_options(settings),
        )
        v1 = V1(broker, self._status, bounds)
        app = http_app(self._status, self._metrics, broker, v1)
        guard = self._guard(app, "http")
        limits = BodyLimits(settings.message_bytes_max, settings.body_bytes_max)
        counts = SocketCounts()
        self._lane = Lanes(
            guard,
            QueueLane(self._queues, broker.timers, guard, limits, counts=counts),
            v1,
            TopicLane(v1.routes, settings.body_bytes_max, guard),
            StreamSockets(broker, settings.body_bytes_max, counts),
        )
        self._metrics.register(self._lane.metrics)
        return self._listener(guard, bound, self._connections_max, self._lane)

    def _metrics_listener(self, bound: socket.socket, broker: Broker) -> HttpListener:
        app = metrics_app(self._status, self._metrics, broker.queues)
        guard = self._guard(app, "metrics")
        return self._listener(guard, bound, METRICS_CONNECTIONS_MAX)

    def _listener(
        self,
        guard: Guard,
        bound: socket.socket,
        connections_max: int,
        lane: HotRoutes | None = None,
    ) -> HttpListener:
        certificates = self._certificates
        tls = certificates.context if certificates is not None else None
        app: ASGIApp = guard
        if self._settings.request_log == "on":
            app = LoggedApp(guard)
            lane = LoggedRoutes(lane) if lane is not None else None
        return HttpListener(
            app,
            bound,
            name=guard.listener,
            address=str(_bound_to(bound)),
            lane=lane,
            tls=tls,
            connections_max=connections_max,
        )

    def _guard(self, app: ASGIApp, listener: str) -> Guard:
        settings = self._settings
        own_names = [address.host for address in (settings.http, settings.metrics) if address]
        guard = Guard(app, listener=listener, hosts=[*settings.allowed_hosts, *own_names])
        self._guards.append(guard)
        return guard

    def _warn_of_open_doors(self) -> None:
        addresses = self._addresses()
        if not addresses:
            return
        exposed = [f"{name} {one}" for name, one in addresses.items() if not one.is_loopback]
        if exposed:
            log.warning(
                "there is no access control: everyone who can reach this address can use the "
                "broker; put it behind a firewall or a proxy, or listen on 127.0.0.1",
                exposed=exposed,
            )
        else:
            log.warning(
                "there is no access control: every program on this machine can use the broker"
            )

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)

    def _on_reload(self) -> None:
        if self._certificates is None:
            log.info("nothing to read again: there is no TLS")
            return
        try:
            self._certificates.reload()
        except SettingInvalid as error:
            log.error("certificate refused, the old one stays", why=error.message)
        else:
            log.info("certificate read again")

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            # Twice means now. What is acknowledged is durable; the system frees the lock.
            log.warning("ended at once by a second signal", signal=number.name)
            os._exit(128 + number)
        log.info("told to stop", signal=number.name)
        self._stop.set()

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Do the work, or give it up when a signal comes first; whether it was done."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return True
            return False
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,), timeout=self._settings.drain_timeout_ms / 1000)
