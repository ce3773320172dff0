"""Groups as Kafka's tools list them: as what they are, and once empty as what they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.kafka_members import Classic, kafka_house
from broker.making import House, local_house
from millstream.broker.consumer_groups import Beat
from millstream.broker.share_groups import ShareBeat
from millstream.listeners.kafka import consumer_apis, share_apis
from millstream.listeners.kafka.connection import Counts, Shared
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.group_admin_apis import list_groups
from millstream.wire.kafka.codes import Code


@pytest.fixture
def house() -> House:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 1))
    return house


def context_of(house: House) -> Context:
    shared = cast("Shared", SimpleNamespace(counts=Counts()))
    return Context(house.broker, house.engine, shared, house.scheduler, node_id=1)


def listed(house: House, **filters: Any) -> dict[str, tuple[str, str, str]]:
    asked = SimpleNamespace(**{"states_filter": [], "types_filter": [], **filters})
    call: Any = SimpleNamespace(version=5)
    answer = house.done(list_groups(context_of(house), call, asked))
    return {
        one.group_id: (one.group_type, one.group_state, one.protocol_type) for one in answer.groups
    }


def test_a_share_group_whose_last_worker_left_is_an_empty_share_group(house: House) -> None:
    groups, ids = house.broker.share_groups, cast("Any", None)
    beaten = house.done(groups.heartbeat("g", ShareBeat("w", 0, topics=frozenset(("t",)))))
    house.done(groups.heartbeat("g", ShareBeat(beaten.member_id, -1)))
    assert listed(house) == {"g": ("share", "Empty", "share")}
    assert listed(house, types_filter=["classic"]) == {}
    described = share_apis._described(context_of(house), ids, "g")
    assert (described.code, described.state, described.members) == (Code.NONE, "Empty", ())
    never = share_apis._described(context_of(house), ids, "never")
    assert never.code == Code.GROUP_ID_NOT_FOUND


def test_a_consumer_group_whose_last_member_left_is_an_empty_consumer_group(house: House) -> None:
    groups, ids = house.broker.consumer_groups, cast("Any", None)
    beat = Beat("m", 0, topics=frozenset(("t",)), owned=frozenset(), rebalance_timeout_ms=60_000)
    beaten = house.done(groups.heartbeat("g", beat))
    house.done(groups.heartbeat("g", Beat(beaten.member_id, -1)))
    assert listed(house) == {"g": ("consumer", "Empty", "consumer")}
    described = consumer_apis._described(context_of(house), ids, "g")
    assert (described.code, described.state, described.members) == (Code.NONE, "Empty", ())
    never = consumer_apis._described(context_of(house), ids, "never")
    assert never.code == Code.GROUP_ID_NOT_FOUND
    # Not as one of another kind.
    other = share_apis._described(context_of(house), ids, "g")
    assert other.code == Code.GROUP_ID_NOT_FOUND


def test_a_group_of_other_things_than_consumers_is_listed_as_what_it_is() -> None:
    house = kafka_house()
    Classic(house, "readers").start()
    Classic(house, "connectors").start(protocol_type="connect")
    state = "PreparingRebalance"
    assert listed(house) == {
        "readers": ("classic", state, "consumer"),
        "connectors": ("classic", state, "connect"),
    }
