"""Leases: who gets a record, for how long, and how a delivery ends."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from broker.leasing import (
    committed,
    house_of,
    outcome,
    pass_time,
    publish,
    receive,
    settle,
    start,
    values,
)
from broker.making import House, RefusingDisk, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.delivery_values import Receive, Settle
from millstream.broker.group_offsets import ResetTo
from millstream.broker.group_values import Commit, Join
from millstream.broker.publishing import Outgoing
from millstream.errors import (
    GroupUsesLeases,
    GroupUsesOffsets,
    LeasesRefused,
    ParameterInvalid,
    TopicUnknown,
)
from millstream.log.batch import LANES, Record


def reopened(house: House) -> House:
    """A broker on the same disk, after the old one was killed."""
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    again = local_house(disk.crash("nothing"), house.options, now_ms=house.scheduler.clock.now_ms)
    return again.start()


def durable_house(partitions: int = 1, **settings: object) -> House:
    house = local_house().start()
    house.done(house.broker.topics.create("jobs", partitions, settings))
    return house


# ---- receiving


def test_a_record_goes_to_one_worker_at_a_time() -> None:
    house = house_of()
    publish(house, "a", "b", "c")
    assert values(receive(house, count_max=2)) == ["a", "b"]
    assert values(receive(house)) == ["c"]
    assert receive(house) == []


def test_a_receive_that_waited_since_before_a_topic_used_lanes_is_told_the_lane() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    urgent = Outgoing(None, b"a", partition=0, lane=LANES.index("critical"))
    house.done(house.broker.publisher.publish("jobs", [urgent]))
    house.scheduler.run()
    (received,) = house.done(waiting.pending).records
    assert (received.lane, received.record.value) == ("critical", b"a")


def test_groups_do_not_share_leases() -> None:
    house = house_of()
    publish(house, "a")
    assert values(receive(house, "g")) == ["a"]
    assert values(receive(house, "h")) == ["a"]


def test_a_receive_waits_for_a_record() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    assert not waiting.pending.is_done
    publish(house, "a")
    assert values(house.done(waiting.pending).records) == ["a"]


def test_a_receive_that_waited_for_nothing_is_empty() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    pass_time(house, 4.9)
    assert not waiting.pending.is_done
    pass_time(house, 0.2)
    assert house.done(waiting.pending).records == []


def test_many_that_wait_share_what_comes() -> None:
    house = house_of(partitions=2)
    waiting = [start(house, wait_ms=5000, count_max=1) for _ in range(3)]
    house.scheduler.run()
    publish(house, "a", "b", partition=1)
    done = [one for one in waiting if one.pending.is_done]
    assert sorted(values([r for one in done for r in one.pending.result().records])) == ["a", "b"]
    publish(house, "c")
    assert all(one.pending.is_done for one in waiting)


def test_more_workers_than_partitions_get_records() -> None:
    house = house_of(partitions=1)
    publish(house, *"abcdef")
    got = [values(receive(house, member=f"w{n}", count_max=1)) for n in range(6)]
    assert got == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]


def test_partitions_and_topics_take_turns() -> None:
    house = house_of(partitions=2)
    publish(house, *"abc", partition=0)
    publish(house, *"xyz", partition=1)
    got = [values(receive(house, count_max=1))[0] for _ in range(6)]
    assert sorted(got) == sorted("abcxyz")
    assert {got[0], got[1]} == {"a", "x"}


def test_a_new_group_begins_at_the_start_or_where_it_says() -> None:
    house = house_of()
    publish(house, "old")
    assert receive(house, "late", start="latest") == []
    publish(house, "new")
    assert values(receive(house, "late")) == ["new"]
    assert values(receive(house, "early")) == ["old", "new"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"count_max": 0},
        {"count_max": 1001},
        {"wait_ms": -1},
        {"wait_ms": 30_001},
        {"visibility_ms": 1},
        {"visibility_ms": 13 * 3600 * 1000},
        {"member": "no spaces"},
        {"start": "middle"},
    ],
)
def test_what_cannot_be_asked_for_is_refused(wrong: dict[str, Any]) -> None:
    house = house_of()
    assert isinstance(house.failed(start(house, **wrong).pending), ParameterInvalid)


def test_unknown_and_compacted_topics_are_refused() -> None:
    house = house_of()
    assert isinstance(house.failed(start(house, topic="none").pending), TopicUnknown)
    house.done(house.broker.topics.create("table", 1, {"compact": True}))
    assert isinstance(house.failed(start(house, topic="table").pending), LeasesRefused)


# ---- settling


def test_an_acked_record_never_comes_back() -> None:
    house = house_of()
    publish(house, "a", "b")
    first = receive(house)
    assert outcome(house, "ack", first[0]) == "acked"
    pass_time(house, 31)
    assert values(receive(house)) == ["b"]


def test_a_lease_that_runs_out_gives_the_record_to_another() -> None:
    house = house_of()
    publish(house, "a")
    (first,) = receive(house, visibility_ms=1000)
    pass_time(house, 0.9)
    assert receive(house) == []
    pass_time(house, 0.2)
    (second,) = receive(house)
    assert (first.deliveries, second.deliveries) == (1, 2)
    assert outcome(house, "ack", first) == "receipt_stale"
    assert outcome(house, "ack", second) == "acked"


def test_a_nack_comes_back_with_growing_delays() -> None:
    house = house_of(settings={"deliveries_max": 10})
    publish(house, "a")
    for delay in (1, 2, 4, 8, 16, 32, 60, 60):
        (record,) = receive(house)
        assert outcome(house, "nack", record) == "retried"
        pass_time(house, delay - 0.1)
        assert receive(house) == []
        pass_time(house, 0.2)
    assert receive(house)[0].deliveries == 9


def test_a_nack_may_say_when_it_comes_back() -> None:
    house = house_of()
    publish(house, "a", "b")
    first, second = receive(house)
    assert outcome(house, "nack", first, delay_ms=0) == "retried"
    assert outcome(house, "nack", second, delay_ms=5000) == "retried"
    assert values(receive(house)) == ["a"]
    pass_time(house, 5.1)
    assert values(receive(house)) == ["b"]


def test_a_release_is_not_counted() -> None:
    house = house_of()
    publish(house, "a")
    for _ in range(10):
        (record,) = receive(house)
        assert record.deliveries == 1
        assert outcome(house, "release", record) == "released"


def test_an_extended_lease_runs_longer() -> None:
    house = house_of()
    publish(house, "a", "b")
    first, second = receive(house, visibility_ms=1000)
    pass_time(house, 0.5)
    assert outcome(house, "extend", first, visibility_ms=2000) == "extended"
    pass_time(house, 1)
    assert values(receive(house)) == ["b"]
    assert outcome(house, "ack", second) == "receipt_stale"
    pass_time(house, 0.9)
    assert outcome(house, "ack", first) == "acked"


def test_each_settle_of_a_request_has_its_own_result() -> None:
    house = house_of()
    publish(house, "a", "b", "c")
    a, b, c = receive(house)
    outcome(house, "ack", a)
    settles = [
        Settle("ack", a.receipt),
        Settle("ack", b.receipt),
        Settle("ack", b.receipt),
        Settle("ack", "nonsense"),
        Settle("nack", c.receipt, delay_ms=0),
        Settle("nack", c.receipt, delay_ms=-1),
    ]
    results = house.done(house.broker.delivery.settle(settles))
    codes = [one.outcome or getattr(one.error, "code", None) for one in results]
    assert codes == [
        "receipt_stale",
        "acked",
        "receipt_stale",
        "receipt_invalid",
        "retried",
        "receipt_stale",
    ]
    assert [one.receipt for one in results] == [one.receipt for one in settles]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.replace(":1:", ":7:", 1),
        lambda r: r.rpartition(":")[0] + ":other",
        lambda r: r.replace("jobs", "jabs"),
        lambda r: r.replace(":0:0:", ":9:0:"),
        lambda r: r.replace(":0:0:", ":0:999:"),
    ],
)
def test_a_made_up_receipt_settles_nothing(change: Any) -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house)
    forged = replace(record, receipt=change(record.receipt))
    assert outcome(house, "ack", forged) == "receipt_unknown"
    assert outcome(house, "ack", record) == "acked"


def test_another_deliverys_nonce_settles_nothing() -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house)
    forged = ":".join([*record.receipt.split(":")[:4], "0" * 16, "g"])
    assert outcome(house, "ack", replace(record, receipt=forged)) == "receipt_stale"
    assert outcome(house, "ack", record) == "acked"


def test_a_receipt_of_another_group_is_refused_where_the_group_is_named() -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house, "g")
    (result,) = house.done(house.broker.delivery.settle([Settle("ack", record.receipt)], "h"))
    assert result.error is not None
    assert result.error.code == "receipt_unknown"


# ---- the last delivery


def dead(house: House) -> list[Record]:
    return house.done(house.broker.reader.fetch("jobs.dlq", 0, 0, 100, 1 << 20)).records


def test_a_record_that_used_up_its_deliveries_is_a_dead_letter() -> None:
    house = house_of()
    publish(house, "a")
    for _ in range(3):
        (record,) = receive(house)
        assert outcome(house, "nack", record, delay_ms=0, error="no") == "retried"
    (record,) = receive(house)
    assert record.deliveries == 4
    assert outcome(house, "nack", record, error="broken") == "dead"
    (letter,) = dead(house)
    assert letter.value == b"a"
    assert b"broken" in [value for _, value in letter.headers]
    assert receive(house) == []
    assert committed(house) == 1


def test_leases_that_run_out_count_too() -> None:
    house = house_of(settings={"deliveries_max": 2})
    publish(house, "a")
    for _ in range(2):
        assert len(receive(house, visibility_ms=1000)) == 1
        pass_time(house, 1.1)
    assert [one.value for one in dead(house)] == [b"a"]
    assert receive(house) == []


def test_a_rejected_record_is_a_dead_letter_at_once() -> None:
    house = house_of()
    publish(house, "a", "b")
    first, second = receive(house)
    assert outcome(house, "reject", first, error="poison") == "dead"
    assert outcome(house, "ack", second) == "acked"
    assert [one.value for one in dead(house)] == [b"a"]


def test_without_dead_letters_it_is_dropped() -> None:
    house = house_of(settings={"dead_letters": False})
    publish(house, "a")
    with capture_logs() as logs:
        assert outcome(house, "reject", receive(house)[0]) == "dropped"
    [said] = logs
    assert (said["log_level"], said["topic"], said["records"]) == ("warning", "jobs", 1)
    assert "jobs.dlq" not in house.broker.topics.by_name
    assert house.broker.delivery.counts["g"].dropped == 1


def test_what_fails_among_dead_letters_is_parked() -> None:
    house = house_of()
    publish(house, "a")
    outcome(house, "reject", receive(house)[0])
    (letter,) = receive(house, "undertaker", "jobs.dlq")
    assert outcome(house, "reject", letter) == "parked"
    assert receive(house, "undertaker", "jobs.dlq") == []
    assert len(dead(house)) == 1


def test_while_everything_fails_nothing_is_buried() -> None:
    house = house_of(settings={"deliveries_max": 1}, breaker_settlings_min=4)
    publish(house, *"abcdefgh")
    results = [outcome(house, "nack", one) for one in receive(house)]
    assert results[:3] == ["dead"] * 3
    assert results[4:] == ["retried"] * 4
    assert not house.broker.delivery.shares()[0].is_dead_lettering
    pass_time(house, 61)
    for one in receive(house):
        assert outcome(house, "ack", one) == "acked"
    assert house.broker.delivery.shares()[0].is_dead_lettering


# ---- limits


def test_a_member_has_at_most_so_many() -> None:
    house = house_of(member_inflight_max=2)
    publish(house, *"abcd")
    first = receive(house, member="w")
    assert values(first) == ["a", "b"]
    limited = house.done(start(house, member="w").pending)
    assert (limited.records, limited.limited_by) == ([], "member")
    assert values(receive(house, member="x")) == ["c", "d"]
    waiting = start(house, member="w", wait_ms=5000)
    house.scheduler.run()
    settle(house, "nack", *first, delay_ms=0)
    assert values(house.done(waiting.pending).records) == ["a", "b"]


def test_a_receive_gives_no_more_than_it_was_asked_for_where_some_come_back() -> None:
    house = house_of(2)
    publish(house, "a", partition=0)
    publish(house, *"uvwxyz", partition=1)
    (back,) = receive(house, count_max=1)
    settle(house, "release", back)
    found = [values(receive(house, count_max=2)) for _ in range(2)]
    # The one that was given back, and new ones of the other partition.
    assert found == [["u", "v"], ["a", "w"]]


def test_a_group_has_at_most_so_many_in_flight() -> None:
    house = house_of(group_inflight_max=3)
    publish(house, *"abcdef")
    first = receive(house)
    assert values(first) == ["a", "b", "c"]
    assert house.done(start(house).pending).limited_by == "group"
    settle(house, "ack", first[0])
    assert values(receive(house)) == ["d"]


# ---- keys in order


def test_the_next_record_of_a_key_waits_for_the_one_before() -> None:
    house = house_of(settings={"delivery_order": "key"})
    publish(house, "a1", "a2", "a3", key="a")
    publish(house, "b1", key="b")
    publish(house, "n1", "n2")
    first = receive(house)
    assert values(first) == ["a1", "b1", "n1", "n2"]
    assert receive(house) == []
    assert outcome(house, "nack", first[0], delay_ms=1000) == "retried"
    assert receive(house) == []
    pass_time(house, 1.1)
    (again,) = receive(house)
    assert values([again]) == ["a1"]
    assert outcome(house, "ack", again) == "acked"
    assert values(receive(house)) == ["a2"]


# ---- committed offsets


def test_the_group_stands_at_its_first_record_that_is_not_settled() -> None:
    house = house_of()
    publish(house, *"abcd")
    a, b, c, _d = receive(house)
    settle(house, "ack", b, c)
    assert committed(house) == 0
    settle(house, "ack", a)
    assert committed(house) == 3


def test_a_group_changes_to_offsets_when_nothing_is_leased() -> None:
    house = house_of()
    publish(house, *"abc")
    records = receive(house, count_max=2)
    join = Join(("jobs",), auto_offset_reset="earliest")
    assert isinstance(house.failed(house.broker.groups.join("g", join)), GroupUsesLeases)
    settle(house, "ack", *records)
    joined = house.done(house.broker.groups.join("g", join)).standing
    assert isinstance(house.failed(start(house).pending), GroupUsesOffsets)
    groups = house.broker.groups
    polled = house.done(groups.poll("g", joined.member_id, joined.generation).pending)
    assert [record.value for part in polled.parts for record in part.records] == [b"c"]
    house.done(groups.leave("g", joined.member_id))
    house.done(groups.commit("g", [Commit("jobs", 0, 1)]))
    assert values(receive(house)) == ["b", "c"]


def test_a_reset_ends_all_leases() -> None:
    house = house_of()
    publish(house, *"abc")
    first = receive(house)
    settle(house, "ack", first[0])
    house.done(house.broker.group_offsets.reset("g", "jobs", ResetTo("earliest")))
    assert outcome(house, "ack", first[1]) == "receipt_unknown"
    assert values(receive(house)) == ["a", "b", "c"]


# ---- topics that change


def test_a_purge_ends_all_leases() -> None:
    house = house_of()
    publish(house, *"abc")
    first = receive(house)
    house.done(house.broker.topics.purge("jobs"))
    assert outcome(house, "ack", first[0]) == "receipt_stale"
    publish(house, "d")
    assert values(receive(house)) == ["d"]


def test_a_topic_made_again_inherits_no_lease() -> None:
    house = house_of()
    publish(house, "a")
    (old,) = receive(house)
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    house.done(house.broker.topics.delete("jobs"))
    assert isinstance(house.failed(waiting.pending), TopicUnknown)
    house.done(house.broker.topics.create("jobs", 1))
    publish(house, "b")
    (new,) = receive(house)
    assert values([new]) == ["b"]
    assert new.deliveries == 1
    assert outcome(house, "ack", old) == "receipt_stale"


def test_new_partitions_are_received_from() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    house.done(house.broker.topics.add_partitions("jobs", 3))
    publish(house, "a", partition=2)
    assert values(house.done(waiting.pending).records) == ["a"]


# ---- clients that go away


def test_what_a_client_never_saw_is_given_to_another() -> None:
    house = house_of()
    publish(house, "a")
    polling = start(house)
    house.scheduler.run()
    polling.cancel()
    house.scheduler.run()
    (again,) = receive(house)
    assert again.deliveries == 1


def test_a_client_that_goes_while_it_waits_takes_nothing() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    waiting.cancel()
    publish(house, "a")
    assert values(receive(house)) == ["a"]


def test_a_drain_answers_those_who_wait() -> None:
    house = house_of()
    waiting = start(house, wait_ms=5000)
    house.scheduler.run()
    house.broker.delivery.drain()
    assert house.done(waiting.pending).records == []


# ---- restarts


def test_leases_are_as_they_were_after_a_restart() -> None:
    house = durable_house(2)
    publish(house, *"abcd")
    publish(house, "z", partition=1)
    records = {one.record.value: one for one in receive(house, visibility_ms=10_000)}
    settle(house, "ack", records[b"b"])
    settle(house, "nack", records[b"c"], delay_ms=5000, error="why")
    settle(house, "release", records[b"d"])
    house = reopened(house)
    assert values(receive(house)) == ["d"]
    pass_time(house, 5.1)
    assert values(receive(house)) == ["c"]
    assert outcome(house, "ack", records[b"a"]) == "acked"
    assert outcome(house, "ack", records[b"b"]) == "receipt_stale"
    pass_time(house, 5.1)
    (again,) = receive(house)
    assert (again.record.value, again.deliveries) == (b"z", 2)


def test_a_wall_clock_that_jumps_moves_no_lease() -> None:
    house = house_of()
    publish(house, "a", "b")
    first, second = receive(house, visibility_ms=10_000)
    house.scheduler.clock.now_ms += 3_600_000
    pass_time(house, 1)
    assert outcome(house, "ack", first) == "acked"
    house.scheduler.clock.now_ms -= 7_200_000
    pass_time(house, 8)
    assert receive(house) == []
    pass_time(house, 1.2)
    assert len(receive(house)) == 1
    assert outcome(house, "ack", second) == "receipt_stale"


def test_a_clock_put_back_over_a_restart_makes_no_lease_longer() -> None:
    house = durable_house()
    publish(house, "a")
    assert len(receive(house, visibility_ms=10_000)) == 1
    house.scheduler.clock.now_ms -= 3_600_000
    house = reopened(house)
    pass_time(house, 9.9)
    assert receive(house) == []
    pass_time(house, 0.3)
    assert len(receive(house)) == 1


def test_a_last_delivery_under_way_at_a_crash_ends_as_one_dead_letter() -> None:
    house = durable_house(deliveries_max=1)
    publish(house, "a")
    assert len(receive(house, visibility_ms=1000)) == 1
    house = reopened(house)
    pass_time(house, 1.1)
    assert receive(house) == []
    assert [one.value for one in dead(house)] == [b"a"]


def test_several_topics_in_one_receive() -> None:
    house = house_of()
    house.done(house.broker.topics.create("more", 1))
    publish(house, "a")
    publish(house, "b", topic="more")
    received = house.broker.delivery.receive("g", Receive(("jobs", "more"), count_max=10))
    records = house.done(received.pending).records
    assert {one.topic for one in records} == {"jobs", "more"}
    results = settle(house, "ack", *records)
    assert [one.outcome for one in results] == ["acked", "acked"]


# ---- who waits is woken


def test_who_still_waits_hears_of_what_comes_after_another_was_served() -> None:
    house = house_of()
    first, second = start(house, wait_ms=5000), start(house, wait_ms=5000)
    house.scheduler.run()
    publish(house, "a")
    assert values(house.done(first.pending).records) == ["a"]
    assert not second.pending.is_done
    publish(house, "b")
    assert values(house.done(second.pending).records) == ["b"]


def test_who_may_not_have_more_takes_no_news_from_others() -> None:
    house = house_of(member_inflight_max=1)
    publish(house, "a")
    (record,) = receive(house, member="w")
    limited = start(house, member="w", wait_ms=5000)
    house.scheduler.run()
    free = start(house, member="x", wait_ms=5000)
    house.scheduler.run()
    publish(house, "b")
    assert values(house.done(free.pending).records) == ["b"]
    assert not limited.pending.is_done
    publish(house, "c")
    assert outcome(house, "ack", record) == "acked"
    assert values(house.done(limited.pending).records) == ["c"]


def test_room_in_a_full_group_goes_to_one_that_waits_for_it() -> None:
    house = house_of(group_inflight_max=2)
    publish(house, *"abcd")
    first = receive(house)
    assert values(first) == ["a", "b"]
    waiting = [start(house, count_max=1, wait_ms=5000) for _ in range(2)]
    house.scheduler.run()
    settle(house, "ack", *first)
    assert [values(house.done(one.pending).records) for one in waiting] == [["c"], ["d"]]


def test_a_thousand_that_wait_are_served_by_one_publish() -> None:
    house = house_of()
    waiting = [start(house, count_max=1, wait_ms=5000) for _ in range(1000)]
    house.scheduler.run()
    publish(house, *map(str, range(1000)))
    got = [values(house.done(one.pending).records)[0] for one in waiting]
    assert sorted(map(int, got)) == list(range(1000))


def test_an_ack_that_the_disk_refused_leaves_the_record_leased() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> RefusingDisk:
        disks.append(RefusingDisk(disk))
        return disks[-1]

    house = local_house(through=through).start()  # type: ignore[arg-type]
    house.done(house.broker.topics.create("jobs", 1, {}))
    publish(house, *"abc")
    records = receive(house)
    settle(house, "nack", records[2], delay_ms=0)
    disks[0].is_full = True
    codes = {getattr(one.error, "code", None) for one in settle(house, "ack", *records[:2])}
    assert codes == {"disk_full"}
    disks[0].is_full = False
    assert [one.outcome for one in settle(house, "ack", *records[:2])] == ["acked", "acked"]
    assert values(receive(house)) == ["c"]
    assert committed(house) == 2
