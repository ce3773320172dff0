"""Lanes: the index against a plain list, shares and starvation as properties."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.making import House, local_house, memory_house
from millstream.broker import lanes as module
from millstream.broker.delivery_values import Receive, Settle
from millstream.broker.lanes import (
    LANE_COUNT,
    NORMAL,
    LaneIndex,
    Lanes,
    LaneTurns,
    Room,
    lane_of,
)
from millstream.broker.topic_settings import LANE_WEIGHTS
from millstream.log import batch as batches
from millstream.log.batch import CONTROL_MASK, LANE_HEADER, LANES
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.broker.topics import Topic

CRITICAL, HIGH, LOW, BACKGROUND = 0, 1, 3, 4
ALL = [True] * LANE_COUNT
BOOST_S = 30.0

# ---- the index


class Model:
    """The lane of every offset, one by one; None where there is no record."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.lanes: dict[int, int] = {}
        self.end = start

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        for first in range(max(offset, self.start), self.end):
            if self.lanes.get(first) == lane:
                end = first
                while self.lanes.get(end) == lane:
                    end += 1
                return first, end
        return None

    def count(self, lane: int, offset: int) -> int:
        offset = max(offset, self.start)
        return sum(1 for at, one in self.lanes.items() if one == lane and at >= offset)


@given(
    start=st.integers(0, 50),
    steps=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 3]),
            st.integers(1, 5),
            st.integers(0, LANE_COUNT - 1),
            st.integers(0, 12),
        ),
        max_size=40,
    ),
)
def test_the_index_knows_what_a_list_of_all_offsets_knows(
    start: int, steps: list[tuple[int, int, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CUT_RUNS_MIN", 2)
        index, model = LaneIndex(start), Model(start)
        for gap, size, lane, forget in steps:
            first = index.end + gap
            index.add(first, first + size, lane)
            model.lanes |= dict.fromkeys(range(first, first + size), lane)
            model.end = first + size
            if forget == 0:
                model.start = (model.start + model.end) // 2
                index.forget_before(model.start)
        assert index.end == model.end
        assert index.start == model.start
        for offset in range(start - 1, model.end + 2):
            known = model.lanes.get(offset) if offset >= model.start else None
            assert index.lane_at(offset) == known
            for lane in range(LANE_COUNT):
                assert index.next_run(lane, offset) == model.next_run(lane, offset)
                assert index.count(lane, offset) == model.count(lane, offset)


def test_neighbours_of_one_lane_are_one_run_however_many_records_there_are() -> None:
    index = LaneIndex(0)
    for first in range(0, 100_000_000, 100_000):
        index.add(first, first + 100_000, BACKGROUND)
    assert index.runs == 1
    assert index.count(BACKGROUND, 7) == 99_999_993


def test_an_index_is_full_at_its_limit_and_goes_on_when_something_is_forgotten() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUNS_MAX", 2_000)
        index = LaneIndex(0)
        while not index.is_full:
            index.add(index.end, index.end + 1, index.end % 2)
        assert index.end == 2_000
        # Runs go by the thousand.
        was_full = []
        for offset in (1_000, 1_023, 1_024):
            index.forget_before(offset)
            was_full.append(index.is_full)
        assert was_full == [True, True, False]
        assert index.next_run(0, 0) == (1_024, 1_025)
        assert index.count(1, 0) == 488


def test_all_indexes_together_have_a_limit_and_each_some_runs_of_its_own() -> None:
    room = Room(runs_max=3_000)
    large, small = LaneIndex(0, room), LaneIndex(0, room)
    while not large.is_full:
        large.add(large.end, large.end + 1, large.end % 2)
    assert large.runs == 3_000
    while not small.is_full:
        small.add(small.end, small.end + 1, small.end % 2)
    assert small.runs == module.RUNS_MIN
    large.drop()
    assert room.runs == module.RUNS_MIN
    assert not small.is_full


# ---- the indexes of a broker's partitions


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 2))
    return house


def lanes_of(house: House) -> Lanes:
    return Lanes(house.engine, house.broker.topics, house.scheduler.clock, house.scheduler)


def using(house: House, name: str = "t") -> Topic:
    return house.done(house.broker.topics.use_lanes(name))


def append(house: House, lane: int | None, count: int, partition: int = 0) -> None:
    name = None if lane is None else LANES[lane]
    headers = () if name is None else ((LANE_HEADER, name.encode()),)
    batch = batches.encode([(0, None, b"v", headers)] * count, lane=name)
    house.done(house.engine.append(PartitionId("t", partition), batch))


def caught_up(house: House, lanes: Lanes, topic: Topic, offset: int = 0) -> LaneIndex:
    index = lanes.index(topic, 0, offset, "g")
    assert index is not None
    pending = lanes.catch_up(topic, 0, "g")
    if pending is not None:
        house.done(pending)
    return index


def test_a_topic_that_never_used_lanes_has_no_index(house: House) -> None:
    lanes = lanes_of(house)
    topic = house.broker.topics.get("t")
    assert lanes.index(topic, 0, 0, "g") is None
    assert lanes.catch_up(topic, 0, "g") is None


def test_the_index_is_made_from_the_headers_of_batches(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, None, 3)
    append(house, NORMAL, 2)
    append(house, CRITICAL, 1)
    append(house, BACKGROUND, 4)
    append(house, CRITICAL, 1, partition=1)
    index = caught_up(house, lanes, topic)
    assert [index.next_run(lane, 0) for lane in range(LANE_COUNT)] == [
        (5, 6),
        None,
        (0, 5),
        None,
        (6, 10),
    ]
    assert lanes.catch_up(topic, 0, "g") is None
    append(house, BACKGROUND, 1)
    assert caught_up(house, lanes, topic) is index
    assert index.next_run(BACKGROUND, 8) == (8, 11)


def test_an_index_begins_within_a_batch_where_it_was_asked_to(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, LOW, 10)
    index = caught_up(house, lanes, topic, offset=7)
    assert index.next_run(LOW, 0) == (7, 10)
    assert index.count(LOW, 0) == 3


def test_an_index_is_made_anew_for_who_needs_what_it_has_forgotten(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, LOW, 10)
    index = caught_up(house, lanes, topic)
    index.forget_before(8)
    assert caught_up(house, lanes, topic, offset=8) is index
    other = caught_up(house, lanes, topic, offset=2)
    assert other is not index
    assert other.next_run(LOW, 0) == (2, 10)
    assert lanes.room.runs == 1


def test_batches_that_are_not_for_readers_are_in_no_lane() -> None:
    index = LaneIndex(0)
    batch = batches.encode([(0, b"\0\0\0\0", b"", ())], control=True)
    assert batches.read_header(batch).attributes & CONTROL_MASK
    module._add_batches(index, memoryview(batch))
    assert index.end == 1
    assert not any(index.count(lane, 0) for lane in range(LANE_COUNT))


def test_what_was_purged_is_passed_over(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, LOW, 5)
    house.done(house.broker.topics.purge("t"))
    append(house, HIGH, 5)
    index = caught_up(house, lanes, topic)
    assert index.count(LOW, 0) == 0
    assert index.next_run(HIGH, 0) == (5, 10)


def test_a_topic_made_again_under_an_old_name_has_another_index(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, LOW, 5)
    caught_up(house, lanes, topic)
    house.done(house.broker.topics.delete("t"))
    assert lanes.room.runs == 0
    house.done(house.broker.topics.create("t", 1))
    assert lanes.index(house.broker.topics.get("t"), 0, 0, "g") is None
    again = using(house)
    append(house, HIGH, 1)
    index = caught_up(house, lanes, again)
    assert index.count(LOW, 0) == 0
    assert index.count(HIGH, 0) == 1


def test_a_topic_deleted_while_its_index_catches_up_leaves_nothing(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    append(house, LOW, 5)
    index = lanes.index(topic, 0, 0, "g")
    assert index is not None
    with pytest.MonkeyPatch.context() as patch:
        # Every read is a slice of its own.
        patch.setattr(module, "SLICE_S", 0.0)
        pending = lanes.catch_up(topic, 0, "g")
        assert pending is not None
        assert lanes.catch_up(topic, 0, "g") is pending
        house.done(house.broker.topics.delete("t"))
        house.done(pending)
    assert lanes.room.runs == 0


def test_catching_up_stops_at_the_limit_and_goes_on_where_it_stopped(house: House) -> None:
    lanes, topic = lanes_of(house), using(house)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUNS_MAX", 4)
        patch.setattr(module, "CUT_RUNS_MIN", 1)
        for at in range(6):
            append(house, at % 2, 2)
        index = caught_up(house, lanes, topic)
        assert index.is_full
        assert index.end == 8
        assert lanes.catch_up(topic, 0, "g") is None
        index.forget_before(4)
        assert caught_up(house, lanes, topic, offset=4) is index
        assert index.end == 12
        assert index.count(0, 0) == 4


def test_that_a_topic_uses_lanes_survives_a_restart_and_a_change_of_its_settings() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 1))
    topic = using(house)
    assert topic.uses_lanes
    assert using(house) is topic
    house.done(house.broker.topics.alter("t", {"retention_ms": "1d"}))
    disk = house.scheduler.disk
    house.engine.close()
    again = local_house(disk).start()  # type: ignore[arg-type]
    assert again.broker.topics.get("t").uses_lanes


# ---- turns


def serve(turns: LaneTurns, count_max: int, now_s: float = 0.0) -> list[int]:
    """One receive while all lanes are full: how many it had of each."""
    had = [0] * LANE_COUNT
    while count_max:
        lane, most = turns.choose(ALL, now_s)
        count = min(most, count_max)
        turns.served(lane, count, now_s)
        had[lane] += count
        count_max -= count
    return had


@given(st.lists(st.integers(1, 1000), min_size=20, max_size=40), st.data())
def test_shares_are_within_two_points_of_the_weights_however_large_receives_are(
    sizes: list[int], data: st.DataObject
) -> None:
    weights = data.draw(st.sampled_from([LANE_WEIGHTS, (20, 20, 20, 20, 20), (90, 4, 3, 2, 1)]))
    turns = LaneTurns(weights, BOOST_S, 0.0)
    had = [0] * LANE_COUNT
    for size in sizes:
        had = [one + more for one, more in zip(had, serve(turns, size), strict=True)]
    # Less than one round can be out of balance.
    whole = sum(had)
    for lane in range(LANE_COUNT):
        assert abs(had[lane] - whole * weights[lane] / 100) <= 100
        if whole >= 5_000:
            assert abs(100 * had[lane] / whole - weights[lane]) <= 2


def test_one_at_a_time_gives_the_shares_of_the_weights_in_every_round() -> None:
    turns = LaneTurns(LANE_WEIGHTS, BOOST_S, 0.0)
    for _ in range(10):
        had = [0] * LANE_COUNT
        for _ in range(100):
            for lane, count in enumerate(serve(turns, 1)):
                had[lane] += count
        assert had == list(LANE_WEIGHTS)


def test_critical_is_looked_at_first_in_a_round_and_with_every_choice() -> None:
    turns = LaneTurns(LANE_WEIGHTS, BOOST_S, 0.0)
    others = [False, True, True, True, True]
    lane, most = turns.choose(others, 0.0)
    assert (lane, most) == (HIGH, 25)
    turns.served(HIGH, 10, 0.0)
    # It came in the middle of a round, and waits for nobody.
    assert turns.choose(ALL, 0.0) == (CRITICAL, 50)
    turns.served(CRITICAL, 1, 0.0)
    assert turns.choose(others, 0.0) == (HIGH, 15)
    # What it has left of the round is still its own.
    assert turns.choose(ALL, 0.0) == (CRITICAL, 49)
    turns.served(CRITICAL, 49, 0.0)
    assert turns.choose(ALL, 0.0)[0] == HIGH


def test_a_lane_without_rivals_may_have_all_and_owes_nothing_afterwards() -> None:
    turns = LaneTurns(LANE_WEIGHTS, BOOST_S, 0.0)
    only = [False, False, False, False, True]
    assert turns.choose(only, 0.0) == (BACKGROUND, module.ALONE_MAX)
    turns.served(BACKGROUND, 1_000_000, 0.0)
    had = serve(turns, 100)
    assert had == list(LANE_WEIGHTS)


def test_a_lane_that_was_not_served_for_too_long_is_next() -> None:
    turns = LaneTurns((1000, 1, 1, 1, 1), BOOST_S, 0.0)
    assert turns.choose(ALL, 0.0)[0] == CRITICAL
    turns.served(CRITICAL, 1, 29.0)
    assert turns.choose(ALL, 29.0)[0] == CRITICAL
    turns.served(CRITICAL, 1, 29.0)
    # High has waited as long as the others, and stands before them.
    assert turns.choose(ALL, 30.0) == (HIGH, 1)
    turns.served(HIGH, 1, 30.0)
    served = [turns.last_served[HIGH]]
    for lane in (NORMAL, LOW, BACKGROUND):
        assert turns.choose(ALL, 30.0)[0] == lane
        turns.served(lane, 1, 30.0)
        served.append(turns.last_served[lane])
    assert served == [30.0] * 4
    assert turns.choose(ALL, 30.0)[0] == CRITICAL


def test_an_empty_lane_does_not_gather_a_right_to_be_boosted() -> None:
    turns = LaneTurns((1000, 1, 1, 1, 1), BOOST_S, 0.0)
    without = [True, True, True, True, False]
    for second in range(0, 60, 10):
        lane, _ = turns.choose(without, second)
        turns.served(lane, 1, second)
    assert turns.choose(ALL, 60.0)[0] != BACKGROUND


def test_a_choice_that_gave_nothing_is_no_service() -> None:
    turns = LaneTurns(LANE_WEIGHTS, BOOST_S, 0.0)
    turns.choose(ALL, 0.0)
    turns.served(CRITICAL, 0, 5.0)
    assert turns.last_served[CRITICAL] is None
    assert turns.choose(ALL, 0.0) == (CRITICAL, 50)


@given(
    weights=st.lists(st.integers(1, 1000), min_size=LANE_COUNT, max_size=LANE_COUNT),
    step_s=st.floats(0.001, 10.0),
    seed=st.integers(0, 1 << 30),
)
def test_nothing_starves_whatever_the_weights_and_however_slow_the_workers(
    weights: list[int], step_s: float, seed: int
) -> None:
    """A lane that always has records is served at least every boost, and a step for each lane."""
    random = Random(seed)
    turns = LaneTurns(weights, BOOST_S, 0.0)
    watched = random.randrange(LANE_COUNT)
    served_s = now_s = 0.0
    for _ in range(300):
        now_s += step_s
        has = [lane == watched or random.random() < 0.8 for lane in range(LANE_COUNT)]
        lane, most = turns.choose(has, now_s)
        assert has[lane]
        assert most >= 1
        count = random.randint(1, most) if random.random() < 0.5 else 1
        turns.served(lane, count, now_s)
        if lane == watched:
            served_s = now_s
        assert now_s - served_s <= BOOST_S + LANE_COUNT * step_s


@pytest.mark.parametrize("lane", range(LANE_COUNT))
def test_the_lane_of_a_batch_is_in_its_attributes(lane: int) -> None:
    batch = batches.encode([(0, None, b"v", ())], lane=LANES[lane])
    assert lane_of(batches.read_header(batch).attributes) == lane


def test_a_batch_without_a_hint_or_with_an_unknown_one_is_normal() -> None:
    assert lane_of(0) == NORMAL
    assert lane_of(0x0700) == NORMAL


# ---- what groups do to each other, and to themselves


def test_lanes_that_are_never_used_do_not_keep_an_index_from_forgetting() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUNS_MAX", 100)
        patch.setattr(module, "CUT_RUNS_MIN", 1)
        house = memory_house()
        house.done(house.broker.topics.create("t", 1))
        house.done(house.broker.topics.use_lanes("t"))
        for n in range(400):
            append(house, CRITICAL if n % 2 else None, 1)
        assert received(house, "idle", 10) == 10
        got = 0
        for _ in range(60):
            got += received(house, "busy", 20)
            house.scheduler.advance(1.1)
        assert got == 400


def received(house: House, group: str, count: int) -> int:
    receiving = house.broker.delivery.receive(group, Receive(("t",), count_max=count))
    records = house.done(receiving.pending).records
    if records:
        house.done(house.broker.delivery.settle([Settle("ack", one.receipt) for one in records]))
    return len(records)
