"""Produce by idempotent producers: repeats, gaps and fences; what is refused, and what is stored
beside it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
from kafka.protocol.producer import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)

from listeners.http_scene import run, until
from listeners.kafka_scene import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    Client,
    Scene,
    batch,
    produce,
)
from millstream.engine.pending import Pending
from millstream.errors import EngineBusy
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from millstream.engine.protocol import Engine


def sequenced(id: int, epoch: int, sequence: int, count: int = 1) -> bytes:
    records: list[tuple[int, None, bytes, list[Any]]] = [(0, None, b"x", [])] * count
    return batches.encode(records, producer_id=id, producer_epoch=epoch, base_sequence=sequence)


async def store(client: Client, data: bytes | None) -> tuple[str, int]:
    """The name of the code, and the offset."""
    client.send(produce(data), 9)
    _, stored = await client.answer(ProduceResponse, 9)
    one = stored.responses[0].partition_responses[0]
    return Code(one.error_code).name, one.base_offset


async def producer_id(client: Client, id: int = -1, epoch: int = -1) -> tuple[int, int]:
    message = InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=1000, producer_id=id, producer_epoch=epoch
    )
    client.send(message, 4)
    _, given = await client.answer(InitProducerIdResponse, 4)
    assert given.error_code == Code.NONE
    return given.producer_id, given.producer_epoch


def test_a_repeated_batch_gets_its_first_offset_and_a_gap_is_refused() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            id, epoch = await producer_id(client)
            assert epoch == 0
            assert await store(client, sequenced(id, 0, 0, 3)) == ("NONE", 0)
            assert await store(client, sequenced(id, 0, 3, 2)) == ("NONE", 3)
            assert await store(client, sequenced(id, 0, 0, 3)) == ("NONE", 0)
            assert await store(client, sequenced(id, 0, 3, 2)) == ("NONE", 3)
            assert await store(client, sequenced(id, 0, 7)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
            assert await store(client, sequenced(id, 0, 5)) == ("NONE", 5)
            other, _ = await producer_id(client)
            assert other != id

    run(scenario())


def test_a_producer_that_begins_anew_fences_what_it_sent_before() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            id, _ = await producer_id(client)
            assert await store(client, sequenced(id, 0, 0)) == ("NONE", 0)
            assert await producer_id(client, id, 0) == (id, 1)
            assert await store(client, sequenced(id, 1, 0)) == ("NONE", 1)
            assert await store(client, sequenced(id, 0, 1)) == ("INVALID_PRODUCER_EPOCH", -1)
            # Past the last epoch it is somebody else.
            fresh, epoch = await producer_id(client, id, 2**15 - 1)
            assert (fresh != id, epoch) == (True, 0)

    run(scenario())


def test_batches_of_one_request_are_stored_or_refused_one_by_one() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await scene.broker.topics.create("many", 3)
            damaged = bytearray(batch(b"x"))
            damaged[-1] ^= 1
            Topic = ProduceRequest.TopicProduceData  # noqa: N806  a class
            Part = Topic.PartitionProduceData  # noqa: N806  a class
            parts = [(0, batch(b"a", b"b")), (1, bytes(damaged)), (2, None), (3, batch(b"c"))]
            named = [
                Topic(
                    name=name,
                    partition_data=[Part(index=number, records=data) for number, data in parts],
                )
                for name in ("many", "gone")
            ]
            message = ProduceRequest(
                transactional_id=None, acks=-1, timeout_ms=1000, topic_data=named
            )
            client.send(message, 8)
            _, stored = await client.answer(ProduceResponse, 8)
            codes = [
                [Code(one.error_code).name for one in topic.partition_responses]
                for topic in stored.responses
            ]
            no_place = "UNKNOWN_TOPIC_OR_PARTITION"
            corrupt = "CORRUPT_MESSAGE"
            assert codes[0] == ["NONE", corrupt, corrupt, no_place]
            assert codes[1] == [no_place, no_place, corrupt, no_place]
            good, bad = stored.responses[0].partition_responses[:2]
            assert (good.base_offset, bad.base_offset) == (0, -1)
            assert "CRC-32C" in bad.error_message

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "version", "code"),
    [
        ({"acks": 2}, 9, Code.INVALID_REQUIRED_ACKS),
        ({"transactional_id": "t"}, 9, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        # Old clients compress nothing where these versions are not advertised.
        ({}, 2, Code.UNSUPPORTED_VERSION),
    ],
)
def test_a_request_that_cannot_be_is_refused_whole(
    changes: dict[str, Any], version: int, code: Code
) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            message = produce(batch(b"x"))
            for name, value in changes.items():
                setattr(message, name, value)
            client.send(message, version)
            _, stored = await client.answer(ProduceResponse, version)
            assert stored.responses[0].partition_responses[0].error_code == code
            assert await store(client, batch(b"y")) == ("NONE", 0)

    run(scenario())


# ---- inspected topics


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_pipelined_requests_to_an_inspected_topic_are_stored_in_their_order(
    is_idempotent: bool,
) -> None:
    def data(number: int, id: int) -> bytes:
        headers = [("ms-lane", b"normal")] if number % 2 == 0 else []
        options: dict[str, Any] = {}
        if is_idempotent:
            options = {"producer_id": id, "producer_epoch": 0, "base_sequence": number}
        return batches.encode([(0, None, str(number).encode(), headers)], **options)

    async def scenario() -> None:
        async with Scene() as scene:
            await scene.broker.topics.alter("t", {"inspect": True})
            client = await scene.connect()
            id, _ = await producer_id(client)
            for number in range(6):
                client.send(produce(data(number, id)), 9, number)
            for number in range(6):
                _, stored = await client.answer(ProduceResponse, 9)
                assert stored.responses[0].partition_responses[0].base_offset == number
            chunk = await scene.engine.read(PartitionId("t", 0), 0, 1 << 20)
            found = [
                one.value
                for at, header in batches.walk(chunk.data)
                for one in batches.decode(chunk.data[at : at + header.size])
            ]
            assert found == [b"0", b"1", b"2", b"3", b"4", b"5"]

    run(scenario())


def test_an_inspected_topic_fences_and_notices_gaps() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await scene.broker.topics.alter("t", {"inspect": True})
            client = await scene.connect()
            id, _ = await producer_id(client)
            assert await store(client, sequenced(id, 1, 0)) == ("NONE", 0)
            assert await store(client, sequenced(id, 0, 5)) == ("INVALID_PRODUCER_EPOCH", -1)
            assert await store(client, sequenced(id, 1, 2)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
            assert await store(client, sequenced(id, 1, 1)) == ("NONE", 1)
            assert await store(client, sequenced(id, 1, 1)) == ("NONE", 1)

    run(scenario())


# ---- nobody hears


class SlowDisk:
    """An engine whose appends end when a test says so, and that has room for so many bytes."""

    def __init__(self, engine: Any, room: int) -> None:
        self._engine = engine
        self._room = room
        self.waiting: list[tuple[Pending[int], int]] = []
        self.refused = 0

    def append(self, id: PartitionId, data: batches.Data, header: batches.Header) -> Pending[int]:
        del id, header
        if len(data) > self._room:
            self.refused += 1
            return Pending.failed(EngineBusy("no room", limit_bytes=0))
        self._room -= len(data)
        pending: Pending[int] = Pending()
        self.waiting.append((pending, len(data)))
        return pending

    def has(self, count: int) -> bool:
        return len(self.waiting) == count

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for pending, size in waiting:
            self._room += size
            pending.succeed(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def slow_disk(scene: Scene, room: int = 1 << 30) -> SlowDisk:
    disk = SlowDisk(scene.engine, room)
    scene.broker.sealed_batches._engine = cast("Engine", disk)
    return disk


def test_who_asks_for_no_answer_is_not_read_past_its_limit_of_requests() -> None:
    async def scenario() -> None:
        async with Scene(requests_max=5) as scene:
            disk = slow_disk(scene)
            client = await scene.connect()
            for _ in range(12):
                client.send(produce(batch(b"x"), acks=0), 7)
            client.send(ApiVersionsRequest(), 0, 9)
            for count in (5, 5, 2):
                await until(partial(disk.has, count), "as many")
                assert await (await scene.connect()).is_served()
                assert disk.has(count)
                disk.finish()
            # The only thing it hears of.
            assert (await client.answer(ApiVersionsResponse, 0))[0] == 9
            assert scene.shared.buffer_bytes == 0

    run(scenario())


@pytest.mark.parametrize("size", [1000, 400_000])
def test_a_disk_that_is_slower_than_its_senders_loses_nothing_that_nobody_hears_of(
    size: int,
) -> None:
    async def scenario() -> None:
        count, senders = 40, 4
        # What waits for the disk is half of all, and a request that was the last to have room.
        limit = 4 * (size + 200)
        async with Scene(buffer_bytes_max=limit) as scene:
            disk = slow_disk(scene, room=limit // 2 + size + 200)
            clients = [await scene.connect() for _ in range(senders)]
            for client in clients:
                for _ in range(count):
                    client.send(produce(batch(b"x" * size), acks=0), 7)
            while scene.requests("Produce") < count * senders:
                await until(lambda: scene.shared.room <= 0, "no room")
                disk.finish()
                await asyncio.sleep(0)
            disk.finish()
            assert disk.refused == 0
            assert all([await client.is_served() for client in clients])
            assert scene.shared.buffer_bytes == scene.shared.claimed_bytes == 0

    run(scenario())


def test_a_batch_that_is_refused_late_ends_the_connection_of_who_asked_for_no_answer() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            disk = slow_disk(scene)
            client = await scene.connect()
            client.send(produce(batch(b"a"), acks=1), 7, 1)
            client.send(produce(batch(b"b"), acks=0), 7, 2)
            await until(lambda: len(disk.waiting) == 2, "both on their way")
            heard, unheard = (pending for pending, _ in disk.waiting)
            unheard.fail(EngineBusy("no room", limit_bytes=0))
            heard.succeed(7)
            # What came before it is answered.
            correlation_id, stored = await client.answer(ProduceResponse, 7)
            assert (correlation_id, stored.responses[0].partition_responses[0].base_offset) == (
                1,
                7,
            )
            assert await client.frame() == b""
            assert scene.shared.counts.invalid == 1
            assert "no room" in scene.shared.complaint
            assert scene.shared.buffer_bytes == 0

    run(scenario())
