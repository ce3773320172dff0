"""Persist and load of queues: one instant of a queue, and all of it or nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from faults.simulated_disk import SimulatedDisk
from millstream.broker.queues import Message, Queue, QueueLimits, Queues
from millstream.broker.snapshots import Snapshots, own_file
from millstream.errors import (
    MemoryFull,
    MessageTooLarge,
    QueueFull,
    QueueNameInvalid,
    QueueUnknown,
    SnapshotFailed,
    SnapshotInvalid,
    SnapshotUnknown,
    TooManyQueues,
)
from millstream.log.snapshot import Snapshot, SnapshotFolder

ASKED, OWN = "/data/snapshots", "/data/snapshots/.own"


class Broker:
    """Queues on a disk, as after a start."""

    def __init__(self, disk: SimulatedDisk | None = None, **limits: int) -> None:
        if disk is None:
            disk = SimulatedDisk()
            disk.make_directory("/data")
        self.disk = disk
        self.queues = Queues(QueueLimits(**limits), lambda: 1_700_000_000_000_000)
        self.asked = SnapshotFolder(disk, ASKED)
        self.snapshots = Snapshots(self.queues, self.asked, SnapshotFolder(disk, OWN))

    def queue(self, name: str, *bodies: bytes) -> Queue:
        queue = self.queues.get_or_create(name)
        for body in bodies:
            self.queues.enqueue(queue, body, is_json=False)
        return queue

    def held(self, name: str) -> list[bytes]:
        return [message.body for message in self.queues.get(name).snapshot()]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_a_queue_comes_back_as_it_was() -> None:
    broker = Broker()
    queue = broker.queue("emails", b"1", b"22", b"333")
    before = queue.snapshot()
    done = run(broker.snapshots.persist("emails", "e.snapshot"))
    assert (done.file, done.messages, done.bytes) == ("e.snapshot", 3, 6)
    assert done.file_bytes == len(broker.disk.files()[f"{ASKED}/e.snapshot"])
    broker.queues.clear(queue)
    broker.queue("emails", b"other")
    done = run(broker.snapshots.load("emails", "e.snapshot"))
    assert (done.queue_name, done.messages, done.bytes) == ("emails", 3, 6)
    assert queue.snapshot() == before
    assert (queue.bytes, broker.queues.bytes) == (6, 6)


@pytest.mark.parametrize("file", ["e.snapshot", "e.json"])
def test_persist_and_load_say_the_same_of_a_file(file: str) -> None:
    broker = Broker()
    broker.queue("emails", b"1", b"22")
    written = run(broker.snapshots.persist("emails", file))
    assert run(broker.snapshots.load("emails", file)) == written
    assert written.file_bytes == len(broker.disk.files()[f"{ASKED}/{file}"])


@pytest.mark.parametrize("name", [".hidden", "...", "x" * 255])
def test_every_queue_has_a_file_of_its_own_by_default(name: str) -> None:
    broker = Broker()
    broker.queue(name, b"1")
    done = run(broker.snapshots.persist(name, None))
    assert run(broker.snapshots.load(name, None)) == done


def test_without_a_name_the_file_is_called_like_the_queue() -> None:
    broker = Broker()
    broker.queue("emails", b"1")
    assert run(broker.snapshots.persist("emails", None)).file == "emails.snapshot"
    assert run(broker.snapshots.load("emails", None)).messages == 1


def test_an_empty_name_is_not_a_missing_one() -> None:
    broker = Broker()
    broker.queue("emails")
    for call in (broker.snapshots.persist, broker.snapshots.load):
        with pytest.raises(SnapshotInvalid):
            run(call("emails", ""))


def test_what_is_not_there_is_unknown() -> None:
    broker = Broker()
    with pytest.raises(QueueUnknown):
        run(broker.snapshots.persist("emails", None))
    with pytest.raises(SnapshotUnknown):
        run(broker.snapshots.load("emails", None))
    with pytest.raises(QueueNameInvalid):
        run(broker.snapshots.load("a b", None))
    assert len(broker.queues) == 0


class SlowFolder(SnapshotFolder):
    """Waits in its thread until it is told to go on."""

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        super().__init__(disk, path)
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def write(self, name: str, snapshot: Snapshot) -> int:
        self.begun.set()
        assert self.go_on.wait(30)
        return super().write(name, snapshot)


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


def test_a_queue_stays_usable_and_the_file_holds_one_instant_of_it() -> None:
    broker = Broker()
    broker.queue("q", b"1", b"2", b"3")
    slow = SlowFolder(broker.disk, ASKED)
    snapshots = Snapshots(broker.queues, slow, slow)

    async def scenario() -> None:
        persisting = asyncio.create_task(snapshots.persist("q", None))
        await until(slow.begun)
        # The writer stands still, the queue does not.
        queue = broker.queue("q", b"4", b"5")
        assert [m.body for m in broker.queues.dequeue(queue, 2)] == [b"1", b"2"]
        slow.go_on.set()
        assert (await persisting).messages == 3
        assert broker.held("q") == [b"3", b"4", b"5"]
        await snapshots.load("q", None)
        assert broker.held("q") == [b"1", b"2", b"3"]

    run(scenario())


def test_a_cancelled_persist_does_not_let_two_write_at_once() -> None:
    broker = Broker()
    broker.queue("q", b"1")
    slow = SlowFolder(broker.disk, ASKED)
    snapshots = Snapshots(broker.queues, slow, slow)

    async def scenario() -> None:
        first = asyncio.create_task(snapshots.persist("q", None))
        await until(slow.begun)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        broker.queue("q", b"2")
        second = asyncio.create_task(snapshots.persist("q", None))
        await asyncio.sleep(0.01)
        assert not second.done()
        slow.go_on.set()
        assert (await second).messages == 2
        assert (await snapshots.load("q", None)).messages == 2

    run(scenario())


def test_load_of_more_than_the_capacity_leaves_the_queue_as_it_was() -> None:
    broker = Broker()
    broker.queue("large", b"1", b"2", b"3")
    run(broker.snapshots.persist("large", "l"))
    run(broker.snapshots.persist("large", "l.json"))
    broker.queue("small", b"x")
    for capacity, bytes_max in ((2, 100), (100, 2)):
        broker.queues.configure("small", capacity, bytes_max)
        for file in ("l", "l.json"):
            with pytest.raises(QueueFull):
                run(broker.snapshots.load("small", file))
            assert broker.held("small") == [b"x"]
    assert broker.queues.bytes == 4


def test_limits_that_shrink_while_a_file_is_read_still_hold() -> None:
    broker = Broker()
    broker.queue("q", b"1", b"2")
    run(broker.snapshots.persist("q", None))

    class Shrinking(SnapshotFolder):
        def read(self, name: str, check_room: Any) -> Snapshot:
            found = super().read(name, check_room)
            broker.queues.configure("q", 1, None)
            return found

    shrinking = Shrinking(broker.disk, ASKED)
    with pytest.raises(QueueFull):
        run(Snapshots(broker.queues, shrinking, shrinking).load("q", None))
    assert broker.held("q") == [b"1", b"2"]


def test_load_keeps_the_limits_of_the_broker() -> None:
    first = Broker()
    first.queue("q", b"12345", b"6")
    run(first.snapshots.persist("q", None))
    for limits, error in (
        ({"total_bytes_max": 5}, QueueFull),
        ({"message_bytes_max": 4}, MessageTooLarge),
        ({"queues_max": 1}, TooManyQueues),
    ):
        broker = Broker(first.disk, **limits)
        broker.queue("other")
        with pytest.raises(error):
            run(broker.snapshots.load("q", None))
        assert [queue.name for queue in broker.queues] == ["other"]
    broker = Broker(first.disk, total_bytes_max=7)
    broker.queue("other", b"12")
    with pytest.raises(MemoryFull):
        run(broker.snapshots.load("q", None))
    assert [queue.name for queue in broker.queues] == ["other"]


def test_a_damaged_file_leaves_the_queue_as_it_was() -> None:
    broker = Broker()
    broker.queue("q", b"1")
    run(broker.snapshots.persist("q", None))
    content = broker.disk.files()[f"{ASKED}/q.snapshot"]
    broker.disk.put(f"{ASKED}/q.snapshot", content[:-1] + b"?")
    broker.queue("q", b"2")
    with pytest.raises(SnapshotInvalid):
        run(broker.snapshots.load("q", None))
    assert broker.held("q") == [b"1", b"2"]


def test_a_queue_that_is_made_by_a_load_has_its_old_limits() -> None:
    first = Broker()
    first.queues.configure("q", 7, 70)
    run(first.snapshots.persist("q", None))
    broker = Broker(first.disk)
    run(broker.snapshots.load("q", None))
    queue = broker.queues.get("q")
    assert (queue.capacity, queue.bytes_max) == (7, 70)


class Waiting:
    count_max = 1

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def take(self, messages: list[Message]) -> None:
        self.got += [message.body for message in messages]


def test_who_waits_is_served_from_what_is_loaded() -> None:
    broker = Broker()
    queue = broker.queue("q", b"1", b"2")
    run(broker.snapshots.persist("q", None))
    broker.queues.clear(queue)
    waiting = Waiting()
    broker.queues.wait(queue, waiting)
    run(broker.snapshots.load("q", None))
    assert (waiting.got, broker.held("q")) == ([b"1"], [b"2"])


# ---- by the broker itself


def test_all_queues_outlive_a_restart() -> None:
    first = Broker()
    long = "x" * 255
    first.queue("emails", b"1", b"2")
    first.queue(".hidden", b"3")
    first.queue(long, b"4")
    first.queues.configure("emails", 5, 50)

    async def scenario(broker: Broker) -> None:
        await broker.snapshots.restore()
        await broker.snapshots.keep()

    run(scenario(first))
    broker = Broker(first.disk)
    restored, refused = run(broker.snapshots.restore())
    assert refused == []
    assert {one.queue_name: one.messages for one in restored} == {
        "emails": 2,
        ".hidden": 1,
        long: 1,
    }
    assert broker.held("emails") == [b"1", b"2"]
    assert broker.queues.get("emails").capacity == 5


def restarted(first: Broker, **limits: int) -> Broker:
    async def scenario(broker: Broker) -> None:
        await broker.snapshots.restore()
        await broker.snapshots.keep()

    run(scenario(first))
    return Broker(first.disk, **limits)


def test_limits_that_somebody_asked_for_outlive_a_restart_also_of_a_queue_that_is_there() -> None:
    first = Broker()
    first.queue("default", b"1")
    first.queues.configure("default", 5, 50)
    broker = restarted(first)
    default = broker.queue("default")
    run(broker.snapshots.restore())
    assert (default.capacity, default.bytes_max) == (5, 50)
    assert broker.held("default") == [b"1"]


def test_limits_that_nobody_asked_for_are_those_of_the_settings_now() -> None:
    first = Broker(capacity=10)
    first.queue("q", b"1")
    first.queues.configure("q", None, 50)
    broker = restarted(first, capacity=20, bytes_max=70)
    run(broker.snapshots.restore())
    queue = broker.queues.get("q")
    assert (queue.capacity, queue.bytes_max) == (20, 50)


def test_a_restart_with_smaller_limits_takes_nothing_away() -> None:
    first = Broker()
    first.queue("q", b"1", b"2", b"33")
    broker = restarted(first, capacity=1, bytes_max=1, message_bytes_max=1)
    restored, refused = run(broker.snapshots.restore())
    assert ([one.messages for one in restored], refused) == ([3], [])
    assert broker.held("q") == [b"1", b"2", b"33"]
    with pytest.raises(QueueFull):
        broker.queue("q", b"4")


def test_a_restart_keeps_within_the_memory_of_all_queues() -> None:
    first = Broker()
    first.queue("q", b"12345")
    broker = restarted(first, total_bytes_max=4)
    restored, refused = run(broker.snapshots.restore())
    assert (restored, len(refused)) == ([], 1)
    assert broker.queues.bytes == 0


def test_only_what_changed_is_written_again() -> None:
    broker = Broker()

    async def kept() -> list[str]:
        return [one.queue_name for one in await broker.snapshots.keep()]

    async def scenario() -> None:
        await broker.snapshots.restore()
        first, second = broker.queue("a", b"1"), broker.queue("b", b"2")
        assert await kept() == ["a", "b"]
        assert await kept() == []
        broker.queues.enqueue(first, b"3", is_json=False)
        assert await kept() == ["a"]
        message = broker.queues.dequeue(second, 1)
        assert await kept() == ["b"]
        broker.queues.put_back(second, message)
        assert await kept() == ["b"]
        broker.queues.configure("a", 9, None)
        assert await kept() == ["a"]
        broker.queues.clear(first)
        assert await kept() == ["a"]
        # The same numbers under the same name, and yet another queue.
        broker.queues.delete("b")
        broker.queue("b", b"x")
        assert await kept() == ["b"]

    run(scenario())
    again = Broker(broker.disk)
    run(again.snapshots.restore())
    assert (again.held("a"), again.held("b")) == ([], [b"x"])


def test_a_queue_that_is_gone_stays_gone_but_not_what_somebody_persisted() -> None:
    broker = Broker()

    async def scenario() -> None:
        await broker.snapshots.restore()
        broker.queue("q", b"1")
        await broker.snapshots.persist("q", None)
        await broker.snapshots.keep()
        broker.queues.delete("q")
        await broker.snapshots.keep()

    run(scenario())
    assert list(broker.disk.files()) == [f"{ASKED}/q.snapshot"]


def test_nothing_is_kept_before_the_old_was_restored() -> None:
    first = Broker()

    async def scenario() -> None:
        await first.snapshots.restore()
        first.queue("q", b"1")
        await first.snapshots.keep()

    run(scenario())
    before = first.disk.files()
    failed = Broker(first.disk)
    failed.queue("default")
    assert run(failed.snapshots.keep()) == []
    assert first.disk.files() == before


def test_a_file_that_cannot_be_restored_is_kept_and_the_others_are_restored() -> None:
    first = Broker()

    async def scenario(broker: Broker) -> Any:
        found = await broker.snapshots.restore()
        broker.queue("good", b"1")
        broker.queue("bad", b"2")
        await broker.snapshots.keep()
        return found

    run(scenario(first))
    path = f"{OWN}/{own_file('bad')}"
    damaged = first.disk.files()[path][:-1] + b"?"
    first.disk.put(path, damaged)
    broker = Broker(first.disk)
    restored, refused = run(scenario(broker))
    assert [one.queue_name for one in restored] == ["good"]
    assert [one.file for one in refused] == [own_file("bad")]
    assert broker.disk.files()[path + ".refused"] == damaged


def test_a_disk_that_fails_at_an_interval_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    broker.queue("q", b"1")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    async def scenario() -> None:
        await broker.snapshots.restore()
        with monkeypatch.context() as broken:
            broken.setattr(broker.disk, "sync", fail)
            with pytest.raises(SnapshotFailed):
                await broker.snapshots.keep()
        assert len(await broker.snapshots.keep()) == 1

    run(scenario())
