"""An engine under load, in a process of its own that is to be killed.

    python victim.py DIRECTORY RUN

Standard output tells, a line at a time and before anything else happens, what is sent and what is
acknowledged:

    ready
    sent <serial>@<topic>/<partition> [ … ]                   the parts of one append
    kept <serial>@<topic>/<partition>:<offset> [ … ]          the same parts, with their places

A serial ends with `-` and the record's key.
"""

from __future__ import annotations

import asyncio
import os
import sys
from random import Random

from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.upkeep import UpkeepSettings
from millstream.log import batch as batches
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.store import StoreOptions

WORKERS = 16
BYPASS_BYTES = 4096
TOPICS = {"small": 3, "mixed": 2, "compact": 1}


def settings_for(topic: str) -> PartitionSettings:
    return PartitionSettings(
        segment_bytes=32 * 1024, retention_age_ms=None, compact=topic == "compact"
    )


def options() -> LocalOptions:
    return LocalOptions(
        store=StoreOptions(settings_for=settings_for, journal_file_bytes=64 * 1024),
        upkeep=UpkeepSettings(
            checkpoint_interval_s=0.1,
            journal_bytes=128 * 1024,
            retention_interval_s=0.1,
            compaction_interval_s=0.05,
            file_delete_delay_s=0.1,
        ),
        bypass_bytes=BYPASS_BYTES,
    )


def tell(line: str) -> None:
    os.write(1, line.encode() + b"\n")


class Worker:
    def __init__(self, engine: LocalEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.random = Random(name)
        self.count = 0

    async def run(self) -> None:
        while True:
            parts = [self.part(chance) for chance in [self.random.random()] * self.parts()]
            tell("sent " + " ".join(f"{serial}@{id}" for serial, id, _ in parts))
            if len(parts) == 1:
                offsets = [await self.engine.append(parts[0][1], parts[0][2])]
            else:
                offsets = await self.engine.append_atomic([part[1:] for part in parts])
            told = [f"{p[0]}@{p[1]}:{offset}" for p, offset in zip(parts, offsets, strict=True)]
            tell("kept " + " ".join(told))

    def parts(self) -> int:
        return self.random.randint(2, 4) if self.random.random() < 0.25 else 1

    def part(self, chance: float) -> tuple[str, PartitionId, bytes]:
        self.count += 1
        key = str(self.random.randint(0, 20))
        serial = f"{self.name}.{self.count}-{key}"
        topic = self.random.choice(list(TOPICS))
        id = PartitionId(topic, self.random.randrange(TOPICS[topic]))
        size = BYPASS_BYTES if topic == "mixed" and chance < 0.3 else 20
        record: batches.Fields = (
            1_700_000_000_000,
            key.encode(),
            serial.encode().ljust(size, b"."),
            [],
        )
        return serial, id, batches.encode([record])


async def main(directory: str, run: str) -> None:
    engine = LocalEngine(SystemDisk(), directory, SystemClock(), options())
    await engine.start()
    there = {topic.name for topic in engine.topics()}
    for name, partitions in TOPICS.items():
        if name not in there:
            await engine.create(name, partitions, settings_for(name))
    tell("ready")
    await asyncio.gather(*(Worker(engine, f"{run}.{n}").run() for n in range(WORKERS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
