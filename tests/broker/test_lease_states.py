"""States of ledgers in the journal of leases: written in parts, again and again, found whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from broker.leasing import (
    committed,
    delivery_options,
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
from millstream.broker import lease_events as events
from millstream.broker import lease_journal, ledger
from millstream.broker.delivery_values import Settle
from millstream.broker.group_offsets import ResetTo
from millstream.broker.group_values import Commit
from millstream.broker.lease_journal import LeaseJournal
from millstream.broker.ledger import Ledger
from millstream.engine import admission
from millstream.engine.pending import Pending
from millstream.log import batch as batches
from millstream.log.batch import Record
from millstream.log.partition import PartitionId

BODY_BYTES_MAX = 64 * 1024
JOURNAL = PartitionId("__leases_every", 0)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a thousand times smaller, in about the same proportions."""
    monkeypatch.setattr(ledger, "PIECE_RECORDS", 4)
    monkeypatch.setattr(lease_journal, "PART_BYTES", 512)
    monkeypatch.setattr(lease_journal, "PARCEL_BYTES", 8 * 1024)
    monkeypatch.setattr(lease_journal, "CUT_BYTES", 32 * 1024)
    monkeypatch.setattr(admission, "BODY_BYTES_MAX", BODY_BYTES_MAX)


def house_with(through: Any = None, **settings: object) -> House:
    settings = {"retry_delay_ms": 3_600_000, "retry_delay_max_ms": 3_600_000} | settings
    options = delivery_options(breaker_settlings_min=1_000_000)
    house = local_house(None, options, through=through).start()
    house.done(house.broker.topics.create("jobs", 1, settings))
    return house


def reopened(house: House, *, kills_the_machine: bool = True) -> House:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk | RefusingDisk)
    left = disk.crash("nothing") if kills_the_machine else disk.copy()
    return local_house(left, house.options, now_ms=house.scheduler.clock.now_ms).start()


def fail(house: House, count: int, error: str) -> None:
    """So many records that failed, and come back in an hour."""
    for first in range(0, count, 50):
        publish(house, *(f"v{first + n}" for n in range(50)))
        results = settle(house, "nack", *receive(house, count_max=50), error=error)
        assert {one.outcome for one in results} == {"retried"}


def ledger_of(house: House) -> Ledger:
    share = house.broker.delivery._shares.find("g", "jobs")
    assert share is not None
    return share.ledgers[0]


def journal_of(house: House) -> LeaseJournal:
    journal = ledger_of(house).journal
    assert journal is not None
    return journal


def is_cutting(journal: LeaseJournal) -> bool:
    return journal._is_cutting


def noted(house: House) -> list[Record]:
    """What is in the journal."""
    start = house.engine.offsets(JOURNAL).start
    records: list[Record] = []
    while start < house.engine.offsets(JOURNAL).high_watermark:
        chunk = house.done(house.engine.read(JOURNAL, start, 1 << 30))
        for position, header in batches.walk(chunk.data):
            records += batches.decode(chunk.data[position : position + header.size])
        start = chunk.next_offset
    return records


def count_cuts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    cuts: list[float] = []
    real = LeaseJournal._cut

    def cut(journal: LeaseJournal) -> Any:
        cuts.append(journal._clock.monotonic())
        return real(journal)

    monkeypatch.setattr(LeaseJournal, "_cut", cut)
    return cuts


@pytest.mark.usefixtures("small_parts")
def test_states_that_a_cut_writes_do_not_make_the_next_cut_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with()
    fail(house, 100, "e" * 500)
    cuts = count_cuts(monkeypatch)
    publish(house, *"abcdefgh")
    for record in receive(house):
        assert outcome(house, "ack", record) == "acked"
        journal_of(house)._cut_when_due()
    assert len(cuts) <= 1
    for _ in range(8):
        fail(house, 50, "e" * 500)
    # Five times as much as at first, and each state is more than the limit.
    assert 1 <= len(cuts) <= 3


@pytest.mark.usefixtures("small_parts")
def test_what_a_cut_leaves_is_about_what_the_states_take(monkeypatch: pytest.MonkeyPatch) -> None:
    house = house_with()
    cuts = count_cuts(monkeypatch)
    for _ in range(12):
        publish(house, *(["v"] * 50))
        settle(house, "nack", *receive(house, count_max=50), delay_ms=0, error="e" * 500)
        settle(house, "ack", *receive(house, count_max=50))
    assert len(cuts) > 3
    assert sum(len(one.value or b"") for one in noted(house)) < 4 * lease_journal.CUT_BYTES


@pytest.mark.usefixtures("small_parts")
def test_a_state_that_is_more_than_an_append_may_have_is_written_in_parts() -> None:
    house = house_with()
    fail(house, 300, "e" * 1000)
    state = sum(
        len(events.encode(event)) for piece in ledger_of(house).state_events() for event in piece
    )
    assert state > 2 * BODY_BYTES_MAX
    house.done(house.broker.topics.alter("jobs", {"fsync": "none"}))
    publish(house, "after")
    (record,) = receive(house)
    assert values([record]) == ["after"]
    house.scheduler.run()
    house = reopened(house, kills_the_machine=False)
    assert receive(house) == []
    assert outcome(house, "ack", record) == "acked"
    assert len(house.broker.delivery.leases("g")) == 300


@pytest.mark.usefixtures("small_parts")
def test_others_go_on_while_a_large_state_is_written_again() -> None:
    house = house_with()
    fail(house, 300, "e" * 1000)
    publish(house, *(["x"] * 20))
    records = receive(house, count_max=20)
    before = house.engine.offsets(JOURNAL).start
    journal = journal_of(house)
    journal._cut_bytes = 1 << 30
    journal._cut_when_due()
    acked = 0
    for record in records:
        settling = house.broker.delivery.settle([Settle("ack", record.receipt)])
        while not settling.is_done:
            house.scheduler.turn()
        acked += is_cutting(journal)
    assert acked > 10
    house.scheduler.run()
    assert house.engine.offsets(JOURNAL).start > before
    house = reopened(house)
    assert receive(house) == []
    assert len(house.broker.delivery.leases("g")) == 300


@pytest.mark.usefixtures("small_parts")
def test_records_taken_and_settled_between_the_parts_of_a_state_are_found_as_they_were() -> None:
    house = house_with()
    fail(house, 100, "e" * 1000)
    publish(house, *(f"x{n}" for n in range(40)))
    first = receive(house, count_max=20)
    journal = journal_of(house)
    journal._cut_bytes = 1 << 30
    journal._cut_when_due()
    for _ in range(12):
        house.scheduler.turn()
    assert is_cutting(journal)
    second = start(house, count_max=20).pending
    house.broker.delivery.settle([Settle("ack", one.receipt) for one in first[:10]])
    house.broker.delivery.settle([Settle("release", one.receipt) for one in first[10:15]])
    house.scheduler.run()
    assert not is_cutting(journal)
    house = reopened(house)
    assert outcome(house, "ack", first[0]) == "receipt_stale"
    assert outcome(house, "ack", first[15]) == "acked"
    assert outcome(house, "ack", second.result().records[0]) == "acked"
    again = receive(house, count_max=20)
    assert values(again) == [f"x{n}" for n in range(10, 15)]


@pytest.mark.usefixtures("small_parts")
def test_a_reset_between_the_parts_of_a_state_begins_it_anew() -> None:
    house = house_with()
    fail(house, 100, "e" * 1000)
    journal = journal_of(house)
    journal._cut_bytes = 1 << 30
    journal._cut_when_due()
    for _ in range(12):
        house.scheduler.turn()
    assert is_cutting(journal)
    house.done(house.broker.group_offsets.reset("g", "jobs", ResetTo("earliest")))
    house = reopened(house)
    assert len(receive(house, count_max=200)) == 100


def test_a_cut_that_is_refused_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Any:
        disks.append(RefusingDisk(disk))
        return disks[0]

    house = house_with(through)
    publish(house, "a", "b", "c")
    receive(house, count_max=1)
    cuts = count_cuts(monkeypatch)
    journal = journal_of(house)
    journal._cut_bytes = 1 << 30
    disks[0].is_full = True
    journal._cut_when_due()
    for _ in range(200):
        house.scheduler.run()
        journal._cut_when_due()
        house.scheduler.advance(0.1)
    waits = [round(later - earlier) for earlier, later in pairwise(cuts)]
    assert waits == [1, 2, 4, 8]
    disks[0].is_full = False
    pass_time(house, 20)
    journal._cut_when_due()
    house.scheduler.run()
    assert journal._cut_bytes < 1 << 20
    assert values(receive(house)) == ["a", "b", "c"]


def test_two_topics_that_swap_their_modes_in_one_turn_do_not_wait_for_each_other() -> None:
    house = house_with(fsync="every")
    for topic, mode in (("x", "every"), ("y", "interval")):
        house.done(house.broker.topics.create(topic, 1, {"fsync": mode}))
    for topic in ("jobs", "x", "y"):
        publish(house, *"abcd", topic=topic)
    held = {topic: receive(house, topic=topic, count_max=2) for topic in ("jobs", "x", "y")}
    house.done(house.broker.topics.alter("x", {"fsync": "interval"}))
    house.done(house.broker.topics.alter("y", {"fsync": "every"}))
    delivery = house.broker.delivery
    first = delivery.settle([Settle("ack", held["jobs"][0].receipt)])
    others = [start(house, topic=topic, count_max=1).pending for topic in ("x", "y")]
    back = house.broker.topics.alter("x", {"fsync": "every"})
    house.scheduler.run()
    assert first.is_done
    assert all(one.is_done for one in others)
    assert back.is_done
    assert outcome(house, "ack", held["x"][0]) == "acked"
    again = reopened(house)
    assert outcome(again, "ack", held["x"][0]) == "receipt_stale"
    assert outcome(again, "ack", held["x"][1]) == "acked"


def house_on_a_disk_that_fills(**settings: object) -> tuple[House, RefusingDisk]:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Any:
        disks.append(RefusingDisk(disk))
        return disks[0]

    return house_with(through, **settings), disks[0]


def groups_after_a_restart(house: House) -> list[str]:
    return [one.group for one in reopened(house).broker.delivery.shares()]


@pytest.mark.parametrize("next_thing", ["time", "another group", "the delete again"])
def test_a_group_deleted_while_the_disk_was_full_for_a_moment_stays_deleted(
    next_thing: str,
) -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, *"abc")
    receive(house)
    receive(house, group="other", count_max=1)
    disk.is_full = True
    deleting = house.broker.group_offsets.delete_group("g")
    house.scheduler.run()
    assert isinstance(deleting.error, Exception)
    disk.is_full = False
    assert "g" in groups_after_a_restart(house)
    if next_thing == "time":
        pass_time(house, 2)
    elif next_thing == "another group":
        receive(house, group="other", count_max=1)
    else:
        house.done(house.broker.group_offsets.delete_group("g"))
    assert groups_after_a_restart(house) == ["other"]


def test_a_disk_that_stays_full_does_not_keep_the_broker_busy_with_dropped_leases() -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, *"abc")
    receive(house)
    disk.is_full = True
    deleting = house.broker.group_offsets.delete_group("g")
    for _ in range(5):
        pass_time(house, 1.1)
    assert isinstance(deleting.error, Exception)
    again = house.broker.group_offsets.delete_group("g")
    house.scheduler.run()
    assert isinstance(again.error, Exception)
    disk.is_full = False
    pass_time(house, 2)
    assert groups_after_a_restart(house) == []


def test_a_ledger_that_left_is_kept_until_its_end_in_the_old_journal_is_durable() -> None:
    house, disk = house_on_a_disk_that_fills(fsync="every")
    publish(house, *"abc")
    (record, *_) = receive(house)
    old = journal_of(house)
    house.done(house.broker.topics.alter("jobs", {"fsync": "none"}))
    house.broker.delivery.settle([Settle("ack", record.receipt)])
    while journal_of(house) is old or ledger_of(house).left:
        house.scheduler.turn()
    disk.is_full = True
    house.scheduler.run()
    assert old._left
    disk.is_full = False
    pass_time(house, 2)
    assert not old._left


def test_a_commit_is_not_done_before_it_is_durable_that_leases_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with()
    publish(house, *"abc")
    settle(house, "ack", *receive(house, count_max=1))
    house.scheduler.run()
    slow: Pending[None] = Pending()
    monkeypatch.setattr(LeaseJournal, "_note_dropped", lambda *_: slow)
    monkeypatch.setattr(LeaseJournal, "dropped", lambda _: slow)
    committing = house.broker.groups.commit("g", [Commit("jobs", 0, 3)])
    house.scheduler.run()
    assert not committing.is_done
    slow.succeed(None)
    house.done(committing)
    monkeypatch.undo()
    assert committed(house) == 3


def count_appends(monkeypatch: pytest.MonkeyPatch, house: House) -> list[PartitionId]:
    """To the journal of leases."""
    appends: list[PartitionId] = []
    engine = type(house.engine)
    one, atomic = engine.append, engine.append_atomic

    def append(self: Any, id: PartitionId, *rest: Any, **how: Any) -> Any:
        appends.extend([id] if id == JOURNAL else [])
        return one(self, id, *rest, **how)

    def append_atomic(self: Any, entries: Any) -> Any:
        appends.extend([JOURNAL] if JOURNAL in {entry[0] for entry in entries} else [])
        return atomic(self, entries)

    monkeypatch.setattr(engine, "append", append)
    monkeypatch.setattr(engine, "append_atomic", append_atomic)
    return appends


def test_the_first_receive_of_a_group_waits_for_one_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with()
    publish(house, *"abc")
    appends = count_appends(monkeypatch, house)
    (record, *_) = receive(house)
    assert len(appends) == 1
    house = reopened(house)
    assert outcome(house, "ack", record) == "acked"
    assert receive(house) == []


def test_an_event_whose_state_was_refused_goes_with_the_state_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, *"abc")
    first = receive(house)
    disk.is_full = True
    assert outcome(house, "ack", first[0]) == "disk_full"
    disk.is_full = False
    appends = count_appends(monkeypatch, house)
    assert outcome(house, "ack", first[1]) == "acked"
    assert len(appends) == 1
    house = reopened(house)
    assert outcome(house, "ack", first[1]) == "receipt_stale"
    assert outcome(house, "ack", first[0]) == "acked"


def test_what_was_noted_before_a_ledger_came_never_waits_for_it() -> None:
    """Also when another came before from the same place, and waits for the same."""
    house = house_with()
    house.done(house.broker.topics.create("y", 1, {}))
    records = {}
    for topic in ("jobs", "y"):
        publish(house, "a", topic=topic)
        (records[topic],) = receive(house, topic=topic)
    journal, share = journal_of(house), house.broker.delivery._shares.find("g", "y")
    assert share is not None
    coming, gate = share.ledgers[0], Pending[None]()
    journal._wait_for(coming, gate)
    house.scheduler.run()
    before = house.broker.delivery.settle([Settle("ack", records["jobs"].receipt)])
    coming.forget_state()
    journal._wait_for(coming, gate)
    after = house.broker.delivery.settle([Settle("ack", records["y"].receipt)])
    house.scheduler.run()
    assert before.is_done
    assert not after.is_done
    gate.succeed(None)
    assert [one.outcome for one in house.done(after)] == ["acked"]


@pytest.mark.parametrize("kind", ["ack", "reject", "extend"])
def test_what_is_said_first_after_the_mode_changed_outlives_a_crash(kind: str) -> None:
    """Whatever numbers the ledgers have in both journals."""
    house = house_with(fsync="interval")
    house.done(house.broker.topics.create("other", 1, {"fsync": "every"}))
    publish(house, "x", topic="other")
    receive(house, topic="other")
    publish(house, "a", "b")
    (record,) = receive(house, count_max=1)
    house.done(house.broker.topics.alter("jobs", {"fsync": "every"}))
    settle(house, kind, record, **({"visibility_ms": 60_000} if kind == "extend" else {}))
    house = reopened(house, kills_the_machine=False)
    pass_time(house, 40)
    assert values(receive(house)) == ["b"]


def test_a_journal_with_states_in_one_piece_is_still_read() -> None:
    house = house_with()
    publish(house, *"abcdef")
    uuid = house.broker.topics.get("jobs").uuid.bytes
    old = [
        events.State(7, 1, "g", uuid, 0, [5]),
        events.Granted(7, "cafe", None, 30_000, 1 << 50, [5], [1, 2, 1, 2], [], []),
        events.Opens(7, [events.OpenRecord(3, 2, 1, first_failure_ms=5, error="é" * 3000)]),
        events.Done(7, [1, 1]),
    ]
    fields: list[batches.Fields] = [(0, None, events.encode(one), ()) for one in old]
    house.done(house.engine.append(JOURNAL, batches.encode(fields)))
    house = reopened(house)
    assert values(receive(house)) == ["d", "f"]
    assert outcome(house, "ack", receive_receipt("jobs:0:2:1:cafe:g")) == "acked"
    failure = ledger_of(house).find_all(3)[0].failure
    assert failure is not None
    assert len(failure.error.encode()) == 1000


def receive_receipt(receipt: str) -> Any:
    return type("Held", (), {"receipt": receipt})()


def test_a_draft_that_lost_a_part_is_not_taken_for_the_ledger() -> None:
    house = house_with()
    publish(house, *"abc")
    (record,) = receive(house, count_max=1)
    uuid = house.broker.topics.get("jobs").uuid.bytes
    number = ledger_of(house).number
    state = events.encode(events.State(number, 9, "g", uuid, 0, [3]))
    for event in (events.Drafted(number, state), events.Closed(number, 2)):
        data = batches.encode([(0, None, events.encode(event), ())])
        house.done(house.engine.append(JOURNAL, data))
    house = reopened(house)
    assert values(receive(house)) == ["b", "c"]
    assert outcome(house, "ack", record) == "acked"


def test_what_is_kept_of_an_error_is_bounded_by_its_bytes() -> None:
    house = house_of()
    publish(house, "a")
    (record,) = receive(house)
    assert outcome(house, "nack", record, error="💥" * 1000) == "retried"
    failure = ledger_of(house).find_all()[0].failure
    assert failure is not None
    assert failure.error == "💥" * 250
