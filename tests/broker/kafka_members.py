"""Members of Kafka's kinds of groups for tests, on a loop that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.making import House, memory_house, options
from millstream.broker.broker import BrokerOptions
from millstream.broker.classic_groups import ClassicOptions
from millstream.broker.classic_values import (
    ClassicFacts,
    ClassicJoin,
    ClassicJoined,
    ClassicSync,
    ClassicSynced,
)
from millstream.broker.consuming import ConsumingOptions
from millstream.broker.joining import GroupOptions
from millstream.engine.pending import Pending
from millstream.errors import MemberIdRequired, MillstreamError

FORMING_S = 0.5
SESSION_S = 10.0
REBALANCE_S = 30.0


def kafka_options(groups: dict[str, Any] | None = None, **changes: Any) -> BrokerOptions:
    base = options()
    changes.setdefault("forming_ms", int(FORMING_S * 1000))
    return BrokerOptions(
        base.topic_defaults,
        base.topic_limits,
        consuming=ConsumingOptions(
            group=GroupOptions(**(groups or {})), classic=ClassicOptions(**changes)
        ),
    )


def kafka_house(**changes: Any) -> House:
    house = memory_house(kafka_options(**changes))
    house.done(house.broker.topics.create("orders", 4))
    return house


def subscription(*topics: str) -> bytes:
    """As consumers write it, version 0."""
    named = b"".join(len(one).to_bytes(2, "big") + one.encode() for one in topics)
    return b"\0\0" + len(topics).to_bytes(4, "big") + named + b"\xff\xff\xff\xff"


def assignment(topic: str, *partitions: int) -> bytes:
    numbers = b"".join(one.to_bytes(4, "big") for one in partitions)
    named = len(topic).to_bytes(2, "big") + topic.encode()
    count = len(partitions).to_bytes(4, "big")
    return b"\0\0" + b"\0\0\0\1" + named + count + numbers + b"\xff\xff\xff\xff"


@dataclass
class Classic:
    """A member that does as clients do."""

    house: House
    group: str = "g"
    instance_id: str | None = None
    protocols: tuple[tuple[str, bytes], ...] = (("range", subscription("orders")),)
    id: str | None = None
    told: ClassicJoined | None = None
    part: bytes | None = None
    joining: Pending[ClassicJoined] | None = field(default=None, repr=False)

    @property
    def groups(self) -> Any:
        return self.house.broker.classic_groups

    def wish(self, **changes: Any) -> ClassicJoin:
        join = ClassicJoin(
            self.id,
            "consumer",
            self.protocols,
            int(SESSION_S * 1000),
            int(REBALANCE_S * 1000),
            client_id="c",
            host="/127.0.0.1",
            instance_id=self.instance_id,
        )
        return join._replace(**changes)

    def start(self, **changes: Any) -> Classic:
        """Ask to join; `hear` when the group has had its time."""
        self.joining = self.groups.join(self.group, self.wish(**changes))
        self.house.scheduler.run()
        return self

    def hear(self) -> ClassicJoined:
        assert self.joining is not None
        self.house.scheduler.run()
        self.told = self.joining.result()
        self.id = self.told.member_id
        return self.told

    @property
    def error(self) -> str | None:
        """The code of what was wrong with the join, if anything."""
        assert self.joining is not None
        found = self.joining.error
        assert found is None or isinstance(found, MillstreamError)
        return found.code if found is not None else None

    @property
    def is_waiting(self) -> bool:
        assert self.joining is not None
        return not self.joining.is_done

    @property
    def generation(self) -> int:
        assert self.told is not None
        return self.told.generation

    @property
    def leads(self) -> bool:
        assert self.told is not None
        return self.told.leader == self.id

    def sync(
        self, assignments: dict[str, bytes] | None = None, **changes: Any
    ) -> Pending[ClassicSynced]:
        given = tuple((assignments or {}).items())
        assert self.id is not None
        sync = ClassicSync(self.id, self.generation, self.instance_id, assignments=given)._replace(
            **changes
        )
        syncing: Pending[ClassicSynced] = self.groups.sync(self.group, sync)
        self.house.scheduler.run()
        return syncing

    def heartbeat(self, **changes: Any) -> str | None:
        """The code of what it is told to do; None to go on."""
        said = {"member_id": self.id, "generation": self.generation if self.told else -1}
        said["instance_id"] = self.instance_id
        try:
            self.groups.heartbeat(self.group, **(said | changes))
        except MillstreamError as error:
            return error.code
        return None

    def leave(self) -> str | None:
        assert self.id is not None
        (error,) = self.groups.leave(self.group, [(self.id, self.instance_id)])
        self.house.scheduler.run()
        return error.code if error is not None else None


def promised_id(member: Classic) -> str:
    """Ask as new clients do, and get only an id."""
    member.start(must_know_id=True)
    assert member.joining is not None
    error = member.joining.error
    assert isinstance(error, MemberIdRequired)
    return str(error.fields["member_id"])


def pass_time(house: House, seconds: float) -> None:
    house.scheduler.advance(seconds)
    house.scheduler.run()


def settled(house: House, *members: Classic) -> None:
    """All of them in one stable generation, each with a partition of its own."""
    for one in members:
        one.start()
    pass_time(house, FORMING_S * 2.5)
    for one in members:
        one.hear()
    deal(*members)


def deal(*members: Classic) -> None:
    leader = next(one for one in members if one.leads)
    waiting = {id(one): one.sync() for one in members if one is not leader}
    given = {one.id or "": assignment("orders", place) for place, one in enumerate(members)}
    waiting[id(leader)] = leader.sync(given)
    for one in members:
        one.part = waiting[id(one)].result().assignment


def facts(house: House, group: str = "g") -> ClassicFacts | None:
    return house.broker.classic_groups.facts(group)
