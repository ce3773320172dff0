"""The plug is pulled while topics are made, changed, purged and deleted, and written to.

After any crash a topic is what it was before the change that was under way, or after it; it has
no record of an earlier topic of its name, no neighbour has lost one; what was published with an
idempotency key is there once, and a repeat is told where.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.publishing import Outgoing, Placed, Published
from millstream.broker.topics import Topic
from millstream.engine.pending import Pending
from millstream.errors import TopicUnknown

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"
NAMES = ("a", "b", "c")


@dataclass
class Sent:
    """A publish with a key: where it went, once that is known."""

    key: str
    value: bytes
    placed: list[Placed] | None = None


@dataclass
class Fate:
    """What is known of a name. `now` is acknowledged; `maybe` is what a change will make of it."""

    now: Topic | None = None
    is_changing: bool = False
    maybe: dict[str, object] | None = None
    is_purging: bool = False
    sent: list[Sent] = field(default_factory=list)


class Script:
    def __init__(self, seed: int, every: int) -> None:
        self.random = Random(seed)
        self.every = every
        self.disk = SimulatedDisk()
        self.house = local_house(self.disk).start()
        self.fates = {name: Fate() for name in NAMES}
        self.changes = 0
        self.serial = 0
        self.pulled = 0
        self.repeats = 0
        # Kept, because it is raised inside the engine, which may take it for an error of a job.
        self.trouble: BaseException | None = None

    def run(self, steps: int) -> None:
        self.disk.on_operation = self._before
        try:
            for _ in range(steps):
                self._step()
        finally:
            self.disk.on_operation = None
            if self.trouble is not None:
                raise self.trouble
        self.house.scheduler.run()
        assert not any(fate.is_changing for fate in self.fates.values())
        self._check(self.disk.crash("nothing"), "at the end")

    # ---- doing

    def _step(self) -> None:
        name = self.random.choice(NAMES)
        fate, kind = self.fates[name], self.random.random()
        if kind < 0.2:
            for _ in range(self.random.randint(1, 8)):
                self.house.scheduler.turn()
        elif kind < 0.25:
            self.house.scheduler.advance(self.random.choice((0.5, 5.0, 70.0)))
        elif fate.is_changing:
            self.house.scheduler.turn()
        elif fate.now is None:
            self._create(name, fate)
        elif kind < 0.8:
            self._publish(name, fate)
        else:
            self._change(name, fate, fate.now)

    def _create(self, name: str, fate: Fate) -> None:
        given = {"fsync": self.random.choice(("every", "interval", "none"))}
        count = self.random.randint(1, 3)
        fate.maybe = {"given": given, "partitions": count}
        self._watch(fate, self.house.broker.topics.create(name, count, given), lambda one: one)

    def _change(self, name: str, fate: Fate, topic: Topic) -> None:
        topics, kind = self.house.broker.topics, self.random.choice(("alter", "grow", "purge", "-"))
        if kind == "alter":
            given = {"retention_ms": self.random.randint(10**8, 10**9)}
            fate.maybe = {"given": {**topic.given, **given}}
            self._watch(fate, topics.alter(name, given), lambda topic: topic)
        elif kind == "grow":
            fate.maybe = {"partitions": topic.partitions + 1}
            self._watch(fate, topics.add_partitions(name, topic.partitions + 1), lambda one: one)
        elif kind == "purge":
            fate.is_purging = True
            self._watch(fate, topics.purge(name), lambda _: self._purged(fate))
        else:
            fate.maybe = {}
            self._watch(fate, topics.delete(name), lambda _: self._deleted(fate))

    def _purged(self, fate: Fate) -> Topic | None:
        fate.is_purging = False
        fate.sent.clear()
        return fate.now

    def _deleted(self, fate: Fate) -> None:
        fate.sent.clear()

    def _watch(
        self, fate: Fate, pending: Pending[Any], after: Callable[[Any], Topic | None]
    ) -> None:
        fate.is_changing = True
        self.changes += 1

        def done(pending: Pending[Any]) -> None:
            self.trouble = self.trouble or pending.error
            fate.now = after(pending.result())
            fate.is_changing, fate.maybe = False, None

        pending.then(done)

    def _publish(self, name: str, fate: Fate) -> None:
        assert fate.now is not None
        if fate.sent and self.random.random() < 0.3:
            sent = self.random.choice(fate.sent)
            self.repeats += 1
        else:
            self.serial += 1
            sent = Sent(f"key-{self.serial}", f"{fate.now.uuid} {self.serial}".encode())
            fate.sent.append(sent)
        self._send(self.house, name, sent).then(lambda one: self._published(sent, one))

    def _send(self, house: House, name: str, sent: Sent) -> Pending[Published]:
        records = [Outgoing(b"%d" % n, sent.value) for n in range(3)]
        return house.broker.publisher.publish(name, records, idempotency_key=sent.key)

    def _published(self, sent: Sent, one: Pending[Published]) -> None:
        if isinstance(one.error, TopicUnknown):
            # Deleted meanwhile.
            return
        self.trouble = self.trouble or one.error
        placed = one.result().placed
        assert sent.placed in (None, placed)
        sent.placed = placed

    # ---- checking

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        disk = survivor(self.disk, way, Random(seed))
        try:
            self._check(disk, f"before operation {index}, {name}: {way}, {seed=}")
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str) -> None:
        self.pulled += 1
        try:
            house = local_house(disk, now_ms=self.house.scheduler.clock.now_ms).start()
            topics = house.broker.topics
            assert set(topics.names()) <= set(NAMES)
            known = {topic.uuid.bytes for topic in topics.by_name.values()}
            assert {key for key, _ in topics._view.entries()} <= known
            for name, fate in self.fates.items():
                self._check_topic(house, topics.by_name.get(name), fate)
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_topic(self, house: House, topic: Topic | None, fate: Fate) -> None:
        if topic is None:
            # Never made, or deleted, or on the way to one of these.
            assert fate.now is None or fate.maybe == {}
            return
        if fate.now is None:
            assert fate.maybe
            assert (topic.given, topic.partitions) == (
                fate.maybe["given"],
                fate.maybe["partitions"],
            )
        else:
            assert topic.uuid == fate.now.uuid
            maybe = {"given": fate.now.given, "partitions": fate.now.partitions}
            maybe |= fate.maybe or {}
            assert topic.given in (fate.now.given, maybe["given"])
            assert topic.partitions in (fate.now.partitions, maybe["partitions"])
        self._check_records(house, topic, fate)

    def _check_records(self, house: House, topic: Topic, fate: Fate) -> None:
        reader, places = house.broker.reader, dict[bytes, int]()
        for number in range(topic.partitions):
            start = reader.offsets(topic.name, number).start
            for record in house.done(
                reader.fetch(topic.name, number, start, 10**6, 1 << 30)
            ).records:
                assert (record.value or b"").startswith(str(topic.uuid).encode())
                places[record.value or b""] = places.get(record.value or b"", 0) + 1
        if fate.is_purging:
            return
        for sent in fate.sent:
            count = places.get(sent.value, 0)
            assert count in ((3,) if sent.placed is not None else (0, 3)), sent
            again = house.done(self._send(house, topic.name, sent))
            assert again.is_duplicate == (count == 3)
            assert sent.placed in (None, again.placed)


@pytest.mark.parametrize("seed", range(60 if IS_FULL else 3))
def test_the_plug_is_pulled_while_topics_change(seed: int) -> None:
    script = Script(seed, every=12)
    script.run(500)
    assert script.pulled > 50
    assert script.changes > 40
    assert script.repeats > 10
