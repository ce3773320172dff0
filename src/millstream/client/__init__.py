"""The Python client: `AsyncClient` for asyncio, `Client` for everything else.

This is the public face. What is listed in `__all__` keeps its name and meaning; a test freezes it.
"""

from __future__ import annotations

from millstream.client.batches import Delivery
from millstream.client.blocking import Client
from millstream.client.blocking_producer import BlockingDelivery
from millstream.client.blocking_work import BlockingLeased
from millstream.client.client import AsyncClient
from millstream.client.consumer import Consumer, ConsumerStatistics
from millstream.client.dead_letters import DeadLetter, RedriveFacts
from millstream.client.groups import GroupFacts, GroupLag, GroupSummary
from millstream.client.leases import Leased, Settled
from millstream.client.producer import Producer, ProducerStatistics
from millstream.client.queues import Message, QueueFacts
from millstream.client.schedules import Delayed, ScheduleFacts
from millstream.client.stream import TopicStream
from millstream.client.topics import TopicFacts
from millstream.client.values import Place, Received
from millstream.client.work import Work, WorkStatistics
from millstream.client.worker import Reject, Release, Retry, WorkerStatistics
from millstream.client.writers import Committed, Staged, WriterFacts
from millstream.wire.leases import Settle

__all__ = [
    "AsyncClient",
    "BlockingDelivery",
    "BlockingLeased",
    "Client",
    "Committed",
    "Consumer",
    "ConsumerStatistics",
    "DeadLetter",
    "Delayed",
    "Delivery",
    "GroupFacts",
    "GroupLag",
    "GroupSummary",
    "Leased",
    "Message",
    "Place",
    "Producer",
    "ProducerStatistics",
    "QueueFacts",
    "Received",
    "RedriveFacts",
    "Reject",
    "Release",
    "Retry",
    "ScheduleFacts",
    "Settle",
    "Settled",
    "Staged",
    "TopicFacts",
    "TopicStream",
    "Work",
    "WorkStatistics",
    "WorkerStatistics",
    "WriterFacts",
]
