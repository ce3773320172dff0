"""The plug is pulled while dead letters are redriven and deleted.

After any crash, a job that goes on to its end has put back each dead letter that it was for once,
or not yet; nothing is in two places, and nothing that was acknowledged is in none. In a weaker
mode the tail of the dead letters may be lost, and what then gets its offsets is taken for nothing
that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from broker.burying import stored, wish
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.dead_letter_reading import LetterFilter
from millstream.broker.deadletters import DeadFacts, DeadLetter
from millstream.engine.pending import Pending
from millstream.errors import DeadLetterUnknown, RedriveRunning
from millstream.log.batch import LANES, Record

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"
PARTITIONS = 2


def letter(serial: int, partition: int, random: Random) -> DeadLetter:
    facts = DeadFacts("g", 4, random.choice(("deliveries", "rejected")), "bad", 1, 2)
    record = Record(serial, 1, b"k", b"%d" % serial)
    return DeadLetter(partition, record, LANES.index(random.choice(("normal", "high"))), facts)


def listed(house: House) -> dict[int, tuple[int, int]]:
    """The dead letters there are, with their places."""
    reading = house.broker.dead_letter_reading
    page = house.done(reading.list("orders", LetterFilter(), count_max=1000))
    assert page.next is None
    return {
        int(one.record.value or b""): (one.partition, one.record.offset) for one in page.letters
    }


def put_back(house: House) -> list[int]:
    return [int(one.value or b"") for n in range(PARTITIONS) for one in stored(house, "orders", n)]


class Script:
    def __init__(self, seed: int, every: int, mode: str) -> None:
        self.random = Random(seed)
        self.every = every
        self.mode = mode
        self.disk = SimulatedDisk()
        self.house = local_house(self.disk).start()
        self.house.done(self.house.broker.topics.create("orders", PARTITIONS, {"fsync": mode}))
        self.serial = 0
        # Dead letters that are acknowledged, and those that somebody wants to be deleted.
        self.acknowledged: set[int] = set()
        self.doomed: set[int] = set()
        self.deleted: set[int] = set()
        self.redrives = 0
        self.pulled = 0
        self.put_back_after = 0
        self.trouble: BaseException | None = None

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        self.disk.on_operation = self._before
        try:
            for step in steps:
                step()
        finally:
            self.disk.on_operation = None
            if self.trouble is not None:
                raise self.trouble
        self.house.scheduler.run()
        self._check(self.disk.crash("all"), "at the end", "all")

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.35:
            for _ in range(self.random.randint(1, 6)):
                self.house.scheduler.turn()
        elif kind < 0.5:
            self.house.scheduler.advance(self.random.choice((0.1, 0.3, 2.0)))
        elif kind < 0.8:
            self.bury()
        elif kind < 0.92:
            self.redrive()
        else:
            self.delete()

    def bury(self) -> None:
        dead_letters = self.house.broker.dead_letters
        topic = self.house.broker.topics.get("orders")
        dlq = self.house.done(dead_letters.ensure(topic))
        partition = self.random.randrange(PARTITIONS)
        serials = range(self.serial, self.serial + self.random.randint(1, 4))
        self.serial = serials.stop
        letters = [letter(serial, partition, self.random) for serial in serials]
        entries = dead_letters.entries(topic, dlq, letters)

        def done(one: Pending[Any]) -> None:
            if one.error is None:
                self.acknowledged.update(serials)

        self.house.engine.append_atomic(entries).then(done)

    def redrive(self) -> None:
        filters: list[dict[str, Any]] = [{}, {"reason": "rejected"}]
        self.redrive_by(self.random.choice((None, 8, 2)), **self.random.choice(filters))

    def redrive_by(self, rate: int | None, **how: Any) -> None:
        how["rate"] = rate
        begun = self.house.broker.redrive.begin("orders", wish(**how))

        def done(one: Pending[Any]) -> None:
            self.redrives += one.error is None
            if not isinstance(one.error, RedriveRunning | None):
                self.trouble = self.trouble or one.error

        begun.then(done)

    def delete(self) -> None:
        found = sorted(listed(self.house).items())
        if not found:
            return
        serial, place = self.random.choice(found)
        self.doomed.add(serial)

        def done(one: Pending[Any]) -> None:
            if one.error is None:
                self.deleted.add(serial)
            elif not isinstance(one.error, DeadLetterUnknown):
                self.trouble = self.trouble or one.error

        self.house.broker.dead_letter_reading.delete("orders", [place]).then(done)

    # ---- checking

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        disk = survivor(self.disk, way, Random(seed))
        try:
            self._check(disk, f"before operation {index}, {name}: {way}, {seed=}", way)
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str, way: str) -> None:
        self.pulled += 1
        acknowledged, deleted = set(self.acknowledged), set(self.deleted)
        try:
            house = local_house(disk, now_ms=self.house.scheduler.clock.now_ms).start()
            if not house.broker.topics.by_name.get("orders.dlq"):
                assert not acknowledged or self.mode != "every"
                return
            before = self._check_places(house, acknowledged, deleted)
            # Jobs go on, to their end.
            house.scheduler.advance(60)
            house.scheduler.run()
            after = self._check_places(house, acknowledged, deleted)
            self.put_back_after += len(after) - len(before)
            jobs = house.done(house.broker.redrive.jobs())
            assert all(one.progress.state == "done" for one in jobs)
            counts = house.done(house.broker.dead_letter_reading.counts())
            assert sum(one.letters for one in counts) == len(listed(house))
            self._check_going_on(house)
            # And once more: what has been recovered stays.
            again = local_house(house.scheduler.disk.crash("nothing"))  # type: ignore[attr-defined]
            again.start()
            assert sorted(put_back(again)) == sorted(put_back(house))
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_places(self, house: House, acknowledged: set[int], deleted: set[int]) -> list[int]:
        dead, back = listed(house), put_back(house)
        assert len(back) == len(set(back)), "put back twice"
        assert not dead.keys() & set(back), "in two places"
        if self.mode == "every":
            assert acknowledged - self.doomed <= dead.keys() | set(back), "lost"
            assert not deleted & (dead.keys() | set(back)), "deleted and there again"
        return back

    def _check_going_on(self, house: House) -> None:
        """What dies now is a dead letter, whatever its offset was once."""
        dead_letters, topic = house.broker.dead_letters, house.broker.topics.get("orders")
        dlq = house.done(dead_letters.ensure(topic))
        serials = range(1_000_000, 1_000_010)
        letters = [letter(n, n % PARTITIONS, Random(0)) for n in serials]
        house.done(house.engine.append_atomic(dead_letters.entries(topic, dlq, letters)))
        assert set(serials) <= listed(house).keys()
        house.done(house.broker.redrive.begin("orders", wish()))
        assert listed(house) == {}
        back = put_back(house)
        assert set(serials) <= set(back)
        assert len(back) == len(set(back))


@pytest.mark.parametrize("mode", ["every", "none"])
@pytest.mark.parametrize("seed", range(40 if IS_FULL else 2))
def test_the_plug_is_pulled_during_redrives(seed: int, mode: str) -> None:
    script = Script(seed, every=12, mode=mode)
    script.run([script.step] * 200)
    assert script.pulled > 10
    assert script.redrives > 2
    assert script.put_back_after > 0


@pytest.mark.parametrize("mode", ["every", "none"])
def test_the_plug_is_pulled_before_every_disk_operation_of_a_step(mode: str) -> None:
    script = Script(7, every=1, mode=mode)
    scheduler = script.house.scheduler
    steps = [script.delete, lambda: script.redrive_by(8), lambda: scheduler.advance(10)]
    script.run([*[script.bury] * 3, scheduler.run, *steps])
    assert script.pulled > 15
    assert script.put_back_after > 5
    assert listed(script.house) == {}
