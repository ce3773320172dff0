"""The checkpoint: two copies in one file that is replaced in one step."""

from __future__ import annotations

import pytest

from faults.simulated_disk import SURVIVALS, SimulatedDisk, Survival
from millstream.log.checkpoint import (
    Checkpoint,
    PartitionState,
    read_checkpoint,
    read_copies,
    write_checkpoint,
)

PATH = "/checkpoint"


def some(position: int, partitions: int = 2) -> Checkpoint:
    states = [
        PartitionState(
            uuid=bytes([number]) * 16,
            partition=number,
            start_offset=5,
            segment=100,
            size=2**31,
            next_offset=2**40,
            max_timestamp=-1,
            created_ms=1_700_000_000_000,
            checks_whole=bytes(range(40)),
            checks_partial=2**32 - 1,
            index_count=7,
            index_crc=1,
            time_count=3,
            time_crc=2,
            state=b"state",
        )
        for number in range(partitions)
    ]
    return Checkpoint(3, position, 4000, states)


def test_a_checkpoint_is_read_back_as_it_was_written() -> None:
    disk = SimulatedDisk()
    assert read_checkpoint(disk, PATH) is None
    for position in (10, 2**50):
        write_checkpoint(disk, PATH, some(position))
        assert read_checkpoint(disk, PATH) == some(position)
        assert read_copies(disk, PATH) == (some(position), some(position))


def test_when_one_copy_is_damaged_the_other_counts() -> None:
    disk = SimulatedDisk()
    write_checkpoint(disk, PATH, some(10))
    good = disk.files()[PATH]
    for at in range(len(good)):
        disk.put(PATH, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert read_checkpoint(disk, PATH) == some(10)
        copies = read_copies(disk, PATH)
        assert copies.count(None) == 1
        assert (copies[0] is None) == (at < len(good) // 2)


def test_when_both_copies_are_damaged_there_is_none() -> None:
    disk = SimulatedDisk()
    write_checkpoint(disk, PATH, some(10))
    good = disk.files()[PATH]
    half = len(good) // 2
    for at in range(half):
        changed = bytearray(good)
        changed[at] ^= 1
        changed[half + (at * 7) % half] ^= 1
        disk.put(PATH, bytes(changed))
        assert read_checkpoint(disk, PATH) is None
    for content in (b"", b"\0" * 100, good[:10], good[: half - 1]):
        disk.put(PATH, content)
        assert read_checkpoint(disk, PATH) is None


@pytest.mark.parametrize("survival", SURVIVALS)
def test_after_a_crash_it_is_the_old_one_or_the_new_one(survival: Survival) -> None:
    disk = SimulatedDisk()
    write_checkpoint(disk, PATH, some(1))
    found: list[Checkpoint | None] = []
    disk.on_operation = lambda _index, _name: found.append(
        read_checkpoint(disk.crash(survival), PATH)
    )
    new = some(2, partitions=50)
    write_checkpoint(disk, PATH, new)
    assert len(found) > 3
    assert all(one in (some(1), new) for one in found)
    assert read_checkpoint(disk.crash("nothing"), PATH) == new
