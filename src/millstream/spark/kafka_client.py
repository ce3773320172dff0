"""A blocking client of the Kafka protocol, for Spark's driver and its tasks.

A driver asks where offsets are and commits those that are done; a task reads one partition
(`fetching.py`). Neither has an event loop, and both are to ride out a broker that restarts: a call
is tried again, with pauses in which no two clients are in step, until it is done or the patience
of its options is over. Messages are kafka-python's classes, made from Kafka's own schemas; the
version of each is the newest that both sides speak.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Self, TypeVar

from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse
from kafka.protocol.consumer import ListOffsetsRequest, ListOffsetsResponse
from kafka.protocol.consumer.group import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)

from millstream.errors import BrokerUnreachable, KafkaAnswerInvalid, KafkaRefused
from millstream.spark.options import BrokerPlace, split_address
from millstream.spark.patience import Patience
from millstream.spark.positions import Part
from millstream.wire.kafka.codes import Code

Result = TypeVar("Result")

CONNECT_S = 10.0
# An answer that takes longer is taken for lost. A fetch waits half a second at most.
ANSWER_S = 30.0
# A broker that has just started may not know its topics yet. One that it does not know is looked
# for again so much later, before it counts as deleted.
GONE_S = 2.0
# Who closes so many new connections without a word, and never spoke, speaks something else.
MUTE_TRIES = 3
# The longest answer that is read: fetches ask for less, unless one batch is larger.
ANSWER_BYTES_MAX = 2**31 - 1
# What our own requests need; a broker may speak newer ones.
VERSIONS = {3: 12, 2: 7, 8: 8, 9: 7, 10: 3, 18: 3, 32: 4}

SIZE = Struct(">i")
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
NO_ID = "00000000-0000-0000-0000-000000000000"

# Codes after which the same call may succeed: a leader moved, or something is starting.
RETRIED = frozenset((5, 6, 7, 8, 9, 13, 14, 15, 16, 72, 74, 75, 78))
_NAMES = {
    5: "LEADER_NOT_AVAILABLE",
    9: "REPLICA_NOT_AVAILABLE",
    14: "COORDINATOR_LOAD_IN_PROGRESS",
    18: "RECORD_LIST_TOO_LARGE",
    59: "UNKNOWN_PRODUCER_ID",
}


class Broken(Exception):
    """The connection ended, or time ran out, before the answer was there."""


class Mute(Broken):
    """A new connection was closed before anything was said."""


class Again(Exception):
    """The broker said to come back: the leader is elsewhere, or not there yet."""


# ---- one connection


class Connection:
    """One socket. Answers come in the order of the requests."""

    __slots__ = ("_client_id", "_correlation_id", "_socket", "address", "versions")

    def __init__(self, address: tuple[str, int], place: BrokerPlace) -> None:
        self.address = address
        self._client_id = place.client_id
        self._correlation_id = 0
        self.versions: dict[int, tuple[int, int]] = {}
        try:
            plain = socket.create_connection(address, CONNECT_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(ANSWER_S)
            self._socket = _secured(plain, address[0], place) if place.uses_tls else plain
        except OSError as error:
            raise Broken(_why(error)) from error
        try:
            self._learn_versions()
        except BaseException as error:
            self.close()
            if isinstance(error, Broken):
                raise Mute(str(error)) from error
            raise

    def _learn_versions(self) -> None:
        answer = self.ask(ApiVersionsRequest, ApiVersionsResponse, _version=0)
        self.versions = {one.api_key: (one.min_version, one.max_version) for one in answer.api_keys}

    def version_of(self, key: int, newest: int) -> int:
        """The newest that both speak."""
        least, most = self.versions.get(key, (0, -1))
        version = min(newest, most)
        if version < least:
            raise KafkaRefused(
                f"{_shown(self.address)} has no version of the Kafka request {key} that is spoken "
                f"here (up to {newest}); use a broker of Kafka 2.1 or newer",
                kafka_code=int(Code.UNSUPPORTED_VERSION),
                kafka_error=Code.UNSUPPORTED_VERSION.name,
            )
        return version

    def ask(self, request: Any, response: Any, _version: int | None = None, **fields: Any) -> Any:
        """One call with kafka-python's messages."""
        key = request.API_KEY
        version = self.version_of(key, VERSIONS[key]) if _version is None else _version
        message = request(**fields)
        self._correlation_id += 1
        message.with_header(self._correlation_id, self._client_id)
        self.send(bytes(message.encode(version=version, header=True, framed=True)))
        frame = self.receive()
        try:
            return response.decode(bytes(frame), version=version, header=True)
        except Exception as error:
            raise _stranger(self.address) from error

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Broken(_why(error)) from error

    def receive(self) -> memoryview:
        """The next answer, without its size."""
        head = self._read(bytearray(4))
        (size,) = SIZE.unpack(head)
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise _stranger(self.address)
        return self._read(bytearray(size))

    def _read(self, into: bytearray) -> memoryview:
        view, at = memoryview(into), 0
        while at < len(into):
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as error:
                raise Broken(_why(error)) from error
            if count == 0:
                raise Broken("the other side closed the connection")
            at += count
        return view

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _secured(plain: socket.socket, host: str, place: BrokerPlace) -> socket.socket:
    context = ssl.create_default_context()
    if place.ca is not None:
        context.load_verify_locations(place.ca)
    return context.wrap_socket(plain, server_hostname=host)


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name a `ca`"
    return error.strerror or str(error) or type(error).__name__


def _stranger(address: tuple[str, int]) -> KafkaAnswerInvalid:
    where = _shown(address)
    return KafkaAnswerInvalid(
        f"what answers at {where} does not speak the Kafka protocol; name a broker's Kafka "
        "address, or its HTTP address with the option `server`",
        server=where,
    )


def _shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


# ---- the cluster


@dataclass(frozen=True, slots=True)
class TopicFacts:
    name: str
    # None where the broker has no ids.
    id: str | None
    # By partition; None while there is none.
    leaders: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    id: str | None = None
    brokers: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    topics: Mapping[str, TopicFacts] = field(default_factory=dict)


class Kafka:
    """A cluster of one or more brokers. Opens connections when they are needed."""

    def __init__(
        self,
        place: BrokerPlace,
        servers: Iterable[str],
        *,
        isolation: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.place = place
        self.isolation = isolation
        self.servers = tuple(servers)
        self._addresses = [address for one in self.servers if (address := split_address(one))]
        self._connections: dict[tuple[str, int], Connection] = {}
        self._facts = ClusterFacts()
        self._clock = clock
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def retried(self, call: Callable[[], Result]) -> Result:
        """The call's result, tried again while the broker is away."""
        patience = Patience(self.place.patience_s, self._clock, self._sleep)
        mute = 0
        while True:
            try:
                return call()
            except (Broken, Again) as error:
                mute += isinstance(error, Mute)
                if mute == MUTE_TRIES and not self._facts.brokers:
                    raise _stranger(self._addresses[0]) from error
                self.close()
                if not patience.pause(self._away(error)):
                    raise self.unreachable(error) from error

    def unreachable(self, error: Exception) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"{self._away(error)}; it was tried for {self.place.patience_s:g} s (the option "
            "kafkaConsumer.pollTimeoutMs)",
            server=", ".join(self.servers),
        )

    def _away(self, error: Exception) -> str:
        return f"no broker answers the Kafka protocol at {', '.join(self.servers)}: {error}"

    # ---- what there is

    def metadata(self, topics: Iterable[str] | None) -> ClusterFacts:
        """Of these topics, or of all; a topic that is not there is not in the answer."""
        wanted = None if topics is None else sorted(set(topics))
        facts = self.retried(lambda: self._metadata(wanted))
        known = facts.topics if wanted is None else {**self._facts.topics, **facts.topics}
        self._facts = ClusterFacts(facts.id, facts.brokers, known)
        return facts

    def _metadata(self, wanted: list[str] | None) -> ClusterFacts:
        connection = self._any()
        version = connection.version_of(3, VERSIONS[3])
        Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806  a class
        asked = None if wanted is None else [Topic(name=name) for name in wanted]
        if asked == []:
            asked = [] if version >= 1 else None
        answer = connection.ask(
            MetadataRequest,
            MetadataResponse,
            topics=asked,
            allow_auto_topic_creation=False,
        )
        topics = {}
        for one in answer.topics:
            if one.error_code in (3, 17):
                continue
            if one.error_code:
                raise refused(one.error_code, f"the metadata of the topic {one.name}")
            topics[one.name] = _facts_of(one, version)
        brokers = {one.node_id: (one.host, one.port) for one in answer.brokers}
        return ClusterFacts(answer.cluster_id if version >= 2 else None, brokers, topics)

    def broker_config(self, name: str) -> str | None:
        """A config of any broker; None when it has none of that name."""
        return self.retried(lambda: self._broker_config(name))

    def _broker_config(self, name: str) -> str | None:
        facts = self._facts if self._facts.brokers else self._metadata([])
        for node in sorted(facts.brokers):
            return _config(self._to(facts.brokers[node]), BROKER_RESOURCE, str(node), name)
        return None

    def topic_config(self, topic: str, name: str) -> str | None:
        """A config of a topic; None when it has none of that name, or it may not be seen."""
        return self.retried(lambda: _config(self._any(), TOPIC_RESOURCE, topic, name))

    # ---- offsets

    def list_offsets(self, asked: Mapping[Part, int]) -> dict[Part, int | None]:
        """For each a time in milliseconds, or LATEST or EARLIEST; None where no record is that
        new. A partition that is not there is not in the answer."""
        return self.retried(lambda: self._list_offsets(asked))

    def _list_offsets(self, asked: Mapping[Part, int]) -> dict[Part, int | None]:
        found: dict[Part, int | None] = {}
        for address, parts in self._by_leader(asked).items():
            answer = self._to(address).ask(
                ListOffsetsRequest,
                ListOffsetsResponse,
                replica_id=-1,
                isolation_level=self.isolation,
                topics=[
                    ListOffsetsRequest.ListOffsetsTopic(
                        name=topic,
                        partitions=[
                            ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
                                partition_index=number,
                                current_leader_epoch=-1,
                                timestamp=asked[topic, number],
                            )
                            for number in numbers
                        ],
                    )
                    for topic, numbers in parts.items()
                ],
            )
            for topic in answer.topics:
                for one in topic.partitions:
                    part = (topic.name, one.partition_index)
                    if one.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                        self.forget(topic.name)
                    elif one.error_code:
                        self.forget(topic.name)
                        raise refused(one.error_code, f"the offsets of {part[0]}/{part[1]}")
                    else:
                        found[part] = one.offset if one.offset >= 0 else None
        return found

    def commit(self, group: str, offsets: Mapping[Part, int]) -> None:
        """As a consumer that is in no group's crew; KafkaRefused when the group has members."""
        Topic = OffsetCommitRequest.OffsetCommitRequestTopic  # noqa: N806  a class
        topics = [
            Topic(
                name=topic,
                partitions=[
                    Topic.OffsetCommitRequestPartition(
                        partition_index=number,
                        committed_offset=offsets[topic, number],
                        committed_leader_epoch=-1,
                        commit_timestamp=-1,
                        committed_metadata="",
                    )
                    for number in numbers
                ],
            )
            for topic, numbers in _by_topic(offsets).items()
        ]

        def call() -> None:
            answer = self._coordinator(group).ask(
                OffsetCommitRequest,
                OffsetCommitResponse,
                group_id=group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                retention_time_ms=-1,
                topics=topics,
            )
            for topic in answer.topics:
                for one in topic.partitions:
                    if one.error_code:
                        raise refused(one.error_code, f"offsets of the group {group}")

        self.retried(call)

    def committed(self, group: str, parts: Iterable[Part]) -> dict[Part, int]:
        """What the group committed; what it did not is not in the answer."""
        Topic = OffsetFetchRequest.OffsetFetchRequestTopic  # noqa: N806  a class
        topics = [
            Topic(name=topic, partition_indexes=numbers)
            for topic, numbers in _by_topic(parts).items()
        ]

        def call() -> dict[Part, int]:
            answer = self._coordinator(group).ask(
                OffsetFetchRequest,
                OffsetFetchResponse,
                group_id=group,
                topics=topics,
                require_stable=False,
            )
            if getattr(answer, "error_code", 0):
                raise refused(answer.error_code, f"the offsets of the group {group}")
            return {
                (topic.name, one.partition_index): one.committed_offset
                for topic in answer.topics
                for one in topic.partitions
                if not one.error_code and one.committed_offset >= 0
            }

        return self.retried(call)

    # ---- connections

    def leader(self, part: Part) -> Connection:
        """A connection to whom the partition is read from. Again when nobody leads it."""
        return self._to(next(iter(self._by_leader([part]))))

    def forget(self, topic: str) -> None:
        """What is known of it is old."""
        known = {name: one for name, one in self._facts.topics.items() if name != topic}
        self._facts = ClusterFacts(self._facts.id, self._facts.brokers, known)

    def _by_leader(self, parts: Iterable[Part]) -> dict[tuple[str, int], dict[str, list[int]]]:
        by_topic = _by_topic(parts)
        if not by_topic.keys() <= self._facts.topics.keys():
            facts = self._metadata(sorted(by_topic))
            known = {**self._facts.topics, **facts.topics}
            self._facts = ClusterFacts(facts.id, facts.brokers, known)
        found: dict[tuple[str, int], dict[str, list[int]]] = {}
        for topic, numbers in by_topic.items():
            known_topic = self._facts.topics.get(topic)
            for number in numbers:
                leader = None if known_topic is None else known_topic.leaders.get(number)
                if known_topic is None or number not in known_topic.leaders:
                    # Gone; the caller finds it missing. Any broker will say so.
                    address = next(iter(self._facts.brokers.values()))
                elif leader is None or leader not in self._facts.brokers:
                    self.forget(topic)
                    raise Again(f"nobody leads {topic}/{number} at the moment")
                else:
                    address = self._facts.brokers[leader]
                found.setdefault(address, {}).setdefault(topic, []).append(number)
        return found

    def _coordinator(self, group: str) -> Connection:
        answer = self._any().ask(
            FindCoordinatorRequest, FindCoordinatorResponse, key=group, key_type=0
        )
        if answer.error_code:
            raise refused(answer.error_code, f"the coordinator of the group {group}")
        return self._to((answer.host, answer.port))

    def _any(self) -> Connection:
        for connection in self._connections.values():
            return connection
        broken = Broken("no address was given")
        for address in [*self._addresses, *self._facts.brokers.values()]:
            try:
                return self._to(address)
            except Broken as error:
                broken = error
        raise broken

    def _to(self, address: tuple[str, int]) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, self.place)
        return connection


def _config(connection: Connection, kind: int, resource: str, name: str) -> str | None:
    Resource = DescribeConfigsRequest.DescribeConfigsResource  # noqa: N806  a class
    asked = Resource(resource_type=kind, resource_name=resource, configuration_keys=[name])
    answer = connection.ask(
        DescribeConfigsRequest,
        DescribeConfigsResponse,
        resources=[asked],
        include_synonyms=False,
        include_documentation=False,
    )
    for result in answer.results:
        for config in result.configs or ():
            if config.name == name:
                return config.value or None
    return None


def _facts_of(topic: Any, version: int) -> TopicFacts:
    id = str(topic.topic_id) if version >= 10 and topic.topic_id is not None else None
    leaders = {
        one.partition_index: one.leader_id if one.leader_id >= 0 else None
        for one in topic.partitions
    }
    return TopicFacts(topic.name, None if id == NO_ID else id, leaders)


def _by_topic(parts: Iterable[Part]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for topic, number in sorted(parts):
        found.setdefault(topic, []).append(number)
    return found


def code_name(code: int) -> str:
    try:
        return Code(code).name
    except ValueError:
        return _NAMES.get(code, f"error {code}")


def refused(code: int, what: str) -> Exception:
    """What a code means for a call: to come back, or that it is refused."""
    if code in RETRIED:
        return Again(f"the broker answered {code_name(code)} for {what}")
    return KafkaRefused(
        f"the broker refused {what}: {code_name(code)}",
        kafka_code=code,
        kafka_error=code_name(code),
    )
