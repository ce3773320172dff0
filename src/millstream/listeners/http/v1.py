"""Everything under `/v1`: the table of its routes, and what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.delivery_values import DeliveryOptions
from millstream.listeners.http import (
    dead_letter_forms,
    delivery_forms,
    group_forms,
    schedule_forms,
    topic_forms,
    writer_forms,
)
from millstream.listeners.http.batch_answers import BatchAnswers
from millstream.listeners.http.cluster_answers import CLUSTER, MANIFEST, ClusterAnswers
from millstream.listeners.http.consumer_answers import ConsumerAnswers
from millstream.listeners.http.dead_letter_answers import DeadLetterAnswers, DeadLetterParts
from millstream.listeners.http.delivery_answers import KINDS, DeliveryAnswers
from millstream.listeners.http.group_answers import GroupAnswers
from millstream.listeners.http.named_answers import NamedAnswers
from millstream.listeners.http.publish_quick import QuickPublish
from millstream.listeners.http.read_answers import Readings
from millstream.listeners.http.read_streams import Streams
from millstream.listeners.http.route import Route
from millstream.listeners.http.schedule_answers import ScheduleAnswers
from millstream.listeners.http.stream_sockets import no_websocket
from millstream.listeners.http.topic_answers import TopicAnswers
from millstream.listeners.http.waits import Waits
from millstream.listeners.http.work_quick import QuickAck, QuickReceive
from millstream.listeners.http.writer_answers import WriterAnswers

if TYPE_CHECKING:
    from millstream.broker.broker import Broker
    from millstream.observe.status import Status

TOPIC = "/v1/topics/{topic}"
PARTITION = TOPIC + "/partitions/{partition}"
CONSUMER = TOPIC + "/consumers/{consumer}"
DELAYED = TOPIC + "/delayed"
SCHEDULE = "/v1/schedules/{name}"
GROUP = "/v1/groups/{group}"
DEAD_LETTERS = TOPIC + "/dead-letters"
DEAD_LETTER = DEAD_LETTERS + "/{partition}/{offset}"
REDRIVE = "/v1/redrives/{redrive}"

WRITER = "/v1/writers/{writer}"
BATCH = WRITER + "/batches/{batch}"


class Bounds(NamedTuple):
    """What the settings allow at most, as far as the descriptions of routes say it."""

    partitions_max: int = 1000
    poll_records: int = 500
    poll_bytes: int = 4 * 1024 * 1024
    poll_timeout_s: float = 30.0
    delivery: DeliveryOptions = DeliveryOptions()


class V1:
    """The routes, made from a broker. `drain` ends what waits."""

    __slots__ = ("_broker", "routes", "waits")

    def __init__(self, broker: Broker, status: Status, bounds: Bounds) -> None:
        self._broker = broker
        self.waits = Waits()
        self.routes: tuple[Route, ...] = (
            *self._topic_routes(bounds.partitions_max),
            *self._message_routes(),
            *self._consumer_routes(),
            *self._group_routes(bounds),
            *self._schedule_routes(),
            *self._delivery_routes(bounds.delivery),
            *self._dead_letter_routes(),
            *self._writer_routes(),
            *self._cluster_routes(status),
        )

    def drain(self) -> None:
        self._broker.groups.drain()
        self._broker.delivery.drain()
        self._broker.redrive.drain()
        self._broker.staged_writes.drain()
        self.waits.drain()

    def _topic_routes(self, partitions_max: int) -> tuple[Route, ...]:
        broker, forms = self._broker, topic_forms
        answers = TopicAnswers(broker.topics, broker.publisher, broker.reader)
        create, grow = forms.create(partitions_max), forms.grow(partitions_max)
        purge = (TOPIC + "/purge",)
        return (
            Route("POST", ("/v1/topics",), answers.create, create, "topics"),
            Route("GET", ("/v1/topics",), answers.list, forms.LIST, "topics"),
            Route("GET", (TOPIC,), answers.describe, forms.DESCRIBE, "topics"),
            Route("PATCH", (TOPIC,), answers.alter, forms.ALTER, "topics"),
            Route("DELETE", (TOPIC,), answers.delete, forms.DELETE, "topics"),
            Route("POST", (TOPIC + "/partitions",), answers.grow, grow, "topics"),
            Route("POST", purge, answers.purge, forms.PURGE, "topics"),
            Route("GET", (TOPIC + "/offsets",), answers.offsets, forms.OFFSETS, "topics"),
        )

    def _message_routes(self) -> tuple[Route, ...]:
        broker, forms = self._broker, topic_forms
        topics = TopicAnswers(broker.topics, broker.publisher, broker.reader)
        batches = BatchAnswers(broker.publisher, broker.reader, self.waits)
        readings = Readings(broker.topics, broker.reader, self.waits)
        streams = Streams(readings)
        one = (TOPIC + "/messages", TOPIC + "/publish")
        quick = QuickPublish(broker.publisher)
        tag = "topic messages"
        to_one = (PARTITION + "/batches",)
        return (
            Route("POST", one, topics.publish, forms.PUBLISH, tag, is_hot=True, quick=quick),
            Route("POST", (TOPIC + "/batch",), topics.publish_many, forms.PUBLISH_MANY, tag, True),
            Route("GET", one[:1], readings.read, forms.READ, tag, stream=streams.open),
            Route("POST", (TOPIC + "/batches",), batches.publish, forms.PUBLISH_BATCHES, tag, True),
            Route("POST", to_one, batches.publish_to, forms.PUBLISH_BATCHES_TO, tag, True),
            Route("GET", to_one, batches.read, forms.READ_BATCHES, tag, True),
            Route("GET", (TOPIC + "/stream",), no_websocket, forms.STREAM, tag),
        )

    def _consumer_routes(self) -> tuple[Route, ...]:
        answers, forms = ConsumerAnswers(self._broker.sequential, self.waits), topic_forms
        tag = "sequential consumers"
        return (
            Route("POST", (TOPIC + "/consumers",), answers.open, forms.OPEN_CONSUMER, tag),
            Route("GET", (CONSUMER + "/next",), answers.next, forms.NEXT, tag, is_hot=True),
            Route("POST", (CONSUMER + "/ack",), answers.ack, forms.ACK, tag, is_hot=True),
            Route("DELETE", (CONSUMER,), answers.delete, forms.DELETE_CONSUMER, tag),
        )

    def _group_routes(self, bounds: Bounds) -> tuple[Route, ...]:
        broker, forms, tag = self._broker, group_forms, "groups"
        answers = GroupAnswers(broker.consuming, self.waits, bounds.poll_timeout_s)
        poll = forms.poll(bounds.poll_records, bounds.poll_bytes, bounds.poll_timeout_s)
        offsets = (GROUP + "/offsets",)
        return (
            Route("POST", (GROUP + "/join",), answers.join, forms.JOIN, tag, is_hot=True),
            Route("POST", (GROUP + "/heartbeat",), answers.heartbeat, forms.HEARTBEAT, tag, True),
            Route("GET", (GROUP + "/poll",), answers.poll, poll, tag, is_hot=True),
            Route("POST", (GROUP + "/commit",), answers.commit, forms.COMMIT, tag, is_hot=True),
            Route("POST", (GROUP + "/leave",), answers.leave, forms.LEAVE, tag, is_hot=True),
            Route("GET", ("/v1/groups",), answers.list, forms.LIST, tag),
            Route("GET", (GROUP,), answers.describe, forms.DESCRIBE, tag),
            Route("PATCH", (GROUP,), answers.alter, forms.ALTER, tag),
            Route("DELETE", (GROUP,), answers.delete, forms.DELETE, tag),
            Route("GET", offsets, answers.committed, forms.COMMITTED, tag),
            Route("DELETE", offsets, answers.forget, forms.FORGET, tag),
            Route("POST", (GROUP + "/reset",), answers.reset, forms.RESET, tag),
            Route("GET", (GROUP + "/lag",), answers.lag, forms.LAG, tag),
        )

    def _delivery_routes(self, options: DeliveryOptions) -> tuple[Route, ...]:
        broker, forms, tag = self._broker, delivery_forms, "work queues"
        answers = DeliveryAnswers(broker.delivery, broker.group_offsets, broker.topics, self.waits)
        all_, of_group = forms.settle_forms(options), forms.of_group
        settle = ("/v1/messages/settle", GROUP + "/settle")
        receive = (GROUP + "/receive",)
        leases = (GROUP + "/leases",)
        turns, form = broker.work_turns, forms.receive(options)
        quick = QuickReceive(turns)
        routes = [Route("POST", receive, answers.receive, form, tag, is_hot=True, quick=quick)]
        for word in KINDS:
            one, its = (f"/v1/messages/{word}",), (f"{GROUP}/{word}",)
            form, handler = all_[word], answers.settler(word, of_group=False)
            of_one = answers.settler(word, of_group=True)
            ack = QuickAck(turns) if word == "ack" else None
            group_ack = QuickAck(turns, of_group=True) if word == "ack" else None
            routes.append(Route("POST", one, handler, form, tag, True, ack))
            routes.append(Route("POST", its, of_one, of_group(form), tag, True, group_ack))
        form = all_["settle"]
        return (
            *routes,
            Route("POST", settle[:1], answers.settle, form, tag, is_hot=True),
            Route("POST", settle[1:], answers.settle_of_group, of_group(form), tag, is_hot=True),
            Route("GET", leases, answers.leases, forms.LEASES, tag),
            Route("GET", ("/v1/reliability/stats",), answers.reliability, forms.RELIABILITY, tag),
            Route("GET", ("/v1/priority/stats",), answers.priority, forms.PRIORITY, tag),
        )

    def _dead_letter_routes(self) -> tuple[Route, ...]:
        broker, forms, tag = self._broker, dead_letter_forms, "dead letters"
        parts = DeadLetterParts(
            broker.dead_letter_reading, broker.redrive, broker.delivery, self.waits
        )
        answers = DeadLetterAnswers(parts)
        many, redrive = (DEAD_LETTERS + "/delete",), (DEAD_LETTERS + "/redrive",)
        return (
            Route("GET", ("/v1/dead-letters",), answers.overview, forms.OVERVIEW, tag),
            Route("GET", (DEAD_LETTERS,), answers.list, forms.LIST, tag),
            Route("GET", (DEAD_LETTERS + "/gone",), answers.gone, forms.GONE, tag),
            Route("DELETE", (DEAD_LETTERS,), answers.purge, forms.PURGE, tag),
            Route("POST", many, answers.delete_many, forms.DELETE_MANY, tag),
            Route("POST", redrive, answers.redrive, forms.REDRIVE, tag),
            Route("GET", (DEAD_LETTER,), answers.get, forms.GET, tag),
            Route("DELETE", (DEAD_LETTER,), answers.delete, forms.DELETE, tag),
            Route("GET", ("/v1/redrives",), answers.jobs, forms.JOBS, tag),
            Route("GET", (REDRIVE,), answers.job, forms.JOB, tag),
            Route("DELETE", (REDRIVE,), answers.cancel, forms.CANCEL, tag),
        )

    def _schedule_routes(self) -> tuple[Route, ...]:
        answers, forms, tag = ScheduleAnswers(self._broker.schedules), schedule_forms, "schedules"
        named = NamedAnswers(self._broker.named_schedules)
        one = (DELAYED + "/{partition}/{offset}",)
        return (
            Route("GET", (DELAYED,), answers.delayed, forms.LIST, tag),
            Route("GET", one, answers.show, forms.SHOW, tag),
            Route("DELETE", one, answers.cancel, forms.CANCEL, tag),
            Route("GET", ("/v1/delay/stats",), answers.statistics, forms.STATISTICS, tag),
            Route("GET", ("/v1/schedules",), named.list, forms.NAMED_LIST, tag),
            Route("PUT", (SCHEDULE,), named.put, forms.NAMED_PUT, tag),
            Route("GET", (SCHEDULE,), named.get, forms.NAMED_GET, tag),
            Route("DELETE", (SCHEDULE,), named.delete, forms.NAMED_DELETE, tag),
        )

    def _writer_routes(self) -> tuple[Route, ...]:
        forms, tag = writer_forms, "staged writes"
        answers = WriterAnswers(self._broker.staged_writes, self.waits)
        return (
            Route("POST", (BATCH + "/parts",), answers.stage, forms.STAGE, tag, is_hot=True),
            Route("POST", (BATCH + "/commit",), answers.commit, forms.COMMIT, tag, is_hot=True),
            Route("POST", (BATCH + "/abort",), answers.abort, forms.ABORT, tag),
            Route("GET", ("/v1/writers",), answers.list, forms.LIST, tag),
            Route("GET", (WRITER,), answers.get, forms.GET, tag),
            Route("DELETE", (WRITER,), answers.forget, forms.FORGET, tag),
        )

    def _cluster_routes(self, status: Status) -> tuple[Route, ...]:
        answers = ClusterAnswers(self._broker, status)
        manifest = (TOPIC + "/manifest",)
        return (
            Route("GET", manifest, answers.manifest, MANIFEST, "topic messages"),
            Route("GET", ("/v1/admin/cluster",), answers.cluster, CLUSTER, "admin"),
        )
