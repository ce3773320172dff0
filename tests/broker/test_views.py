"""Views: one append a turn, durable before it is told, undone when it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from broker.making import House, RefusingDisk, local_house, memory_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.views import BATCH_BYTES, Change, Views, encoded
from millstream.engine.memory import MemoryEngine
from millstream.engine.pending import Pending
from millstream.errors import DiskFull, LogDamaged, MillstreamError
from millstream.log import batch as batches
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from millstream.engine.protocol import Engine
    from millstream.log.segment import Chunk


class Map:
    """The plainest view there is."""

    def __init__(self, name: str = "map") -> None:
        self.name = name
        self.partition = PartitionId(f"__{name}", 0)
        self.values: dict[bytes, bytes] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def value_of(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def entries(self) -> Iterable[Change]:
        return list(self.values.items())


class Desk:
    """Views on a local log whose disk can be full."""

    def __init__(self) -> None:
        self.disks: list[RefusingDisk] = []

        def through(disk: SimulatedDisk) -> RefusingDisk:
            self.disks.append(RefusingDisk(disk))
            return self.disks[-1]

        self.house = local_house(through=through)  # type: ignore[arg-type]
        self.map, self.other = Map(), Map("other")
        self.views = self.house.broker.views
        self.views.add(self.map)
        self.views.add(self.other)
        self.house.start()

    @property
    def is_full(self) -> bool:
        return self.disks[0].is_full

    @is_full.setter
    def is_full(self, value: bool) -> None:
        self.disks[0].is_full = value


def with_map() -> tuple[House, Views, Map]:
    house = memory_house()
    engine, view = house.engine, Map()
    views = Views(engine, house.scheduler.clock, house.scheduler)
    views.add(view)
    house.done(views.load())
    return house, views, view


def replayed(house: House, name: str = "map") -> dict[bytes, bytes]:
    """What a view would have after a restart."""
    view = Map(name)
    views = Views(house.engine, house.scheduler.clock, house.scheduler)
    views.add(view)
    house.done(views.load())
    return view.values


def test_a_change_is_seen_at_once_and_told_when_durable() -> None:
    house, views, view = with_map()
    pending = views.change(view, [(b"a", b"1")])
    assert view.values == {b"a": b"1"}
    assert not pending.is_done
    house.done(pending)
    assert replayed(house) == {b"a": b"1"}


def test_changes_of_one_turn_are_one_append_whatever_their_views() -> None:
    house = memory_house()
    assert isinstance(house.engine, MemoryEngine)
    one, two = Map("one"), Map("two")
    views = Views(house.engine, house.scheduler.clock, house.scheduler)
    views.add(one)
    views.add(two)
    house.done(views.load())
    before = house.engine.appends
    pendings = [views.change(one, [(b"%d" % n, b"x")]) for n in range(20)]
    pendings += [views.change(two, [(b"a", b"y")])]
    for pending in pendings:
        house.done(pending)
    assert house.engine.appends == before + 1
    assert replayed(house, "one") == one.values
    assert replayed(house, "two") == two.values


def test_the_last_change_of_a_key_in_a_turn_counts() -> None:
    house, views, view = with_map()
    views.change(view, [(b"a", b"1"), (b"b", b"1")])
    views.change(view, [(b"a", None)])
    house.done(views.change(view, [(b"b", b"2")]))
    assert view.values == replayed(house) == {b"b": b"2"}
    end = house.engine.offsets(view.partition).high_watermark
    assert end == 2


def test_a_turn_of_many_changes_is_several_batches() -> None:
    house, views, view = with_map()
    value = b"x" * (BATCH_BYTES // 3)
    house.done(views.change(view, [(b"%d" % n, value) for n in range(10)]))
    chunk = house.done(house.engine.read(view.partition, 0, 1 << 24))
    assert len(batches.walk(chunk.data)) == 5
    assert replayed(house) == view.values


def test_settled_waits_for_what_is_under_way_and_for_nothing_else() -> None:
    house, views, view = with_map()
    assert views.settled(view).is_done
    other = Map("other")
    views.add(other)
    views.change(view, [(b"a", b"1")])
    settled = views.settled(view)
    assert views.settled(other).is_done
    assert not settled.is_done
    # Handed to the engine, and not durable yet.
    house.scheduler.turn()
    assert not views.settled(view).is_done
    house.done(settled)
    assert views.settled(view).is_done


def test_a_refused_change_is_undone_before_it_is_told() -> None:
    desk = Desk()
    desk.house.done(desk.views.change(desk.map, [(b"a", b"old"), (b"gone", b"x")]))
    desk.is_full = True
    refused = desk.views.change(desk.map, [(b"a", b"new"), (b"b", b"new"), (b"gone", None)])
    reader = desk.views.settled(desk.map)
    assert desk.map.values == {b"a": b"new", b"b": b"new"}
    error = desk.house.failed(refused)
    assert isinstance(error, DiskFull)
    assert desk.map.values == {b"a": b"old", b"gone": b"x"}
    # Who read what is gone now must not answer from it.
    assert reader.error is error
    desk.is_full = False
    desk.house.done(desk.views.change(desk.map, [(b"c", b"1")]))
    assert desk.map.values == replayed(desk.house) == {b"a": b"old", b"gone": b"x", b"c": b"1"}


def test_a_refusal_undoes_the_views_of_its_turn_and_no_later_change() -> None:
    desk = Desk()
    desk.house.done(desk.views.change(desk.map, [(b"a", b"0"), (b"b", b"0")]))
    desk.is_full = True
    first = desk.views.change(desk.map, [(b"a", b"1"), (b"b", b"1")])
    desk.views.change(desk.other, [(b"o", b"1")])
    # The end of the turn hands it to the engine, which has not written it yet.
    desk.house.scheduler.turn()
    second = desk.views.change(desk.map, [(b"a", b"2")])
    fooled, unconcerned = desk.views.settled(desk.map), desk.views.settled(desk.other)
    while not first.is_done:
        assert desk.house.scheduler.turn()
    assert desk.map.values == {b"a": b"2", b"b": b"0"}
    assert desk.other.values == {}
    assert fooled.error is unconcerned.error is first.error
    desk.is_full = False
    desk.house.done(second)
    assert desk.map.values == replayed(desk.house) == {b"a": b"2", b"b": b"0"}


def test_refusals_one_after_the_other_lead_back_to_what_is_durable() -> None:
    desk = Desk()
    desk.house.done(desk.views.change(desk.map, [(b"a", b"0")]))
    desk.is_full = True
    pendings = []
    for value in (b"1", None, b"2"):
        pendings.append(desk.views.change(desk.map, [(b"a", value)]))
        desk.house.scheduler.turn()
    for pending in pendings:
        desk.house.failed(pending)
    assert desk.map.values == {b"a": b"0"}


def test_a_change_with_batches_is_one_atomic_append() -> None:
    house, views, view = with_map()
    house.done(house.engine.create("t", 1, PartitionSettings()))
    entry = encoded(PartitionId("t", 0), [(0, None, b"v", ())])
    earlier = views.change(view, [(b"k", b"0")])
    offsets = house.done(views.change_with(view, [(b"k", b"1")], [entry, entry]))
    assert offsets == [0, 1]
    assert earlier.is_done
    assert replayed(house) == {b"k": b"1"}
    # Refused whole: an entry that cannot be appended takes the change with it.
    bad = views.change_with(view, [(b"k", b"2")], [entry._replace(id=PartitionId("nowhere", 0))])
    assert isinstance(house.failed(bad), MillstreamError)
    assert view.values == replayed(house) == {b"k": b"1"}


def test_a_view_is_loaded_in_steps_that_let_others_run() -> None:
    house, views, view = with_map()
    value = b"x" * 100_000
    for n in range(60):
        house.done(views.change(view, [(b"%d" % n, value)]))
    again = Map()
    loading = Views(house.engine, house.scheduler.clock, house.scheduler)
    loading.add(again)
    pending = loading.load()
    turns = 0
    while not pending.is_done:
        assert house.scheduler.turn()
        turns += 1
    assert turns > 3
    assert again.values == view.values


class Damaged:
    """An engine that lost the first offsets of a partition."""

    def __init__(self, engine: Engine, lost: int) -> None:
        self._engine = engine
        self._lost = lost

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Chunk]:
        if offset < self._lost:
            return Pending.failed(LogDamaged("lost", first=0, last=self._lost - 1))
        return self._engine.read(id, offset, bytes_max)


def test_a_view_goes_on_after_what_is_damaged() -> None:
    house, views, view = with_map()
    for n in range(10):
        house.done(views.change(view, [(b"%d" % n, b"v")]))
    again = Map()
    loading = Views(
        cast("Engine", Damaged(house.engine, 4)), house.scheduler.clock, house.scheduler
    )
    loading.add(again)
    with capture_logs() as logs:
        house.done(loading.load())
    assert sorted(again.values) == [b"%d" % n for n in range(4, 10)]
    assert [(one["event"], one["view"]) for one in logs] == [
        ("a view lost changes to damage", "map")
    ]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_snapshot_is_loaded_and_the_log_after_it(is_deleted: bool) -> None:
    desk = Desk()
    value = b"x" * 200_000
    # More than one segment, so that there is something sealed.
    for n in range(60):
        desk.house.done(desk.views.change(desk.map, [(b"%d" % (n % 7), value), (b"%d!" % n, b"")]))
    desk.house.done(desk.views.change(desk.map, [(b"5!", None), (b"z", b"last")]))
    offset = desk.house.done(desk.house.engine.save_view(desk.map.partition, "map"))
    assert offset is not None
    assert 0 < offset < desk.house.engine.offsets(desk.map.partition).high_watermark
    # Nothing is new.
    assert desk.house.done(desk.house.engine.save_view(desk.map.partition, "map")) is None
    (path,) = [path for path in desk.disks[0]._disk.files() if path.startswith("/data/views/map/")]
    if is_deleted:
        desk.disks[0]._disk.unlink(path)
    assert replayed(desk.house) == desk.map.values
