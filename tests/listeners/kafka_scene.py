"""A Kafka listener inside a test, and a client that sends exactly the bytes it is given."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Self

from kafka.protocol.consumer import FetchRequest, FetchResponse
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from broker.making import loop_broker
from millstream.engine.protocol import Engine
from millstream.engine.turns import LoopTurns
from millstream.kinds import Address
from millstream.listeners.kafka.assemble import every_api
from millstream.listeners.kafka.connection import Limits, Shared
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.listener import Door, KafkaListener
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.process import bind

T0 = PartitionId("t", 0)


class Scene:
    """A broker with one topic `t` of one partition, behind a listener; in memory, unless an engine
    is given."""

    def __init__(
        self,
        *,
        engine: Engine | None = None,
        connections_max: int = 1000,
        tls: ssl.SSLContext | None = None,
        **limits: int,
    ) -> None:
        self.shared = Shared(Limits(**limits))
        self._given = engine
        self._connections_max = connections_max
        self._tls = tls

    async def __aenter__(self) -> Self:
        self.broker = loop_broker(engine=self._given)
        self.engine: Any = self.broker.topics._engine
        await self.engine.start()
        await self.broker.start()
        await self.broker.topics.create("t", 1)
        self.context = Context(
            broker=self.broker,
            engine=self.engine,
            shared=self.shared,
            turns=LoopTurns(asyncio.get_running_loop()),
            node_id=1,
        )
        self.shared.table.update(every_api(self.context))
        taken = bind("kafka", Address("127.0.0.1", 0))
        self.port: int = taken.getsockname()[1]
        door = Door("kafka", taken, "test", self._tls)
        self.listener = KafkaListener(self.shared, [door], connections_max=self._connections_max)
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.stop(1.0)
        self.broker.stop()
        await self.engine.stop()

    async def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, limit=1 << 26
        )
        return Client(reader, writer)

    async def append(self, *values: bytes) -> int:
        data = batches.encode([(0, None, value, []) for value in values])
        offset: int = await self.engine.append(T0, data)
        return offset

    def requests(self, api: str) -> int:
        return self.shared.counts.requests.get(api, 0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, message: Any, version: int, correlation_id: int = 0) -> None:
        message.with_header(correlation_id, "test")
        self.writer.write(bytes(message.encode(version=version, header=True, framed=True)))

    async def frame(self) -> bytes:
        """The next answer, without its size; empty at the end of the connection."""
        try:
            size = int.from_bytes(await self.reader.readexactly(4), "big")
            return await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def answer(self, response: Any, version: int) -> tuple[int, Any]:
        """The next answer: correlation id and message."""
        frame = await self.frame()
        assert frame, "the connection ended"
        message = response.decode(frame, version=version, header=True)
        return message.header.correlation_id, message

    async def is_served(self) -> bool:
        self.send(ApiVersionsRequest(), 0, 99)
        frame = await self.frame()
        return frame[:4] == b"\0\0\0\x63"

    def close(self) -> None:
        self.writer.close()


def fetch(
    *, offset: int = 0, wait_ms: int = 0, bytes_min: int = 1, bytes_max: int = 1 << 20
) -> Any:
    Topic = FetchRequest.FetchTopic  # noqa: N806  a class
    part = Topic.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=bytes_max,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=wait_ms,
        min_bytes=bytes_min,
        max_bytes=bytes_max,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[Topic(topic="t", partitions=[part])],
        forgotten_topics_data=[],
        rack_id="",
    )


def produce(data: bytes | None, *, acks: int = -1, topic: str = "t") -> Any:
    Topic = ProduceRequest.TopicProduceData  # noqa: N806  a class
    part = Topic.PartitionProduceData(index=0, records=data)
    return ProduceRequest(
        transactional_id=None,
        acks=acks,
        timeout_ms=1000,
        topic_data=[Topic(name=topic, partition_data=[part])],
    )


def batch(*values: bytes) -> bytes:
    return batches.encode([(0, None, value, []) for value in values])


__all__ = [
    "ApiVersionsRequest",
    "ApiVersionsResponse",
    "Client",
    "FetchResponse",
    "ProduceResponse",
    "Scene",
    "batch",
    "fetch",
    "produce",
]
