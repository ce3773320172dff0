"""Leaders and places, also of the topic that only looks like one of Kafka's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.making import local_house
from millstream.listeners.kafka.connection import Counts, Shared
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.offsets_topic import NAME
from millstream.listeners.kafka.replica_apis import elect, reassign
from millstream.wire.kafka.codes import Code


@pytest.fixture
def context() -> Context:
    house = local_house().start()
    house.done(house.broker.topics.create("orders", 1))
    shared = cast("Shared", SimpleNamespace(counts=Counts()))
    return Context(house.broker, house.engine, shared, house.scheduler, node_id=1)


def asked(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def test_every_topic_that_is_listed_has_its_leader(context: Context) -> None:
    wanted = [asked(topic=name, partitions=[0, 1]) for name in ("orders", NAME)]
    answer = elect(context, asked(topic_partitions=wanted))
    codes = {
        one.topic: [part.error_code for part in one.partition_result]
        for one in answer.replica_election_results
    }
    right = [Code.ELECTION_NOT_NEEDED, Code.UNKNOWN_TOPIC_OR_PARTITION]
    assert codes == {"orders": right, NAME: right}


def test_every_topic_that_is_listed_may_stay_where_it_is(context: Context) -> None:
    for replicas, code in (([1], Code.NONE), ([2], Code.INVALID_REPLICA_ASSIGNMENT)):
        part = asked(partition_index=0, replicas=replicas)
        topics = [asked(name=name, partitions=[part]) for name in ("orders", NAME)]
        answer = reassign(context, asked(topics=topics))
        assert [one.partitions[0].error_code for one in answer.responses] == [code, code]
