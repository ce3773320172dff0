"""What is said of each part of a settle request, and what is counted."""

from __future__ import annotations

import pytest

from broker.leasing import (
    delivery_options,
    house_of,
    outcome,
    pass_time,
    publish,
    receive,
    settle,
    start,
)
from broker.making import local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker import settling
from millstream.broker.deadletters import DeadLetters
from millstream.broker.delivery_values import Receive, Settle
from millstream.broker.lease_journal import LeaseJournal
from millstream.broker.outgoing import Outgoing
from millstream.engine.pending import Pending
from millstream.errors import EngineBusy, TopicUnknown
from millstream.log.batch import LANES
from millstream.observe.delivery import delivery_metrics


@pytest.mark.parametrize(
    "spelling", ["jobs:00:7:1", "jobs:0:07:1", "jobs:0:٧:1", "jobs:0:7:01", "jobs:٠:7:1"]
)
@pytest.mark.parametrize("kind", ["ack", "nack"])
def test_a_receipt_is_good_only_as_it_was_written(spelling: str, kind: str) -> None:
    house = house_of()
    publish(house, *"abcdefghij")
    records = receive(house)
    changed = records[7].receipt.replace("jobs:0:7:1", spelling)
    assert changed != records[7].receipt
    # Behind one that is good, whose receipt differs in the offset alone.
    settles = [Settle("ack", records[6].receipt), Settle(kind, changed)]  # type: ignore[arg-type]
    first, second = house.done(house.broker.delivery.settle(settles))
    assert first.outcome == "acked"
    assert getattr(second.error, "code", None) == "receipt_invalid"
    assert outcome(house, "ack", records[7]) == "acked"
    assert outcome(house, "ack", records[0]) == "acked"


def test_a_receive_that_names_an_unknown_topic_makes_no_group() -> None:
    house = house_of()
    receiving = house.broker.delivery.receive("g", Receive(("jobs", "nope")))
    assert isinstance(house.failed(receiving.pending), TopicUnknown)
    assert house.broker.delivery.counts == {}
    assert house.broker.delivery.shares() == []


def test_all_refused_settlings_are_counted_and_those_of_a_group_by_group() -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house)
    texts = ["nonsense", "jobs:0:5:1:cafe:nobody", "jobs:9:0:1:cafe:g", "nope:0:0:1:cafe:g"]
    settles = [Settle("ack", record.receipt)] + [Settle("ack", text) for text in texts]
    results = house.done(house.broker.delivery.settle(settles))
    assert [one.error is None for one in results] == [True, False, False, False, False]
    counted = {
        (sample.name, *sample.labels.values()): sample.value
        for family in delivery_metrics(house.broker.delivery)
        for sample in family.samples
    }
    assert counted["millstream_delivery_refused_total",] == 4
    assert counted["millstream_group_delivery_refused_total", "g"] == 2


def test_those_that_are_dead_letters_are_said_to_be_when_the_next_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "BURY_RECORDS", 3)
    house = house_of()
    publish(house, *"abcdefgh")
    records = receive(house)
    real, calls = LeaseJournal.note_with, []

    def note_with(journal: LeaseJournal, *asked: object) -> Pending[None]:
        calls.append(asked)
        if len(calls) == 2:
            return Pending.failed(EngineBusy("no"))
        return real(journal, *asked)  # type: ignore[arg-type]

    monkeypatch.setattr(LeaseJournal, "note_with", note_with)
    results = settle(house, "reject", *records)
    assert [one.outcome for one in results] == ["dead"] * 3 + [None] * 5
    assert {outcome(house, "ack", one) for one in records[:3]} == {"receipt_stale"}
    assert {outcome(house, "ack", one) for one in records[3:]} == {"acked"}
    house.scheduler.run()
    assert house.broker.reader.offsets("jobs.dlq", 0).high_watermark == 3


def test_a_dead_letter_tells_of_its_last_failure_also_when_a_restart_came_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = local_house(None, delivery_options()).start()
    house.done(house.broker.topics.create("jobs", 1, {"deliveries_max": 1}))
    publish(house, "a")
    receive(house, visibility_ms=1000)
    ran_out_ms = house.scheduler.clock.now_ms + 1000
    with monkeypatch.context() as patch:
        patch.setattr(DeadLetters, "ensure", lambda *_: Pending.failed(EngineBusy("busy")))
        pass_time(house, 1.2)
        share = house.broker.delivery._shares.find("g", "jobs")
        assert share is not None
        journal = share.ledgers[0].journal
        assert journal is not None
        house.done(journal.write_state(share.ledgers))
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    again = local_house(
        disk.crash("nothing"), house.options, now_ms=house.scheduler.clock.now_ms
    ).start()
    pass_time(again, 3)
    (letter,) = again.done(start(again, topic="jobs.dlq").pending).records
    headers = dict(letter.record.headers)
    assert headers["ms-dead-first-failure"] == headers["ms-dead-last-failure"]
    assert int(headers["ms-dead-last-failure"] or b"") == ran_out_ms


@pytest.mark.parametrize("is_again", [False, True], ids=["first time", "again"])
@pytest.mark.parametrize("kinds", [("extend", "ack"), ("ack", "ack"), ("nack", "extend")])
def test_a_receipt_that_is_twice_in_a_request_is_settled_once_and_told_so(
    kinds: tuple[str, str], is_again: bool
) -> None:
    house = house_of()
    publish(house, "a")
    if is_again:
        settle(house, "nack", *receive(house), delay_ms=0)
    (record,) = receive(house)
    settles = [Settle(kind, record.receipt) for kind in kinds]  # type: ignore[arg-type]
    results = house.done(house.broker.delivery.settle(settles))
    (error,) = [one.error for one in results if one.error is not None]
    assert getattr(error, "code", None) == "receipt_stale"
    assert "twice in one request" in str(error)


@pytest.mark.parametrize("lane", ["normal", "critical"])
def test_the_first_of_two_acks_counts_whatever_lanes_stand_between_them(lane: str) -> None:
    """One receive has leases of several lanes, with receipts that differ in the offset alone."""
    house = house_of()
    for name in ("normal", "normal", "critical"):
        record = Outgoing(None, b"v", partition=0, lane=LANES.index(name))
        house.done(house.broker.publisher.publish("jobs", [record]))
    records = [one for one in receive(house) if one.record.offset]
    publish(house, "later")
    (later,) = receive(house)
    (one,) = [one for one in records if one.lane == lane]
    (other,) = [one for one in records if one.lane != lane]
    results = settle(house, "ack", other, one, later, one)
    assert [result.outcome for result in results] == ["acked", "acked", "acked", None]
    assert "twice in one request" in str(results[3].error)


def test_a_stale_receipt_that_is_twice_in_a_request_is_stale_both_times() -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house)
    settle(house, "ack", record)
    for one in settle(house, "nack", record, record):
        assert "ran out or was settled" in str(one.error)


def test_what_is_ready_again_has_no_time_at_which_something_happens() -> None:
    house = house_of(settings={"delivery_order": "key"})
    publish(house, *"abc", key="k")
    (record,) = receive(house, count_max=1)
    (lease, *held) = house.broker.delivery.leases("g")
    assert lease.when_ms > 0
    assert {(one.state, one.when_ms) for one in held} <= {("waiting", 0)}
    settle(house, "nack", record, delay_ms=1000)
    assert house.broker.delivery.leases("g")[0].when_ms > 0
    pass_time(house, 1.1)
    back = house.broker.delivery.leases("g")[0]
    assert (back.state, back.when_ms) == ("ready", 0)
