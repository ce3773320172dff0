"""Records for tests of pipelines, published and read back over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from broker_process import BrokerProcess
from millstream.client import Client
from millstream.client.values import Received


@contextmanager
def client_of(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as client:
        yield client


def publish(
    broker: BrokerProcess,
    topic: str,
    messages: Sequence[Mapping[str, object]],
    *,
    partitions: int = 2,
) -> None:
    """Make the topic if it is not there, and add records."""
    with client_of(broker) as client:
        if topic not in {one.name for one in client.topics.list()}:
            client.topics.create(topic, partitions=partitions)
        for start in range(0, len(messages), 1_000):
            client.topics.publish_many(topic, messages[start : start + 1_000])


def read_all(broker: BrokerProcess, topic: str) -> list[Received]:
    with client_of(broker) as client:
        return list(client.read(topic))


def values(records: Iterable[Received]) -> list[Any]:
    return sorted((json.loads(one.value or b"null") for one in records), key=json.dumps)
