"""Redrive jobs, with time moved by hand."""

from __future__ import annotations

from random import Random

import pytest

from broker.burying import (
    bury,
    house_of,
    job,
    left,
    listed,
    make,
    redrive,
    stored,
    texts,
    wish,
)
from broker.leasing import pass_time
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker import redrive as redrive_module
from millstream.broker.redrive_jobs import RATE_MAX
from millstream.engine.memory import MemoryEngine
from millstream.errors import (
    ParameterInvalid,
    RedriveRunning,
    RedriveUnknown,
    TooManyRedrives,
    TopicReserved,
    TopicUnknown,
)
from millstream.log import batch as batches
from millstream.log.partition import PartitionId


@pytest.fixture
def house() -> House:
    return house_of()


# ---- where records go, and what they look like there


def test_records_go_back_where_they_came_from_and_keep_their_order(house: House) -> None:
    bury(house, "a", "b", "c", partition=1)
    bury(house, "d", partition=0)
    done = redrive(house)
    assert done.progress.state == "done"
    assert (done.progress.seen, done.progress.matched, done.progress.moved) == (4, 4, 4)
    assert texts(house, partition=1) == ["a", "b", "c"]
    assert texts(house, partition=0) == ["d"]
    assert listed(house).letters == []
    assert listed(house).total == 0


def test_what_it_said_of_its_end_goes_and_redrives_are_counted(house: House) -> None:
    house.scheduler.clock.now_ms = 50_000
    bury(house, "a", key=b"k", headers=(("mine", b"1"), ("ms-type", b"json")))
    redrive(house)
    [record] = stored(house)
    assert (record.key, record.value, record.timestamp) == (b"k", b"a", 50_000)
    assert record.headers == (
        ("mine", b"1"),
        ("ms-type", b"json"),
        ("ms-redrives", b"1"),
        ("ms-first-time", b"123"),
    )


def test_a_second_redrive_counts_on_and_keeps_the_first_time(house: House) -> None:
    bury(house, "a", headers=(("ms-redrives", b"4"), ("ms-first-time", b"7")))
    assert listed(house).letters[0].facts.redrives == 4
    redrive(house)
    [record] = stored(house)
    assert sorted(record.headers) == [("ms-first-time", b"7"), ("ms-redrives", b"5")]


def test_another_topic_gets_them_by_key(house: House) -> None:
    make(house, "other", 5)
    bury(house, *"abc", key=b"same", partition=1)
    bury(house, "d", partition=1)
    redrive(house, to="other")
    found = {n: texts(house, "other", n) for n in range(5)}
    assert sorted(value for one in found.values() for value in one) == ["a", "b", "c", "d"]
    assert found[1][-1:] == ["d"]
    assert next(one for one in found.values() if "a" in one)[:3] == ["a", "b", "c"]
    assert texts(house) == []


def test_a_partition_that_its_topic_no_longer_has_gives_way_to_the_key(house: House) -> None:
    bury(house, "a", key=b"k", partition=1)
    bury(house, "b", partition=1)
    house.done(house.broker.topics.delete("orders"))
    make(house, "orders", 1)
    assert redrive(house).progress.moved == 2
    assert texts(house) == ["a", "b"]


def test_lanes_are_kept_and_so_is_the_order_across_them(house: House) -> None:
    bury(house, "a")
    bury(house, "b", lane="high")
    bury(house, "c")
    bury(house, "d", lane="low")
    assert not house.broker.topics.get("orders").uses_lanes
    redrive(house)
    assert texts(house) == ["a", "b", "c", "d"]
    assert [one.lane for one in stored(house)] == [None, "high", None, "low"]
    assert house.broker.topics.get("orders").uses_lanes


def test_a_topic_without_lanes_is_not_made_to_use_them(house: House) -> None:
    bury(house, "a")
    redrive(house)
    assert not house.broker.topics.get("orders").uses_lanes


def test_a_letter_that_somebody_wrote_by_hand_goes_to_the_topic_of_the_job(house: House) -> None:
    bury(house, "a")
    house.done(house.broker.publisher.publish_one("orders.dlq", None, b"by hand", (), None, 0))
    redrive(house)
    assert texts(house) == ["a", "by hand"]


# ---- filters


def test_filters_say_which_ones(house: House) -> None:
    bury(house, "a", reason="rejected", error="bad address", when_ms=1_000)
    bury(house, "b", group="mail", key=b"k", when_ms=2_000)
    bury(house, "c gift", when_ms=3_000)
    assert left(house, reason="rejected") == ["a"]
    assert left(house, group="mail") == ["b"]
    assert left(house, key=b"k") == ["b"]
    assert left(house, text="gift") == ["c gift"]
    assert left(house, text="bad addr") == ["a"]
    assert left(house, since_ms=2_000) == ["b", "c gift"]
    assert left(house, until_ms=2_000) == ["a"]
    assert left(house, since_ms=1_000, until_ms=3_000, reason="deliveries") == ["b"]
    done = redrive(house, since_ms=1_000, until_ms=3_000, reason="deliveries")
    assert (done.progress.seen, done.progress.matched, done.progress.moved) == (3, 1, 1)
    assert texts(house) == ["b"]
    assert left(house) == ["a", "c gift"]
    assert redrive(house).progress.moved == 2
    assert texts(house) == ["b", "a", "c gift"]


def test_a_dry_run_counts_and_changes_nothing(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(12)), partition=1)
    bury(house, "x", reason="rejected")
    before = house.engine.offsets(PartitionId("orders.dlq", 1))
    done = redrive(house, reason="deliveries", is_dry_run=True)
    progress = done.progress
    assert (progress.state, progress.seen, progress.matched, progress.moved) == ("done", 13, 12, 0)
    assert len(progress.examples) == 10
    example = progress.examples[0]
    assert (example.partition, example.offset) == (1, 0)
    assert (example.to, example.to_partition, example.skipped) == ("orders", 1, None)
    assert texts(house, partition=1) == []
    assert listed(house).total == 13
    assert house.engine.offsets(PartitionId("orders.dlq", 1)) == before


# ---- what stays


def test_what_cannot_go_back_stays_and_is_counted(house: House) -> None:
    make(house, "gone")
    make(house, "small")
    make(house, "kept", compact=False)
    bury(house, "a", topic="gone")
    bury(house, "b" * 100, topic="small", key=b"k")
    bury(house, "c", topic="kept", key=b"k")
    house.done(house.broker.topics.delete("gone"))
    house.done(house.broker.topics.alter("small", {"message_bytes_max": 50}))
    house.done(house.broker.topics.alter("kept", {"compact": True}))
    for topic, reason in (
        ("gone", "topic_unknown"),
        ("small", "message_too_large"),
        ("kept", "topic_compacted"),
    ):
        done = redrive(house, topic)
        assert done.progress.skipped == {reason: 1}
        assert done.progress.moved == 0
        assert done.progress.state == "done"
        assert listed(house, topic).total == 1
    make(house, "gone")
    assert redrive(house, "gone").progress.moved == 1


def test_a_message_as_large_as_its_topic_takes_goes_back(house: House) -> None:
    make(house, "tight", message_bytes_max=100)
    bury(house, "x" * 97, topic="tight", key=b"abc")
    bury(house, "x" * 98, topic="tight", key=b"abc")
    done = redrive(house, "tight")
    assert done.progress.skipped == {"message_too_large": 1}
    assert done.progress.moved == 1


def test_what_dies_after_the_job_began_is_not_part_of_it(house: House) -> None:
    bury(house, "a", "b")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    bury(house, "late")
    pass_time(house, 10)
    assert job(house, begun.id).progress.moved == 2
    assert job(house, begun.id).progress.state == "done"
    assert left(house) == ["late"]


def test_dead_letters_that_are_removed_meanwhile_are_passed(house: House) -> None:
    bury(house, "a", "b", "c")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    house.done(house.broker.dead_letter_reading.delete("orders", [(0, 1)]))
    pass_time(house, 10)
    assert texts(house) == ["a", "c"]
    assert job(house, begun.id).progress.moved == 2


def test_a_purge_ends_a_job_early(house: House) -> None:
    bury(house, *"abcd")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    house.done(house.broker.dead_letter_reading.purge("orders"))
    bury(house, "new")
    pass_time(house, 10)
    assert job(house, begun.id).progress.state == "done"
    assert texts(house) == ["a"]
    assert left(house) == ["new"]


def test_dead_letters_made_again_have_nothing_to_do_with_an_old_job(house: House) -> None:
    bury(house, *"abcd")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    house.done(house.broker.topics.delete("orders.dlq"))
    bury(house, *"wxyz")
    pass_time(house, 10)
    found = job(house, begun.id).progress
    assert (found.state, found.error, found.moved) == ("failed", "topic_unknown", 1)
    assert left(house) == ["w", "x", "y", "z"]


def test_an_origin_that_is_deleted_and_made_again_gets_the_rest(house: House) -> None:
    bury(house, *"abcdef", partition=1)
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    pass_time(house, 1.5)
    house.done(house.broker.topics.delete("orders"))
    pass_time(house, 1)
    assert job(house, begun.id).progress.skipped == {"topic_unknown": 4}
    make(house, "orders", 2)
    assert redrive(house).progress.moved == 4
    assert texts(house, partition=1) == ["c", "d", "e", "f"]
    assert left(house) == []


# ---- rate, progress, cancelling


def test_a_rate_is_kept(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(100)))
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=10)))
    for second in range(1, 10):
        pass_time(house, 1.0)
        moved = job(house, begun.id).progress.moved
        assert 10 * second - 1 <= moved <= 10 * second + 2
    facts = job(house, begun.id)
    assert facts.per_second == pytest.approx(10, rel=0.2)
    assert facts.rest_s == pytest.approx((100 - facts.progress.moved) / 10, rel=0.2)
    pass_time(house, 2)
    assert job(house, begun.id).progress.state == "done"


def test_the_pace_of_a_job_with_a_rate_is_no_more_than_its_rate(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(100)))
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=10)))
    pass_time(house, 0.001)
    facts = job(house, begun.id)
    assert facts.progress.moved > 0
    assert facts.per_second == 10
    assert facts.rest_s == pytest.approx((100 - facts.progress.moved) / 10)


def test_without_a_rate_no_time_passes(house: House) -> None:
    bury(house, *(f"v{n}" for n in range(1200)))
    done = redrive(house)
    assert done.progress.moved == 1200
    assert done.progress.ended_ms == house.scheduler.clock.now_ms


def test_a_job_that_is_cancelled_leaves_the_rest(house: House) -> None:
    bury(house, *"abcdef")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    pass_time(house, 1.5)
    cancelled = house.done(house.broker.redrive.cancel(begun.id))
    moved = cancelled.progress.moved
    assert (cancelled.progress.state, moved) == ("cancelled", 2)
    pass_time(house, 10)
    assert texts(house) == ["a", "b"]
    assert left(house) == ["c", "d", "e", "f"]
    assert house.done(house.broker.redrive.cancel(begun.id)).progress == cancelled.progress
    assert redrive(house).progress.moved == 4


def test_the_end_of_a_job_can_be_waited_for(house: House) -> None:
    bury(house, "a", "b", "c")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    early = house.broker.redrive.wait(begun.id, 0.5)
    waiting = house.broker.redrive.wait(begun.id, 60)
    pass_time(house, 1)
    assert early.pending.result() is False
    assert not waiting.pending.is_done
    pass_time(house, 5)
    assert waiting.pending.result() is True
    assert house.broker.redrive.wait(begun.id, 60).pending.result() is False


def test_a_stop_ends_waits_and_starts_no_step(house: House) -> None:
    bury(house, *"abc")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    waiting = house.broker.redrive.wait(begun.id, 60)
    house.broker.redrive.stop()
    pass_time(house, 60)
    assert waiting.pending.result() is False
    assert texts(house) == ["a"]


# ---- limits and bad input


def test_a_topic_has_one_job_at_a_time(house: House) -> None:
    bury(house, "a", "b", "c")
    begun = house.done(house.broker.redrive.begin("orders", wish(rate=1)))
    error = house.failed(house.broker.redrive.begin("orders", wish()))
    assert isinstance(error, RedriveRunning)
    assert error.fields == {"topic": "orders", "redrive": begun.id}
    assert redrive(house, is_dry_run=True).progress.matched == 2
    pass_time(house, 10)
    assert redrive(house).progress.state == "done"


def test_so_many_jobs_run_and_not_one_more() -> None:
    house = house_of(redrives_max=2)
    for name in "abc":
        make(house, name)
        bury(house, *"xyz", topic=name)
    for name in "ab":
        house.done(house.broker.redrive.begin(name, wish(rate=1)))
    assert isinstance(house.failed(house.broker.redrive.begin("c", wish())), TooManyRedrives)
    pass_time(house, 10)
    assert redrive(house, "c").progress.moved == 3


def test_jobs_that_are_over_are_listed_for_a_while() -> None:
    house = house_of(history_ms=60_000)
    bury(house, "a")
    first = redrive(house)
    pass_time(house, 30)
    second = redrive(house)
    jobs = house.done(house.broker.redrive.jobs())
    assert [one.id for one in jobs] == [second.id, first.id]
    pass_time(house, 40)
    assert [one.id for one in house.done(house.broker.redrive.jobs())] == [second.id]
    assert isinstance(house.failed(house.broker.redrive.get(first.id)), RedriveUnknown)


def test_more_jobs_than_anybody_looks_at_are_forgotten(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_module, "HISTORY_MAX", 3)
    ids = [redrive(house).id for _ in range(4)]
    jobs = house.done(house.broker.redrive.jobs())
    assert [one.id for one in jobs] == ids[:0:-1]


def test_what_makes_no_sense_is_refused_and_nothing_begins(house: House) -> None:
    bury(house, "a")
    for bad, error in (
        (wish(rate=0), ParameterInvalid),
        (wish(rate=RATE_MAX + 1), ParameterInvalid),
        (wish(to="orders.dlq"), ParameterInvalid),
        (wish(to="nowhere"), TopicUnknown),
        (wish(to="__leases_every"), TopicReserved),
        (wish(text=""), ParameterInvalid),
        (wish(text="x" * 1001), ParameterInvalid),
        (wish(key=b"x" * 1001), ParameterInvalid),
    ):
        assert isinstance(house.failed(house.broker.redrive.begin("orders", bad)), error)
    unknown = house.failed(house.broker.redrive.begin("nowhere", wish()))
    assert isinstance(unknown, TopicUnknown)
    assert isinstance(house.failed(house.broker.redrive.cancel("none")), RedriveUnknown)
    assert house.done(house.broker.redrive.jobs()) == []
    assert left(house) == ["a"]


def test_a_topic_without_dead_letters_has_nothing_to_put_back(house: House) -> None:
    done = redrive(house)
    assert (done.progress.state, done.progress.moved, done.job.total) == ("done", 0, 0)


def test_the_topic_of_dead_letters_can_be_named_itself(house: House) -> None:
    bury(house, "a")
    assert redrive(house, "orders.dlq").job.topic == "orders"
    assert texts(house) == ["a"]


def test_a_step_is_bounded_by_bytes_and_a_large_record_goes_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive_module, "STEP_BYTES", 1_000)
    bury(house, "a" * 400, "b" * 400, "c" * 400, "d" * 5_000, "e" * 400)
    assert isinstance(house.engine, MemoryEngine)
    before = house.engine.appends
    assert redrive(house).progress.moved == 5
    # The job, its steps, its end, and the front that is trimmed after it.
    sizes = [len(one) for one in texts(house)]
    assert sizes == [400, 400, 400, 5_000, 400]
    assert house.engine.appends - before == 1 + 4 + 1


def test_a_job_of_another_version_is_left_alone() -> None:
    house = local_house().start()
    make(house, "orders")
    view = house.broker.dead_letter_reading._marks.view
    house.done(house.broker.views.change(view, [(b"jnew", b'{"what": "?"}')]))
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    again = local_house(disk.crash("nothing")).start()
    assert again.done(again.broker.redrive.jobs()) == []
    bury(again, "a")
    assert redrive(again).progress.moved == 1


def test_a_record_that_no_append_has_room_for_stays(house: House) -> None:
    make(house, "big", message_bytes_max="64M")
    bury(house, "a", topic="big")
    # It came in a batch of its own; with a mark beside it, it is more than one append may have.
    data = batches.encode([(1, None, Random(1).randbytes(64 * 1024 * 1024 - 10), ())])
    house.done(house.engine.append(PartitionId("big.dlq", 0), data))
    bury(house, "c", topic="big")
    done = redrive(house, "big")
    assert done.progress.skipped == {"message_too_large": 1}
    assert done.progress.moved == 2
    assert texts(house, "big") == ["a", "c"]
    assert listed(house, "big").total == 1


def test_what_gets_the_offsets_of_a_lost_tail_is_not_taken_for_gone() -> None:
    house = local_house().start()
    make(house, "orders", 1, fsync="none")
    bury(house, "a")
    # So large that it is not in the journal: its file is synced at leisure, and lost.
    data = batches.encode([(1, None, b"x" * 200_000, ())])
    house.done(house.engine.append(PartitionId("orders.dlq", 0), data))
    assert redrive(house, text="xx").progress.moved == 1
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    again = local_house(disk.crash("nothing")).start()
    end = again.engine.offsets(PartitionId("orders.dlq", 0)).high_watermark
    assert end == 1
    bury(again, "new", "newer")
    assert left(again) == ["a", "new", "newer"]
    redrive(again)
    assert texts(again)[-3:] == ["a", "new", "newer"]
