"""The Kafka listener, put together: every API in one table, and what they work with.

The server imports this when the listener is wanted, because kafka-python takes a third of a second
and some megabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.listeners.kafka.apis import table_of
from millstream.listeners.kafka.cluster import api_versions, cluster_apis
from millstream.listeners.kafka.connection import Counts, Limits, Shared
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.group_admin_apis import group_admin_apis
from millstream.listeners.kafka.group_apis import group_apis
from millstream.listeners.kafka.listener import KafkaListener
from millstream.listeners.kafka.offset_apis import offset_apis
from millstream.listeners.kafka.producers import producer_apis

if TYPE_CHECKING:
    import socket
    import ssl

    from millstream.broker.broker import Broker
    from millstream.config import Settings
    from millstream.engine.protocol import Engine
    from millstream.listeners.kafka.apis import Api


def every_api(context: Context) -> dict[int, Api]:
    """By key. An API that is not here is not spoken: its request ends the connection."""
    table = table_of(
        cluster_apis(context),
        producer_apis(context),
        group_apis(context),
        offset_apis(context),
        group_admin_apis(context),
    )
    own = api_versions(table)
    table[own.key] = own
    return table


def kafka_listener(
    bound: socket.socket,
    engine: Engine,
    broker: Broker,
    settings: Settings,
    *,
    address: str,
    connections_max: int,
    tls: ssl.SSLContext | None,
) -> KafkaListener:
    """What the settings mean for it."""
    counts = Counts()
    context = Context(
        broker=broker,
        engine=engine,
        counts=counts,
        node_id=settings.node_id,
        advertised=settings.kafka_advertised,
    )
    limits = Limits(
        request_bytes_max=settings.kafka_request_bytes_max,
        requests_max=settings.kafka_requests_max,
        buffer_bytes_max=settings.kafka_buffer_bytes_max,
    )
    is_logging = settings.request_log == "on"
    shared = Shared(every_api(context), limits, counts, is_logging)
    return KafkaListener(shared, bound, address=address, connections_max=connections_max, tls=tls)
