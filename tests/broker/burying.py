"""Dead letters for tests, on a loop that the test turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from broker.making import House, memory_house, options
from millstream.broker.dead_letter_reading import Letter, LetterFilter, LetterPage
from millstream.broker.deadletters import DeadFacts, DeadLetter
from millstream.broker.redrive_jobs import JobFacts, RedriveOptions, RedriveWish
from millstream.log import batch as batches
from millstream.log.batch import LANES, Record
from millstream.log.partition import PartitionId

NORMAL = LANES.index("normal")


def house_of(partitions: int = 2, **changes: Any) -> House:
    house = memory_house(replace(options(), redrive=RedriveOptions(**changes)))
    make(house, "orders", partitions)
    return house


def make(house: House, name: str, partitions: int = 2, **settings: object) -> None:
    house.done(house.broker.topics.create(name, partitions, settings))


def bury(
    house: House,
    *values: str,
    topic: str = "orders",
    partition: int = 0,
    key: bytes | None = None,
    lane: str = "normal",
    headers: batches.Headers = (),
    error: str = "no such account",
    group: str = "billing",
    reason: Any = "deliveries",
    when_ms: int = 9_000,
) -> None:
    """Records that died in a topic, as settling leaves them behind."""
    found = house.broker.topics.get(topic)
    facts = DeadFacts(group, 4, reason, error, when_ms - 100, when_ms)
    letters = [
        DeadLetter(partition, Record(n, 123, key, one.encode(), headers), LANES.index(lane), facts)
        for n, one in enumerate(values)
    ]
    dead_letters = house.broker.dead_letters
    dlq = house.done(dead_letters.ensure(found))
    house.done(house.engine.append_atomic(dead_letters.entries(found, dlq, letters)))


def listed(house: House, topic: str = "orders", **wanted: Any) -> LetterPage:
    how = {name: wanted.pop(name) for name in ("count_max", "partition", "at") if name in wanted}
    reading = house.broker.dead_letter_reading
    return house.done(reading.list(topic, LetterFilter(**wanted), **how))


def values_of(letters: list[Letter]) -> list[str]:
    return [(one.record.value or b"").decode() for one in letters]


def left(house: House, topic: str = "orders", **wanted: Any) -> list[str]:
    return values_of(listed(house, topic, **wanted).letters)


def stored(house: House, topic: str = "orders", partition: int = 0) -> list[Record]:
    """What is in a topic itself."""
    id = PartitionId(topic, partition)
    start, end = house.engine.offsets(id)
    found: list[Record] = []
    while start < end:
        chunk = house.done(house.engine.read(id, start, 1 << 26))
        for at, header in batches.walk(chunk.data):
            found += [
                one
                for one in batches.decode(chunk.data[at : at + header.size])
                if one.offset >= start
            ]
        start = chunk.next_offset
    return found


def texts(house: House, topic: str = "orders", partition: int = 0) -> list[str]:
    return [(one.value or b"").decode() for one in stored(house, topic, partition)]


def wish(**how: Any) -> RedriveWish:
    own = {name: how.pop(name) for name in ("to", "rate", "is_dry_run") if name in how}
    return RedriveWish(LetterFilter(**how), **own)


def redrive(house: House, topic: str = "orders", **how: Any) -> JobFacts:
    """To its end, without a rate."""
    begun = house.done(house.broker.redrive.begin(topic, wish(**how)))
    return job(house, begun.id)


def job(house: House, id: str) -> JobFacts:
    return house.done(house.broker.redrive.get(id))
