"""Kafka's share groups: records leased to members that speak of offsets and not of receipts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.kafka_members import kafka_options, pass_time
from broker.leasing import publish, receive
from broker.making import House, memory_house
from millstream.broker.delivery_values import Delivered
from millstream.broker.group_values import Join
from millstream.broker.publishing import Outgoing
from millstream.broker.share_groups import ShareBeat, ShareBeaten
from millstream.broker.share_sessions import (
    ACKNOWLEDGED_MAX,
    GOODBYE_SECONDS,
    HELD_LOOK,
    PAUSE_SECONDS,
    Acknowledgement,
    ShareFetch,
    ShareFetched,
)
from millstream.engine.pending import Pending
from millstream.errors import EngineBusy, MillstreamError
from millstream.log.batch import LANES
from millstream.log.partition import PartitionId

SESSION_S = 30.0
JOBS = PartitionId("jobs", 0)
ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4


def share_house(settings: dict[str, object] | None = None, partitions: int = 1) -> House:
    house = memory_house(kafka_options())
    house.done(house.broker.topics.create("jobs", partitions, settings or {}))
    return house


@dataclass
class Worker:
    house: House
    id: str = "w"
    group: str = "g"
    epoch: int = 0
    session: int = 0
    wants: tuple[PartitionId, ...] = field(default=(JOBS,))

    def beat(self, **changes: Any) -> ShareBeaten:
        said: dict[str, Any] = {"member_id": self.id, "epoch": self.epoch}
        beating = self.house.broker.share_groups.heartbeat(self.group, ShareBeat(**said | changes))
        beaten = self.house.done(beating)
        self.epoch = beaten.epoch
        return beaten

    def join(self) -> Worker:
        self.epoch = 0
        self.beat(topics=frozenset(("jobs",)))
        return self

    def start(self, **how: Any) -> Any:
        how.setdefault("epoch", self.session)
        if how["epoch"] == 0:
            how.setdefault("added", self.wants)
        polling = self.house.broker.share_sessions.fetch(self.group, self.id, ShareFetch(**how))
        self.house.scheduler.run()
        self.session = how["epoch"] + 1
        return polling

    def fetch(self, **how: Any) -> ShareFetched:
        fetched: ShareFetched = self.house.done(self.start(**how).pending)
        return fetched

    def values(self, **how: Any) -> list[str]:
        return values(self.fetch(**how).records)

    def acknowledge(self, first: int, last: int, *kinds: int, epoch: int | None = None) -> str:
        epoch = self.session if epoch is None else epoch
        one = Acknowledgement(JOBS, first, last, kinds)
        acknowledging = self.house.broker.share_sessions.acknowledge(
            self.group, self.id, epoch, [one]
        )
        self.house.scheduler.run()
        self.session = epoch + 1
        error = acknowledging.error or acknowledging.result()[JOBS]
        assert error is None or isinstance(error, MillstreamError)
        return error.code if error is not None else "done"

    def refused(self, **how: Any) -> str:
        error = self.house.failed(self.start(**how).pending)
        assert isinstance(error, MillstreamError)
        return error.code


def values(records: list[Delivered]) -> list[str]:
    return [(one.record.value or b"").decode() for one in records]


def committed(house: House, group: str = "g") -> int | None:
    found = house.done(house.broker.group_offsets.committed(group))
    return {one.partition: one.offset for one in found}.get(0)


def test_records_go_to_one_worker_each_and_are_done_when_accepted() -> None:
    house = share_house()
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    publish(house, "1", "2", "3", "4")
    assert a.values(count_max=2) == ["1", "2"]
    assert b.values() == ["3", "4"]
    assert a.acknowledge(0, 1, ACCEPT) == "done"
    assert committed(house) == 2
    done = (Acknowledgement(JOBS, 2, 3, (ACCEPT, ACCEPT)),)
    assert b.fetch(acknowledged=done).outcomes == {JOBS: None}
    assert committed(house) == 4
    assert a.values() == []


def test_a_released_record_comes_back_after_the_backoff_and_counts() -> None:
    house = share_house({"retry_delay_ms": 5000})
    worker = Worker(house).join()
    publish(house, "1")
    assert worker.values() == ["1"]
    assert worker.acknowledge(0, 0, RELEASE) == "done"
    assert worker.values() == []
    pass_time(house, 6)
    (again,) = worker.fetch().records
    assert again.deliveries == 2


def test_a_record_that_is_released_too_often_or_rejected_is_a_dead_letter() -> None:
    house = share_house({"deliveries_max": 2, "retry_delay_ms": 1000})
    worker = Worker(house).join()
    publish(house, "poison", "bad")
    assert worker.values() == ["poison", "bad"]
    assert worker.acknowledge(0, 1, RELEASE, REJECT) == "done"
    pass_time(house, 2)
    assert worker.values() == ["poison"]
    assert worker.acknowledge(0, 0, RELEASE) == "done"
    dead = house.done(house.broker.reader.fetch("jobs.dlq", 0, 0, 10, 1 << 20))
    assert [one.value for one in dead.records] == [b"bad", b"poison"]
    assert committed(house) == 2


def test_lanes_are_served_in_their_order() -> None:
    house = share_house()
    worker = Worker(house).join()
    records = [
        Outgoing(None, lane.encode(), partition=0, lane=LANES.index(lane))
        for lane in ("low", "critical")
    ]
    house.done(house.broker.publisher.publish("jobs", records))
    assert worker.values(count_max=1) == ["critical"]


def test_a_lease_that_runs_out_goes_to_another_and_cannot_be_accepted_any_more() -> None:
    house = share_house({"visibility_ms": 5000, "retry_delay_ms": 0})
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    publish(house, "1")
    assert a.values() == ["1"]
    pass_time(house, 6)
    assert b.values() == ["1"]
    assert a.acknowledge(0, 0, ACCEPT) == "receipt_stale"
    assert b.acknowledge(0, 0, ACCEPT) == "done"


def test_a_renewed_lease_lasts_longer_and_can_still_be_accepted() -> None:
    house = share_house({"visibility_ms": 5000})
    worker = Worker(house).join()
    publish(house, "1")
    assert worker.values() == ["1"]
    pass_time(house, 4)
    renewal = (Acknowledgement(JOBS, 0, 0, (RENEW,)),)
    assert worker.fetch(acknowledged=renewal, is_renewal=True).outcomes == {JOBS: None}
    pass_time(house, 4)
    assert worker.acknowledge(0, 0, ACCEPT) == "done"


def test_what_nobody_looked_at_goes_back_uncounted_when_the_session_ends() -> None:
    house = share_house()
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    publish(house, "1", "2")
    assert a.values() == ["1", "2"]
    ending = (Acknowledgement(JOBS, 0, 0, (ACCEPT,)),)
    assert a.fetch(epoch=-1, acknowledged=ending).outcomes == {JOBS: None}
    (again,) = b.fetch().records
    assert (again.record.value, again.deliveries) == (b"2", 1)
    assert len(house.broker.share_sessions) == 1


def test_a_worker_that_leaves_or_falls_silent_gives_back_what_it_had() -> None:
    house = share_house()
    a, b, c = (Worker(house, name).join() for name in "abc")
    publish(house, "1", "2")
    assert a.values(count_max=1) == ["1"]
    assert b.values(count_max=1) == ["2"]
    a.beat(epoch=-1)
    assert c.values() == []
    pass_time(house, GOODBYE_SECONDS + 0.1)
    assert c.values() == ["1"]
    house.broker.share_groups.require("g", "c")
    pass_time(house, SESSION_S / 2)
    c.beat()
    pass_time(house, SESSION_S / 2 + 1)
    assert set(c.values(epoch=0)) == {"1", "2"}
    assert [one.id for one in (b, c) if _knows(house, one)] == ["c"]


def test_a_worker_that_leaves_may_still_say_what_became_of_its_last_records() -> None:
    house = share_house()
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    publish(house, "1", "2")
    assert a.values() == ["1", "2"]
    a.beat(epoch=-1)
    assert a.acknowledge(0, 0, ACCEPT, epoch=-1) == "done"
    house.scheduler.run()
    assert b.values() == ["2"]
    assert committed(house) == 1


def _knows(house: House, worker: Worker) -> bool:
    return worker.id in {
        one.member_id for one in house.done(house.broker.directory.describe("g")).members
    }


def test_a_worker_whose_id_has_anything_in_it_gets_records() -> None:
    house = share_house()
    publish(house, "1")
    assert Worker(house, "n+H/zA==").join().values() == ["1"]


def test_a_new_session_voids_the_one_before() -> None:
    house = share_house()
    worker = Worker(house).join()
    publish(house, "1")
    assert worker.values() == ["1"]
    assert worker.values(epoch=0) == ["1"]
    assert worker.acknowledge(0, 0, ACCEPT) == "done"


def test_a_request_that_is_out_of_step_is_refused() -> None:
    house = share_house()
    worker = Worker(house).join()
    assert worker.refused(epoch=1) == "share_session_unknown"
    worker.fetch(epoch=0)
    worker.fetch(epoch=1)
    assert worker.refused(epoch=1) == "share_session_epoch_invalid"
    assert worker.refused(epoch=3) == "share_session_epoch_invalid"
    assert worker.acknowledge(0, 0, ACCEPT, epoch=0) == "share_session_epoch_invalid"
    worker.fetch(epoch=2)
    assert Worker(house, "stranger").refused(epoch=0) == "member_unknown"


def test_a_new_session_has_nothing_to_acknowledge() -> None:
    worker = Worker(share_house()).join()
    one = Acknowledgement(JOBS, 0, 0, (ACCEPT,))
    assert worker.refused(epoch=0, acknowledged=(one,)) == "parameter_invalid"


@pytest.mark.parametrize(
    ("first", "last", "kinds"),
    [(1, 0, (1,)), (0, 2, (1, 1)), (0, 0, (5,)), (0, 0, ()), (0, ACKNOWLEDGED_MAX, (1,))],
)
def test_an_acknowledgement_that_makes_no_sense_is_refused(
    first: int, last: int, kinds: tuple[int, ...]
) -> None:
    worker = Worker(share_house()).join()
    worker.fetch()
    assert worker.acknowledge(first, last, *kinds) == "parameter_invalid"


@pytest.mark.parametrize("bad", [(1, 0, (1,)), (1, 1, (9,)), (0, ACKNOWLEDGED_MAX, (1,))])
def test_a_request_with_a_bad_acknowledgement_uses_up_no_good_one(
    bad: tuple[int, int, tuple[int, ...]],
) -> None:
    house = share_house()
    worker = Worker(house).join()
    publish(house, "1", "2")
    assert worker.values() == ["1", "2"]
    good = Acknowledgement(JOBS, 0, 0, (ACCEPT,))
    wrong = Acknowledgement(JOBS, *bad)
    assert worker.refused(acknowledged=(good, wrong)) == "parameter_invalid"
    assert worker.acknowledge(0, 1, ACCEPT) == "done"
    assert committed(house) == 2


def test_an_acknowledgement_that_the_disk_refuses_may_be_said_again() -> None:
    house = share_house()
    worker = Worker(house).join()
    publish(house, "1")
    assert worker.values() == ["1"]
    delivery = house.broker.share_sessions._delivery
    busy = EngineBusy("no room", limit_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(delivery), "settle", lambda *_: Pending.failed(busy))
        assert worker.acknowledge(0, 0, ACCEPT) == "engine_busy"
    assert worker.acknowledge(0, 0, ACCEPT) == "done"


def receipts_held(house: House) -> int:
    (session,) = house.broker.share_sessions._sessions.values()
    return sum(len(held) for held in session.held.values())


def test_a_worker_that_acknowledges_nothing_is_remembered_what_it_has_and_no_more() -> None:
    house = share_house({"visibility_ms": 5000, "retry_delay_ms": 0})
    worker = Worker(house).join()
    for _ in range(6 * HELD_LOOK // 500):
        publish(house, *["x"] * 500)
        assert len(worker.fetch(count_max=500).records) == 500
        pass_time(house, 10)
        worker.beat()
        house.done(house.broker.topics.purge("jobs"))
        assert receipts_held(house) <= 2 * HELD_LOOK
    publish(house, "last")
    (last,) = worker.fetch().records
    assert worker.acknowledge(last.record.offset, last.record.offset, ACCEPT) == "done"


def test_a_lease_that_was_renewed_is_not_forgotten_before_its_end() -> None:
    house = share_house({"visibility_ms": 5000, "retry_delay_ms": 0})
    worker = Worker(house).join()
    publish(house, "1")
    assert worker.values() == ["1"]
    (session,) = house.broker.share_sessions._sessions.values()
    for _ in range(3):
        pass_time(house, 4)
        assert worker.acknowledge(0, 0, RENEW) == "done"
        session._look_at = 0
        session.forget_ended(house.scheduler.clock.now_ms)
    assert worker.acknowledge(0, 0, ACCEPT) == "done"


def test_as_many_offsets_as_allowed_are_looked_at_and_those_not_held_are_told() -> None:
    worker = Worker(share_house()).join()
    worker.fetch()
    assert worker.acknowledge(0, ACKNOWLEDGED_MAX - 1, ACCEPT) == "receipt_stale"
    assert worker.acknowledge(0, 5, 0) == "done"


def test_a_fetch_waits_for_records_and_one_that_is_cancelled_takes_none() -> None:
    house = share_house()
    worker = Worker(house).join()
    worker.fetch()
    waiting = worker.start(wait_ms=5_000)
    assert not waiting.pending.is_done
    publish(house, "1")
    assert values(house.done(waiting.pending).records) == ["1"]
    assert worker.acknowledge(0, 0, ACCEPT) == "done"
    cancelled = worker.start(wait_ms=5_000)
    cancelled.cancel()
    publish(house, "2")
    house.scheduler.run()
    assert worker.values() == ["2"]


def test_an_answer_that_nobody_took_is_given_to_another() -> None:
    house = share_house()
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    publish(house, "1")
    lost = a.start()
    house.done(lost.pending)
    lost.cancel()
    house.scheduler.run()
    assert b.values() == ["1"]


def test_workers_over_http_and_over_kafka_share_a_group() -> None:
    house = share_house()
    worker = Worker(house).join()
    publish(house, "1", "2")
    assert worker.values(count_max=1) == ["1"]
    assert values(receive(house)) == ["2"]


def test_records_of_partitions_that_the_worker_does_not_know_go_back() -> None:
    house = share_house(partitions=2)
    a, b = Worker(house, "a").join(), Worker(house, "b").join()
    b.wants = (JOBS, PartitionId("jobs", 1))
    publish(house, "1", partition=1)
    waiting = a.start()
    assert not waiting.pending.is_done
    pass_time(house, PAUSE_SECONDS * 1.5)
    assert waiting.pending.result().records == []
    assert b.values() == ["1"]


def test_members_hear_of_topics_that_come_and_grow() -> None:
    house = share_house()
    worker = Worker(house)
    beaten = worker.beat(topics=frozenset(("jobs", "later")))
    assert beaten.assignment == (JOBS,)
    assert worker.beat().assignment is None
    house.done(house.broker.topics.create("later", 1))
    assert worker.beat().assignment == (JOBS, PartitionId("later", 0))
    house.done(house.broker.topics.delete("later"))
    assert worker.beat().assignment == (JOBS,)
    assert worker.beat(topics=frozenset(("later",))).assignment == ()


def test_a_share_group_is_shown_and_refuses_members_that_read_by_offset() -> None:
    house = share_house()
    Worker(house).join()
    (summary,) = house.done(house.broker.directory.summaries())
    assert (summary.protocol, summary.members, summary.topics) == ("share", 1, ("jobs",))
    error = house.failed(house.broker.groups.join("g", Join(("jobs",))))
    assert isinstance(error, MillstreamError)
    assert error.code == "group_protocol_mismatch"
    assert house.broker.directory.members == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"topics": None}, "parameter_invalid"),
        ({"topics": frozenset(map(str, range(1001)))}, "parameter_invalid"),
        ({"member_id": "", "topics": frozenset("a")}, "parameter_invalid"),
        ({"epoch": -2}, "parameter_invalid"),
        ({"epoch": 5}, "member_unknown"),
        ({"epoch": -1}, "member_unknown"),
    ],
)
def test_a_heartbeat_that_makes_no_sense_is_refused(changes: dict[str, Any], code: str) -> None:
    house = share_house()
    said: dict[str, Any] = {"member_id": "w", "epoch": 0} | changes
    beat = ShareBeat(**said)
    error = house.failed(house.broker.share_groups.heartbeat("g", beat))
    assert isinstance(error, MillstreamError)
    assert error.code == code


def test_an_epoch_that_a_member_never_had_is_refused() -> None:
    house = share_house()
    worker = Worker(house).join()
    beating = house.broker.share_groups.heartbeat("g", ShareBeat("w", worker.epoch + 1))
    error = house.failed(beating)
    assert isinstance(error, MillstreamError)
    assert error.code == "stale_generation"
