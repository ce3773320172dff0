"""Kafka's classic groups: members that come, go, are late and come back, on a clock by hand."""

from __future__ import annotations

import pytest

from broker.grouping import Consumer
from broker.kafka_members import (
    FORMING_S,
    REBALANCE_S,
    SESSION_S,
    Classic,
    assignment,
    deal,
    facts,
    kafka_house,
    kafka_options,
    pass_time,
    promised_id,
    settled,
    subscription,
)
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker import classic_groups
from millstream.broker.classic_group import NO_PARTITIONS
from millstream.broker.classic_groups import METADATA_BYTES_MAX, PROTOCOLS_MAX, Hurry
from millstream.broker.classic_values import ClassicSync
from millstream.broker.delivery_values import Receive
from millstream.broker.group_values import Commit, Join
from millstream.broker.publishing import Outgoing
from millstream.errors import GroupProtocolMismatch, GroupUsesOffsets
from millstream.log.partition import PartitionId
from millstream.wire.kafka.consumer_protocol import assigned_partitions, subscribed_topics


def three(house: House) -> tuple[Classic, Classic, Classic]:
    members = (Classic(house), Classic(house), Classic(house))
    settled(house, *members)
    return members


# ---- joining


def test_members_that_start_together_are_in_one_generation_with_one_leader() -> None:
    house = kafka_house()
    a, b, c = three(house)
    assert {one.generation for one in (a, b, c)} == {1}
    assert [one.leads for one in (a, b, c)] == [True, False, False]
    assert a.told is not None
    assert b.told is not None
    assert [one.member_id for one in a.told.members] == [a.id, b.id, c.id]
    assert a.told.members[0].metadata == subscription("orders")
    assert b.told.members == ()
    assert [one.part for one in (a, b, c)] == [assignment("orders", n) for n in range(3)]
    assert house.broker.consuming.classic_groups.rebalances["join"] == 1


def test_a_group_that_forms_waits_a_moment_longer_for_each_that_comes() -> None:
    house = kafka_house()
    a, b = Classic(house), Classic(house)
    a.start()
    pass_time(house, FORMING_S * 0.8)
    b.start()
    pass_time(house, FORMING_S * 0.8)
    assert a.is_waiting
    pass_time(house, FORMING_S)
    assert (a.hear().generation, b.hear().generation) == (1, 1)


def test_a_group_that_forms_does_not_wait_longer_than_the_rebalance_timeout() -> None:
    house = kafka_house(forming_ms=20_000)
    first = Classic(house).start(rebalance_timeout_ms=30_000)
    for _ in range(6):
        pass_time(house, 6)
        Classic(house).start()
    assert first.hear().generation == 1


def test_a_new_client_is_given_its_id_first_and_leaves_no_trace_without_it() -> None:
    house = kafka_house()
    member = Classic(house)
    member.id = promised_id(member)
    assert member.id.startswith("c-")
    assert facts(house) is None
    member.start(must_know_id=True)
    pass_time(house, FORMING_S * 2.5)
    assert member.hear().member_id == member.id
    assert promised_id(Classic(house)) != member.id


def test_an_id_that_nobody_came_back_for_is_forgotten_after_a_session() -> None:
    house = kafka_house()
    member = Classic(house)
    member.id = promised_id(member)
    pass_time(house, SESSION_S + 0.1)
    assert member.start().error == "member_unknown"


def test_the_next_generation_waits_for_who_was_promised_a_place() -> None:
    house = kafka_house()
    (a, *_) = members = three(house)
    late = Classic(house)
    late.id = promised_id(late)
    for one in members:
        one.protocols = (("range", subscription("orders", "more")),)
        one.start()
    assert a.is_waiting
    late.start()
    assert a.hear().generation == late.hear().generation == 2


def test_an_unknown_member_id_is_refused_in_a_group_and_without_one() -> None:
    house = kafka_house()
    assert Classic(house, id="made-up").start().error == "member_unknown"
    three(house)
    assert Classic(house, id="made-up").start().error == "member_unknown"


def test_the_protocol_is_the_one_that_most_prefer_among_those_that_all_know() -> None:
    house = kafka_house()
    a = Classic(house, protocols=(("x", b"1"), ("range", b"2"), ("sticky", b"3")))
    b = Classic(house, protocols=(("sticky", b"4"), ("range", b"5")))
    c = Classic(house, protocols=(("sticky", b"6"), ("x", b"7"), ("range", b"8")))
    settled(house, a, b, c)
    assert a.told is not None
    assert a.told.protocol == "sticky"
    assert [one.metadata for one in a.told.members] == [b"3", b"4", b"6"]


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol_type": "connect"},
        {"protocols": (("other", b""),)},
        {"protocols": ()},
        {"protocol_type": ""},
    ],
)
def test_who_does_not_fit_is_refused_and_disturbs_nobody(changes: dict[str, object]) -> None:
    house = kafka_house()
    (a, *_) = three(house)
    assert Classic(house).start(**changes).error == "group_protocol_mismatch"
    assert a.heartbeat() is None


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({"session_timeout_ms": 499}, True),
        ({"session_timeout_ms": 500}, False),
        ({"session_timeout_ms": 30 * 60 * 1000 + 1}, True),
        ({"protocols": (("range", b"x" * METADATA_BYTES_MAX),)}, False),
        ({"protocols": (("range", b"x" * (METADATA_BYTES_MAX + 1)),)}, True),
        ({"protocols": tuple((str(n), b"") for n in range(PROTOCOLS_MAX))}, False),
        ({"protocols": tuple((str(n), b"") for n in range(PROTOCOLS_MAX + 1))}, True),
    ],
)
def test_what_a_member_asks_for_has_limits(changes: dict[str, object], is_refused: bool) -> None:
    house = kafka_house()
    assert (Classic(house).start(**changes).error == "parameter_invalid") is is_refused


def test_a_group_has_at_most_so_many_members_promised_ones_included() -> None:
    house = kafka_house(members_max=2)
    Classic(house).start()
    promised_id(Classic(house))
    assert Classic(house).start().error == "too_many_members"
    assert Classic(house, group="another").start().error is None


def test_groups_that_only_promised_a_place_count_as_groups() -> None:
    house = kafka_house(groups_max=2)
    for name in ("a", "b"):
        promised_id(Classic(house, group=name))
    assert Classic(house, group="c").start(must_know_id=True).error == "too_many_groups"
    pass_time(house, SESSION_S + 0.1)
    promised_id(Classic(house, group="c"))


def test_what_all_members_say_of_themselves_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(subscription("orders"))
    monkeypatch.setattr(classic_groups, "METADATA_TOTAL_BYTES_MAX", 3 * size)
    house = kafka_house()
    a, b, c = (Classic(house, group=name, instance_id="one").start() for name in "abc")
    assert [one.error for one in (a, b, c)] == [None] * 3
    assert Classic(house, group="d").start().error == "too_many_members"
    pass_time(house, FORMING_S * 2.5)
    a.hear()
    assert a.leave() is None
    d = Classic(house, group="d", instance_id="one").start()
    assert d.error is None
    pass_time(house, SESSION_S * 60)
    others = [Classic(house, group=name).start() for name in "efg"]
    assert [one.error for one in others] == [None] * 3


# ---- from generation to generation


def test_a_newcomer_has_the_others_join_again_and_all_get_new_parts() -> None:
    house = kafka_house()
    a, b, _ = members = three(house)
    new = Classic(house).start()
    assert a.heartbeat() == "rebalance_under_way"
    for one in members:
        one.start()
    assert {one.hear().generation for one in (*members, new)} == {2}
    deal(*members, new)
    assert new.part == assignment("orders", 3)
    assert b.heartbeat() is None


def test_who_does_not_join_again_in_time_is_out() -> None:
    house = kafka_house()
    a, b, c = three(house)
    new = Classic(house).start(rebalance_timeout_ms=5_000)
    a.start()
    for _ in range(6):
        pass_time(house, REBALANCE_S / 6 + 0.01)
        b.heartbeat()
        c.heartbeat()
    assert {one.hear().generation for one in (a, new)} == {2}
    assert (b.heartbeat(), c.heartbeat()) == ("member_unknown", "member_unknown")


def test_a_member_that_falls_silent_is_out_after_its_session() -> None:
    house = kafka_house()
    a, b, c = three(house)
    pass_time(house, SESSION_S - 1)
    assert (a.heartbeat(), b.heartbeat()) == (None, None)
    pass_time(house, 1.1)
    assert a.heartbeat() == "rebalance_under_way"
    assert c.heartbeat() == "member_unknown"
    a.start()
    b.start()
    assert a.hear().generation == b.hear().generation == 2
    assert a.told is not None
    assert [one.member_id for one in a.told.members] == [a.id, b.id]


def test_a_leader_that_dies_is_followed_by_another() -> None:
    house = kafka_house()
    a, b, c = three(house)
    assert a.leave() is None
    b.start()
    c.start()
    b.hear()
    c.hear()
    assert b.leads != c.leads
    deal(b, c)


def test_who_waits_for_others_to_join_keeps_its_session() -> None:
    house = kafka_house()
    (a, *_) = three(house)
    new = Classic(house).start()
    a.start()
    pass_time(house, REBALANCE_S + 0.1)
    assert a.hear().generation == new.hear().generation == 2


def test_a_member_that_asks_twice_leaves_the_first_question_with_an_answer() -> None:
    house = kafka_house()
    a, _, _ = three(house)
    Classic(house).start()
    first = a.start().joining
    a.start()
    assert first is not None
    assert getattr(first.error, "code", None) == "rebalance_under_way"
    assert a.is_waiting


def test_a_follower_that_asks_again_is_told_the_same_and_a_leader_begins_anew() -> None:
    house = kafka_house()
    a, b, c = three(house)
    assert b.start().hear().generation == 1
    assert (a.heartbeat(), c.heartbeat()) == (None, None)
    a.start()
    assert b.heartbeat() == "rebalance_under_way"


def test_whoever_wants_something_else_begins_a_new_generation() -> None:
    house = kafka_house()
    a, b, c = three(house)
    b.protocols = (("range", subscription("orders", "more")),)
    assert b.start().is_waiting
    assert c.heartbeat() == "rebalance_under_way"
    a.start()
    c.start()
    assert a.hear().members[1].metadata == subscription("orders", "more")


def test_numbers_of_generations_rise_also_when_a_group_was_empty_in_between() -> None:
    house = kafka_house()
    member = Classic(house)
    settled(house, member)
    assert member.leave() is None
    again = Classic(house)
    settled(house, again)
    assert again.generation == 2


def test_after_a_restart_members_are_unknown_and_no_number_is_given_twice() -> None:
    disk = SimulatedDisk()
    first = local_house(disk, kafka_options()).start()
    first.done(first.broker.topics.create("orders", 1))
    member = Classic(first)
    settled(first, member)
    second = local_house(disk.crash("nothing"), kafka_options()).start()
    member.house = second
    assert member.heartbeat() == "member_unknown"
    again = Classic(second)
    settled(second, again)
    assert again.generation > member.generation


# ---- dealing out


def test_whoever_the_leader_forgot_gets_an_assignment_that_can_be_read() -> None:
    house = kafka_house()
    a, b = Classic(house), Classic(house)
    a.start()
    b.start()
    pass_time(house, FORMING_S * 2.5)
    a.hear()
    b.hear()
    waiting = b.sync()
    assert a.sync({a.id or "": b""}).result().assignment == NO_PARTITIONS
    assert waiting.result().assignment == NO_PARTITIONS
    assert assigned_partitions(NO_PARTITIONS) == ()


def test_other_kinds_of_members_get_what_their_leader_gave_even_nothing() -> None:
    house = kafka_house()
    worker = Classic(house, protocols=(("sessioned", b"x"),)).start(protocol_type="connect")
    pass_time(house, FORMING_S * 2.5)
    worker.hear()
    assert worker.sync({}).result().assignment == b""


def test_a_sync_of_another_generation_or_protocol_is_refused() -> None:
    house = kafka_house()
    (a, *_) = three(house)
    for changes, code in (
        ({"generation": 0}, "stale_generation"),
        ({"generation": 2}, "stale_generation"),
        ({"protocol": "sticky"}, "group_protocol_mismatch"),
        ({"protocol_type": "connect"}, "group_protocol_mismatch"),
        ({"member_id": "made-up"}, "member_unknown"),
    ):
        assert getattr(a.sync(**changes).error, "code", None) == code
    assert a.sync(protocol="range", protocol_type="consumer").result().assignment == a.part


def test_who_waits_for_its_part_is_told_when_the_group_begins_anew() -> None:
    house = kafka_house()
    a, b = Classic(house), Classic(house)
    a.start()
    b.start()
    pass_time(house, FORMING_S * 2.5)
    a.hear()
    b.hear()
    waiting = b.sync()
    Classic(house).start()
    assert getattr(waiting.error, "code", None) == "rebalance_under_way"
    assert getattr(b.sync().error, "code", None) == "rebalance_under_way"


def test_a_leader_that_never_deals_out_is_out_after_the_rebalance_timeout() -> None:
    house = kafka_house()
    a, b = Classic(house), Classic(house)
    a.start()
    b.start()
    pass_time(house, FORMING_S * 2.5)
    a.hear()
    b.hear()
    waiting = b.sync()
    for _ in range(8):
        pass_time(house, REBALANCE_S / 8 + 0.01)
        a.heartbeat()
    assert getattr(waiting.error, "code", None) == "rebalance_under_way"
    assert a.heartbeat() == "member_unknown"
    b.start()
    b.hear()
    assert b.leads


# ---- static members


def test_a_static_member_comes_back_to_what_it_had_and_nobody_notices() -> None:
    house = kafka_house()
    a, b = Classic(house, instance_id="one"), Classic(house, instance_id="two")
    settled(house, a, b)
    back = Classic(house, instance_id="two").start()
    assert back.hear().generation == 1
    assert back.id != b.id
    assert back.sync().result().assignment == b.part
    assert a.heartbeat() is None
    assert b.heartbeat() == "member_fenced"
    assert getattr(b.sync().error, "code", None) == "member_fenced"
    assert b.start().error == "member_fenced"


def test_a_static_leader_that_comes_back_does_not_deal_out_again() -> None:
    house = kafka_house()
    a, b = Classic(house, instance_id="one"), Classic(house, instance_id="two")
    settled(house, a, b)
    back = Classic(house, instance_id="one").start()
    back.hear()
    assert not back.leads
    again = Classic(house, instance_id="one").start(can_skip=True)
    told = again.hear()
    assert again.leads
    assert told.is_skipped
    assert len(told.members) == 2


def test_a_static_member_that_wants_something_else_has_all_join_again() -> None:
    house = kafka_house()
    a, b = Classic(house, instance_id="one"), Classic(house, instance_id="two")
    settled(house, a, b)
    back = Classic(house, instance_id="two", protocols=(("range", subscription("more")),)).start()
    assert back.is_waiting
    a.start()
    assert a.hear().generation == back.hear().generation == 2


def test_a_static_member_that_is_away_keeps_its_place_until_its_session_ends() -> None:
    house = kafka_house()
    a, b = Classic(house, instance_id="one"), Classic(house, instance_id="two")
    settled(house, a, b)
    Classic(house).start(rebalance_timeout_ms=1000)
    a.start(rebalance_timeout_ms=1000)
    pass_time(house, SESSION_S - 0.5)
    assert a.is_waiting
    pass_time(house, 1)
    assert a.hear().generation == 2
    assert "two" not in {one.instance_id for one in a.told.members}  # type: ignore[union-attr]


def test_an_instance_id_that_is_taken_over_while_it_waits_is_told() -> None:
    house = kafka_house()
    a = Classic(house, instance_id="one").start()
    other = Classic(house, instance_id="one").start()
    assert a.error == "member_fenced"
    pass_time(house, FORMING_S * 2.5)
    assert other.hear().generation == 1


def test_an_administrator_removes_a_static_member_by_its_instance_id() -> None:
    house = kafka_house()
    a, b = Classic(house, instance_id="one"), Classic(house, instance_id="two")
    settled(house, a, b)
    errors = house.broker.classic_groups.leave("g", [("", "two"), ("", "three"), ("x", None)])
    assert [getattr(one, "code", None) for one in errors] == [
        None,
        "member_unknown",
        "member_unknown",
    ]
    assert a.heartbeat() == "rebalance_under_way"


# ---- with others


def test_a_group_with_members_of_one_protocol_refuses_those_of_another() -> None:
    house = kafka_house()
    three(house)
    refusal = house.failed(house.broker.groups.join("g", Join(("orders",))))
    assert isinstance(refusal, GroupProtocolMismatch)
    assert refusal.fields["protocol"] == "classic"
    receiving = house.broker.delivery.receive("g", Receive(("orders",)))
    assert isinstance(house.failed(receiving.pending), GroupUsesOffsets)
    Consumer(house, group="h").join()
    assert Classic(house, group="h").start().error == "group_protocol_mismatch"


def test_a_group_with_open_leases_refuses_classic_members_until_they_are_settled() -> None:
    house = kafka_house()
    house.done(house.broker.publisher.publish("orders", [Outgoing(None, b"x")]))
    received = house.done(house.broker.delivery.receive("g", Receive(("orders",))).pending)
    assert len(received.records) == 1
    assert Classic(house).start().error == "group_uses_leases"


def test_the_group_is_shown_with_its_members_and_what_they_read() -> None:
    house = kafka_house()
    a, b, _ = three(house)
    house.done(house.broker.group_offsets.write("g", [Commit("orders", 1, 0)]))
    (summary,) = house.done(house.broker.directory.summaries())
    assert summary == ("g", "stable", 3, 1, "range", ("orders",), "classic")
    found = house.done(house.broker.directory.describe("g"))
    shown = {one.member_id: one for one in found.members}
    assert shown[b.id or ""].assignment == (PartitionId("orders", 1),)
    assert shown[a.id or ""].topics == ("orders",)
    assert house.broker.directory.members == 3
    lag = house.done(house.broker.lags.of("g"))
    assert lag.partitions[0].member_id == b.id
    Classic(house).start()
    assert house.done(house.broker.directory.describe("g")).summary.state == "rebalancing"


def test_a_new_member_whose_client_is_gone_is_not_waited_for() -> None:
    house = kafka_house()
    a, b, c = three(house)
    hurry = Hurry()
    new = Classic(house)
    new.joining = house.broker.classic_groups.join("g", new.wish(), hurry)
    hurry()
    assert new.error == "member_unknown"
    for one in (a, b, c):
        one.start()
    assert a.hear().generation == 2
    assert len(a.told.members) == 3  # type: ignore[union-attr]


def test_a_member_whose_client_is_gone_may_come_back_while_the_group_waits() -> None:
    house = kafka_house()
    a, b, c = three(house)
    Classic(house).start()
    hurry = Hurry()
    a.joining = house.broker.classic_groups.join("g", a.wish(), hurry)
    assert a.is_waiting
    hurry()
    assert a.error == "rebalance_under_way"
    for one in (b, c, a):
        one.start()
    assert a.hear().generation == 2
    hurry()
    assert a.heartbeat() is None


def test_who_waits_for_its_part_and_is_gone_is_let_go() -> None:
    house = kafka_house()
    a, b = Classic(house), Classic(house)
    a.start()
    b.start()
    pass_time(house, FORMING_S * 2.5)
    a.hear()
    b.hear()
    hurry = Hurry()
    sync = ClassicSync(b.id or "", b.generation)
    waiting = house.broker.classic_groups.sync("g", sync, hurry)
    hurry()
    assert getattr(waiting.error, "code", None) == "rebalance_under_way"
    deal(a, b)
    hurry()
    assert b.heartbeat() is None


def test_a_broker_that_stops_answers_who_waits() -> None:
    house = kafka_house()
    member = Classic(house).start()
    house.broker.consuming.stop()
    assert member.error == "rebalance_under_way"


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\0",
        b"\0\0\0\0\0",
        b"\0\0\x7f\xff\xff\xff",
        b"\0\0\xff\xff\xff\xff",
        b"\0\0\0\0\0\1\0\5ab",
        b"\0\0\0\0\0\1\0\1\xff\0\0\0\0",
    ],
)
def test_what_members_say_in_another_form_is_not_shown(damaged: bytes) -> None:
    assert subscribed_topics(damaged) == ()
    assert assigned_partitions(damaged) == ()


def test_an_assignment_with_more_partitions_than_bytes_is_not_shown() -> None:
    assert assigned_partitions(b"\0\0\0\0\0\1\0\1a\x7f\xff\xff\xff") == ()
