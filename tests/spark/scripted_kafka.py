"""A Kafka broker that says what a test tells it to: throttled, ignorant, or behind."""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Any, Self
from uuid import UUID, uuid4

from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
)
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

from millstream.log import batch as batches

LATEST = -1
UNKNOWN_TOPIC = 3
_HEAD = Struct(">hhi")
_SIZE = Struct(">i")
_VERSIONS = {1: (4, 12), 2: (1, 7), 3: (0, 12), 8: (2, 8), 9: (1, 7), 10: (0, 3), 18: (0, 3)}
_REQUESTS = {
    one.API_KEY: one
    for one in (
        ApiVersionsRequest,
        FetchRequest,
        FindCoordinatorRequest,
        ListOffsetsRequest,
        MetadataRequest,
        OffsetCommitRequest,
        OffsetFetchRequest,
    )
}


@dataclass
class Log:
    """One partition. What is stable is what readers of committed records may see."""

    batches: list[bytes] = field(default_factory=list)
    start: int = 0
    end: int = 0
    stable: int | None = None
    # Of transactions: producer, and the offset of its first record.
    aborted: list[tuple[int, int]] = field(default_factory=list)
    # No record is newer; None: all are newer than any time that is asked for.
    newest_ms: int | None = None

    def add(self, *values: bytes, **more: Any) -> Self:
        records: list[Any] = [(1_700_000_000_000, None, value, []) for value in values]
        self.batches.append(batches.encode(records, base_offset=self.end, **more))
        self.end += len(values)
        return self

    def mark(self, producer: int, *, is_commit: bool) -> Self:
        """The end of a transaction."""
        key = b"\0\0\0\1" if is_commit else b"\0\0\0\0"
        records: list[Any] = [(1_700_000_000_000, key, b"\0\0\0\0\0\0", [])]
        more: dict[str, Any] = {"producer_id": producer, "transactional": True, "control": True}
        self.batches.append(batches.encode(records, base_offset=self.end, **more))
        self.end += 1
        return self

    def reach(self, isolation: int) -> int:
        return self.end if self.stable is None or not isolation else self.stable

    def records_at(self, offset: int, isolation: int) -> bytes:
        found = [one for one in self.batches if batches.read_header(one).next_offset > offset]
        reach = self.reach(isolation)
        return b"".join(one for one in found if batches.read_header(one).base_offset < reach)

    def offset_of(self, asked: int, isolation: int) -> int:
        """A time, or one of the two words."""
        if asked == LATEST:
            return self.reach(isolation)
        is_newer = self.newest_ms is not None and asked > self.newest_ms
        return -1 if is_newer else self.start


class ScriptedKafka:
    """`script[key]` has what becomes of the next answers of an API: each takes the honest one, and
    gives what is sent instead. Where it is empty, answers are honest."""

    def __init__(self, *, fetch_version: int = 12) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.topics: dict[str, list[Log]] = {}
        self.ids: dict[str, UUID] = {}
        self.committed: dict[str, dict[tuple[str, int], int]] = {}
        self.script: dict[int, deque[Callable[[Any], Any]]] = {}
        self.asked: Counter[int] = Counter()
        self._versions = _VERSIONS | {FetchRequest.API_KEY: (4, fetch_version)}

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listening.getsockname()[1]}"

    def make(self, topic: str, *logs: Log) -> None:
        """Under an id of its own, every time."""
        self.topics[topic] = list(logs)
        self.ids[topic] = uuid4()

    def plan(self, request: Any, *answers: Callable[[Any], Any]) -> None:
        self.script.setdefault(request.API_KEY, deque()).extend(answers)

    # ---- connections

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as requests, suppress(OSError):
            while len(head := requests.read(4)) == 4:
                frame = requests.read(_SIZE.unpack(head)[0])
                client.sendall(self._answer(frame))

    def _answer(self, frame: bytes) -> bytes:
        key, version, correlation_id = _HEAD.unpack_from(frame)
        request = _REQUESTS[key].decode(frame, version=version, header=True)
        self.asked[key] += 1
        answer = _ANSWERS[key](self, request, version)
        waiting = self.script.get(key)
        if waiting:
            answer = waiting.popleft()(answer)
        is_flexible = _REQUESTS[key].flexible_version_q(version)
        tags = b"\0" if is_flexible and key != ApiVersionsRequest.API_KEY else b""
        body = _SIZE.pack(correlation_id) + tags + bytes(answer.encode(version=version))
        return _SIZE.pack(len(body)) + body

    # ---- honest answers

    def _versions_of(self, request: Any, version: int) -> Any:
        Key = ApiVersionsResponse.ApiVersion  # noqa: N806  a class
        keys = [
            Key(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in self._versions.items()
        ]
        return ApiVersionsResponse(error_code=0, api_keys=keys, throttle_time_ms=0)

    def _metadata(self, request: Any, version: int) -> Any:
        Topic = MetadataResponse.MetadataResponseTopic  # noqa: N806  a class
        Part = Topic.MetadataResponsePartition  # noqa: N806  a class
        wanted = sorted(self.topics) if request.topics is None else [t.name for t in request.topics]
        topics = [
            Topic(
                error_code=0 if name in self.topics else UNKNOWN_TOPIC,
                name=name,
                topic_id=self.ids.get(name),
                is_internal=False,
                partitions=[
                    Part(
                        error_code=0,
                        partition_index=number,
                        leader_id=1,
                        leader_epoch=0,
                        replica_nodes=[1],
                        isr_nodes=[1],
                        offline_replicas=[],
                    )
                    for number in range(len(self.topics.get(name, ())))
                ],
            )
            for name in wanted
        ]
        host, port = self._listening.getsockname()
        Broker = MetadataResponse.MetadataResponseBroker  # noqa: N806  a class
        return MetadataResponse(
            throttle_time_ms=0,
            brokers=[Broker(node_id=1, host=host, port=port, rack=None)],
            cluster_id="scripted",
            controller_id=1,
            topics=topics,
        )

    def _list_offsets(self, request: Any, version: int) -> Any:
        Topic = ListOffsetsResponse.ListOffsetsTopicResponse  # noqa: N806  a class
        Part = Topic.ListOffsetsPartitionResponse  # noqa: N806  a class
        topics = []
        for topic in request.topics:
            parts = []
            for one in topic.partitions:
                logs = self.topics.get(topic.name, [])
                is_there = one.partition_index < len(logs)
                offset = -1
                if is_there:
                    log = logs[one.partition_index]
                    offset = log.offset_of(one.timestamp, request.isolation_level)
                parts.append(
                    Part(
                        partition_index=one.partition_index,
                        error_code=0 if is_there else UNKNOWN_TOPIC,
                        timestamp=-1,
                        offset=offset,
                        leader_epoch=0,
                    )
                )
            topics.append(Topic(name=topic.name, partitions=parts))
        return ListOffsetsResponse(throttle_time_ms=0, topics=topics)

    def _fetch(self, request: Any, version: int) -> Any:
        topic = request.topics[0]
        asked = topic.partitions[0]
        logs = self.topics.get(topic.topic, [])
        if asked.partition >= len(logs):
            return fetched(topic.topic, asked.partition, code=UNKNOWN_TOPIC)
        log = logs[asked.partition]
        if not log.start <= asked.fetch_offset <= log.end:
            return fetched(topic.topic, asked.partition, code=1)
        data = log.records_at(asked.fetch_offset, request.isolation_level)
        if not request.isolation_level:
            log = replace(log, aborted=[])
        return fetched(topic.topic, asked.partition, log=log, records=data)

    def _coordinator(self, request: Any, version: int) -> Any:
        host, port = self._listening.getsockname()
        return FindCoordinatorResponse(
            throttle_time_ms=0, error_code=0, error_message=None, node_id=1, host=host, port=port
        )

    def _commit(self, request: Any, version: int) -> Any:
        Topic = OffsetCommitResponse.OffsetCommitResponseTopic  # noqa: N806  a class
        Part = Topic.OffsetCommitResponsePartition  # noqa: N806  a class
        offsets = self.committed.setdefault(request.group_id, {})
        topics = []
        for topic in request.topics:
            for one in topic.partitions:
                offsets[topic.name, one.partition_index] = one.committed_offset
            parts = [
                Part(partition_index=one.partition_index, error_code=0) for one in topic.partitions
            ]
            topics.append(Topic(name=topic.name, partitions=parts))
        return OffsetCommitResponse(throttle_time_ms=0, topics=topics)

    def _offsets(self, request: Any, version: int) -> Any:
        Topic = OffsetFetchResponse.OffsetFetchResponseTopic  # noqa: N806  a class
        Part = Topic.OffsetFetchResponsePartition  # noqa: N806  a class
        offsets = self.committed.get(request.group_id, {})
        topics = [
            Topic(
                name=topic.name,
                partitions=[
                    Part(
                        partition_index=number,
                        committed_offset=offsets.get((topic.name, number), -1),
                        committed_leader_epoch=-1,
                        metadata="",
                        error_code=0,
                    )
                    for number in topic.partition_indexes
                ],
            )
            for topic in request.topics
        ]
        return OffsetFetchResponse(throttle_time_ms=0, topics=topics, error_code=0)


_ANSWERS: dict[int, Callable[[ScriptedKafka, Any, int], Any]] = {
    ApiVersionsRequest.API_KEY: ScriptedKafka._versions_of,
    MetadataRequest.API_KEY: ScriptedKafka._metadata,
    ListOffsetsRequest.API_KEY: ScriptedKafka._list_offsets,
    FetchRequest.API_KEY: ScriptedKafka._fetch,
    FindCoordinatorRequest.API_KEY: ScriptedKafka._coordinator,
    OffsetCommitRequest.API_KEY: ScriptedKafka._commit,
    OffsetFetchRequest.API_KEY: ScriptedKafka._offsets,
}


# ---- answers for a script


def fetched(
    topic: str, number: int, *, log: Log | None = None, records: bytes = b"", code: int = 0
) -> Any:
    Topic = FetchResponse.FetchableTopicResponse  # noqa: N806  a class
    Aborted = Topic.PartitionData.AbortedTransaction  # noqa: N806  a class
    log = log or Log(end=-1, start=-1)
    part = Topic.PartitionData(
        partition_index=number,
        error_code=code,
        high_watermark=log.end,
        last_stable_offset=log.reach(1),
        log_start_offset=log.start,
        aborted_transactions=[
            Aborted(producer_id=producer, first_offset=first) for producer, first in log.aborted
        ],
        preferred_read_replica=-1,
        records=records,
    )
    return FetchResponse(
        throttle_time_ms=0,
        error_code=0,
        session_id=0,
        responses=[Topic(topic=topic, partitions=[part])],
    )


def throttled(milliseconds: int) -> Callable[[Any], Any]:
    """A fetch over its quota, as Apache Kafka answers it."""
    return lambda _: FetchResponse(
        throttle_time_ms=milliseconds, error_code=0, session_id=0, responses=[]
    )


def ignorant(answer: Any) -> Any:
    """A broker that has just started, and knows of no topic."""
    for topic in getattr(answer, "responses", None) or answer.topics:
        if hasattr(topic, "error_code"):
            topic.error_code, topic.partitions = UNKNOWN_TOPIC, []
            continue
        for one in topic.partitions:
            one.error_code = UNKNOWN_TOPIC
            if hasattr(one, "records"):
                one.records = b""
    return answer


def honest(answer: Any) -> Any:
    return answer
