"""What the tests of the two disks share."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from faults.simulated_disk import SURVIVALS, SimulatedDisk
from millstream.log.disk import Disk, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEEDS = 60


def write(disk: Disk, path: str, content: bytes, position: int = 0) -> None:
    file = disk.open(path, "create")
    write_all(disk, file, [content], position)
    disk.close(file)


def sync(disk: Disk, path: str) -> None:
    file = disk.open(path, "write")
    disk.sync(file)
    disk.close(file)


def crashes(disk: SimulatedDisk) -> Iterator[SimulatedDisk]:
    """Many disks after a power failure now: bytes and names in all ways, together and apart."""
    for survival in SURVIVALS:
        for seed in range(SEEDS):
            yield disk.crash(survival, Random(seed))
            yield disk.crash(survival, Random(seed), names=SURVIVALS[seed % len(SURVIVALS)])


def images(script: Callable[[SimulatedDisk], None], disk: SimulatedDisk) -> list[SimulatedDisk]:
    """The disk before each operation of a script, and after the last."""
    copies: list[SimulatedDisk] = []
    disk.on_operation = lambda index, name: copies.append(disk.copy())
    script(disk)
    disk.on_operation = None
    return [*copies, disk]


def script(disk: Disk) -> None:
    disk.make_directory("/data")
    file = disk.open("/data/log", "create")
    disk.write(file, [b"abcd", b"efgh"], 0)
    disk.sync(file)
    disk.truncate(file, 6)
    disk.close(file)
    disk.rename("/data/log", "/data/sealed")
    disk.sync_directory("/data")
    disk.unlink("/data/sealed")
    disk.remove_directory("/data")
