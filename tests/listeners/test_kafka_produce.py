"""Produce by idempotent producers: repeats, gaps and fences; what is refused, and what is stored
beside it."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.producer import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)

from listeners.http_scene import run
from listeners.kafka_scene import Client, Scene, batch, produce
from millstream.log import batch as batches
from millstream.wire.kafka.codes import Code


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
