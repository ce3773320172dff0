"""What is done for every append; each test on both twins."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections import deque
from types import ModuleType
from typing import Any

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, Sender, batch, header_of
from millstream.engine import _appends_pure, appends
from millstream.errors import DiskFull
from millstream.log.partition import Partition, PartitionId, PartitionSettings

PURE: ModuleType = _appends_pure
COMPILED: ModuleType | None
try:
    COMPILED = importlib.import_module("millstream.engine._appends")
except ImportError:
    COMPILED = None

# Compiled appends want compiled partitions.
is_pure = os.environ.get("MILLSTREAM_PURE", "") not in ("", "0") or COMPILED is None
both_twins = pytest.mark.parametrize(
    "twin",
    [
        pytest.param(PURE, id="pure"),
        pytest.param(
            COMPILED,
            id="compiled",
            marks=pytest.mark.skipif(is_pure, reason="the compiled twin is not used"),
        ),
    ],
)


class Note:
    """Any operation that is no append."""

    size = 7


def new_partition(fsync: str = "every", number: int = 0) -> Partition:
    disk = SimulatedDisk()
    disk.make_directory("/p")
    settings = PartitionSettings(fsync=fsync)  # type: ignore[arg-type]
    partition = Partition(
        disk,
        "/p",
        id=PartitionId("t", number),
        uuid=bytes(16),
        settings=settings,
        leader_epoch=1,
    )
    partition.start_empty(NOW_MS)
    partition.epochs.append((1, 0))
    return partition


def new_append(twin: Any, partition: Partition, data: bytes = batch(b"a")) -> Any:
    return twin.Append(partition, data, header_of(data))


def place(twin: Any, operations: list[Any], first: int = 0) -> tuple[int, Any, Any, Any]:
    marks: dict[Any, Any] = {}
    journalled: dict[Any, Any] = {}
    entries: list[Any] = []
    end = twin.place(operations, first, NOW_MS, marks, journalled=journalled, entries=entries)
    return end, marks, journalled, entries


def test_the_compiled_twin_is_taken_unless_the_pure_one_is_asked_for() -> None:
    assert ("pure" if is_pure else "compiled") == appends.IMPLEMENTATION
    twin = PURE if is_pure else COMPILED
    assert twin is not None
    assert appends.Pending is twin.Pending


# ---- a result


@both_twins
def test_callbacks_are_called_once_in_their_order_and_later_ones_at_once(twin: Any) -> None:
    pending = twin.Pending()
    called: list[str] = []
    for name in ("one", "two", "three"):
        pending.then(lambda done, name=name: called.append(f"{name} {done.result()}"))
    assert not pending.is_done
    pending.succeed(5)
    assert called == ["one 5", "two 5", "three 5"]
    pending.succeed(6)
    pending.fail(DiskFull("full"))
    pending.then(lambda done: called.append(f"four {done.result()}"))
    assert called[3:] == ["four 5"]
    assert pending.is_done
    assert pending.error is None


@both_twins
def test_an_error_is_raised_where_the_result_is_asked_for(twin: Any) -> None:
    for pending in (twin.Pending(), twin.Pending.failed(DiskFull("full"))):
        pending.fail(DiskFull("full"))
        pending.succeed(1)
        assert isinstance(pending.error, DiskFull)
        with pytest.raises(DiskFull):
            pending.result()
    with pytest.raises(AssertionError, match="not there yet"):
        twin.Pending().result()


@both_twins
def test_a_callback_that_fails_stops_neither_the_others_nor_who_completes(twin: Any) -> None:
    pending = twin.Pending[int]()
    called: list[int] = []
    pending.then(lambda _: 1 / 0)
    pending.then(lambda done: called.append(done.result()))
    pending.succeed(3)
    assert called == [3]


@both_twins
def test_it_can_be_awaited_done_or_not(twin: Any) -> None:
    async def wait() -> tuple[int, int]:
        later = twin.Pending()
        asyncio.get_running_loop().call_soon(later.succeed, 2)
        return await twin.Pending.of(1), await later

    assert asyncio.run(wait()) == (1, 2)


# ---- a turn


@both_twins
def test_appends_wait_for_a_round_up_to_the_first_that_need_not(twin: Any) -> None:
    every, none = new_partition(), new_partition("none")
    operations = [new_append(twin, one) for one in (every, every, none, every)]
    queued: deque[Any] = deque()
    assert twin.queue(operations, queued) == 2
    assert list(queued) == operations[:2]
    assert (every.queued, none.queued) == (2, 0)
    # What follows an append that waits must wait too, whatever the mode.
    none.queued = 1
    assert twin.queue(operations[2:], queued) == 2
    assert none.queued == 2
    assert twin.queue([Note()], queued) == 0


@both_twins
def test_sizes_are_those_of_the_batches(twin: Any) -> None:
    partition = new_partition()
    small, large = batch(b"a"), batch(bytes(500))
    operations: list[Any] = [new_append(twin, partition, data) for data in (small, large)]
    assert twin.size_of([*operations, Note()]) == len(small) + len(large) + 7
    assert twin.largest_of([*operations, Note()]) == len(large)
    assert twin.largest_of([Note()]) == 0


# ---- a round


@both_twins
def test_appends_get_their_places_in_order(twin: Any) -> None:
    one, two = new_partition(), new_partition(number=1)
    operations = [new_append(twin, partition) for partition in (one, one, two, one)]
    end, marks, journalled, entries = place(twin, operations)
    assert end == 4
    assert [operation.offset for operation in operations] == [0, 1, 0, 2]
    assert [placed.base_offset for placed in entries] == [0, 1, 0, 2]
    assert [placed.base_offset for placed in journalled[one]] == [0, 1, 2]
    assert list(journalled) == [one, two]
    # All of it can be taken back.
    for partition in (one, two):
        partition.rollback(marks[partition])
        assert (partition.next_offset, partition.tail) == (0, 0)


@both_twins
def test_placing_stops_at_what_needs_more(twin: Any) -> None:
    partition, closed = new_partition(), new_partition(number=1)
    closed.is_closed = True
    plain = new_append(twin, partition)
    others = (
        Note(),
        new_append(twin, closed),
        new_append(twin, partition, batch(b"s", sender=Sender(4))),
    )
    for other in others:
        end, marks, journalled, entries = place(twin, [plain, other, plain])
        assert end == 1
        assert list(marks) == list(journalled) == [partition]
        assert len(entries) == 1
        end, marks, journalled, entries = place(twin, [plain, other, plain], 1)
        assert (end, marks, journalled, entries) == (1, {}, {}, [])


@both_twins
def test_what_is_durable_may_be_seen_and_waits_for_its_segments(twin: Any) -> None:
    one, two = new_partition(), new_partition(number=1)
    operations = [new_append(twin, partition) for partition in (one, two, one)]
    _, _, journalled, _ = place(twin, operations)
    unapplied: dict[Any, None] = {}
    twin.advance(journalled, unapplied)
    assert list(unapplied) == [one, two]
    assert (one.high_watermark, two.high_watermark) == (2, 1)
    assert one.unapplied == journalled[one]
    assert one.visible == (one.active, one.tail)


@both_twins
def test_appends_are_answered_up_to_the_first_that_is_none(twin: Any) -> None:
    partition = new_partition()
    operations: list[Any] = [new_append(twin, partition) for _ in range(3)]
    place(twin, operations)
    partition.queued = 3
    seen: list[tuple[int, int]] = []
    operations[0].pending.then(lambda _: 1 / 0)
    for operation in operations:
        operation.pending.then(lambda done: seen.append((done.result(), partition.queued)))
    operations.insert(2, Note())
    assert twin.answer(operations, 0) == 2
    assert seen == [(0, 1), (1, 1)]
    assert twin.answer(operations, 3) == 4
    assert seen[2:] == [(2, 0)]
