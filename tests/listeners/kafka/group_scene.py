"""The handlers of groups, and of what there is, on a broker whose time a test owns, asked and heard
through kio."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from broker.kafka_members import kafka_house
from broker.making import House
from millstream.engine.pending import Pending
from millstream.kinds import Address
from millstream.listeners.kafka.apis import Api, Call
from millstream.listeners.kafka.cluster import cluster_apis
from millstream.listeners.kafka.connection import Counts, Shared
from millstream.listeners.kafka.consumer_apis import consumer_apis
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.describe_apis import describe_apis
from millstream.listeners.kafka.group_admin_apis import group_admin_apis
from millstream.listeners.kafka.group_apis import group_apis
from millstream.listeners.kafka.offset_apis import offset_apis
from millstream.listeners.kafka.share_apis import share_apis
from wire.kio_messages import request, response


@dataclass
class Asked:
    """A request under way."""

    api: str
    version: int
    house: House
    outcome: Any
    call: Call

    @property
    def is_waiting(self) -> bool:
        self.house.scheduler.run()
        return isinstance(self.outcome, Pending) and not self.outcome.is_done

    @property
    def data(self) -> bytes:
        self.house.scheduler.run()
        pieces = self.outcome.result() if isinstance(self.outcome, Pending) else self.outcome
        return b"".join(pieces)

    def answer(self) -> Any:
        """As kio reads it."""
        return response(self.api, self.version, self.data)


@dataclass
class Scene:
    house: House = field(default_factory=kafka_house)
    counts: Counts = field(default_factory=Counts)
    apis: dict[str, Api] = field(init=False)

    def __post_init__(self) -> None:
        # Handlers of groups use no more of what connections share than their counts.
        shared = cast("Shared", SimpleNamespace(counts=self.counts))
        context = Context(
            self.house.broker, self.house.engine, shared, self.house.scheduler, node_id=1
        )
        made: Iterable[list[Api]] = (
            group_apis(context),
            offset_apis(context),
            group_admin_apis(context),
            consumer_apis(context),
            share_apis(context),
            cluster_apis(context),
            describe_apis(context),
        )
        self.apis = {_snake(api.name): api for apis in made for api in apis}

    def versions(self, api: str) -> range:
        low, high = self.apis[api].versions
        return range(low, high + 1)

    def start(self, api: str, version: int, **fields: Any) -> Asked:
        row = self.apis[api]
        body = memoryview(request(api, version, fields))
        is_flexible = version >= row.flexible_from
        call = Call(version, "client", body, is_flexible, Address("h", 1), "127.0.0.1:5")
        asked = Asked(api, version, self.house, row.answer(call), call)
        self.house.scheduler.run()
        return asked

    def ask(self, api: str, version: int, **fields: Any) -> Any:
        return self.start(api, version, **fields).answer()


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]
