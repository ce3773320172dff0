"""The Kafka listener, put together: every API in one table, and what they work with.

The server imports this when the listener is wanted, because kafka-python takes a third of a second
and some megabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.config import TABLE
from millstream.listeners.kafka.apis import table_of
from millstream.listeners.kafka.cluster import api_versions, cluster_apis
from millstream.listeners.kafka.config_apis import config_apis
from millstream.listeners.kafka.configs import broker_configs
from millstream.listeners.kafka.connection import Limits, Shared
from millstream.listeners.kafka.consumer_apis import consumer_apis
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.describe_apis import describe_apis
from millstream.listeners.kafka.fetch import fetch_apis
from millstream.listeners.kafka.group_admin_apis import group_admin_apis
from millstream.listeners.kafka.group_apis import group_apis
from millstream.listeners.kafka.list_offsets import list_offsets_apis
from millstream.listeners.kafka.listener import KafkaListener
from millstream.listeners.kafka.offset_apis import offset_apis
from millstream.listeners.kafka.produce import produce_apis
from millstream.listeners.kafka.producers import producer_apis
from millstream.listeners.kafka.replica_apis import replica_apis
from millstream.listeners.kafka.share_apis import share_apis
from millstream.listeners.kafka.topic_apis import topic_apis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.broker import Broker
    from millstream.config import Settings
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns
    from millstream.kinds import Address
    from millstream.listeners.kafka.apis import Api
    from millstream.listeners.kafka.listener import Door


def every_api(context: Context) -> dict[int, Api]:
    """By key. An API that is not here is not spoken: its request ends the connection."""
    table = table_of(
        cluster_apis(context),
        describe_apis(context),
        producer_apis(context),
        produce_apis(context),
        fetch_apis(context),
        list_offsets_apis(context),
        topic_apis(context),
        config_apis(context),
        replica_apis(context),
        group_apis(context),
        offset_apis(context),
        group_admin_apis(context),
        consumer_apis(context),
        share_apis(context),
    )
    own = api_versions(table)
    table[own.key] = own
    return table


def kafka_listener(
    doors: Sequence[Door],
    engine: Engine,
    broker: Broker,
    turns: Turns,
    settings: Settings,
    *,
    http: Address | None,
    connections_max: int,
) -> KafkaListener:
    """What the settings mean for it."""
    limits = Limits(
        request_bytes_max=settings.kafka_request_bytes_max,
        requests_max=settings.kafka_requests_max,
        buffer_bytes_max=settings.kafka_buffer_bytes_max,
    )
    shared = Shared(limits, is_logging=settings.request_log == "on")
    context = Context(
        broker=broker,
        engine=engine,
        shared=shared,
        turns=turns,
        node_id=settings.node_id,
        fetch_bytes_max=settings.kafka_fetch_bytes_max,
        broker_configs=broker_configs(
            (row, getattr(settings, row.attribute), settings.origins[row.name]) for row in TABLE
        ),
        http=http,
        is_secure=settings.tls_cert is not None,
    )
    shared.table.update(every_api(context))
    return KafkaListener(shared, doors, connections_max=connections_max)
