"""A real process is killed at random moments, again and again, on the same store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from engine.manual import ManualScheduler
from faults import victim
from faults.ledger import DAMAGE, read_all
from millstream.clock import ManualClock
from millstream.engine.local import LocalEngine
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId

KILLS = 120 if os.environ.get("MILLSTREAM_FAULTS") == "full" else 8
# Kills on one store; after these a new one, so that reading all of it stays quick.
KILLS_PER_STORE = 20


class Told:
    """What victims have said so far."""

    def __init__(self) -> None:
        # Every serial, with the partition that it was sent to.
        self.sent: dict[str, str] = {}
        self.groups: list[list[str]] = []
        self.kept: dict[str, tuple[str, int]] = {}

    def take(self, output: bytes) -> None:
        # The last line may be cut: then nobody was told.
        for line in output.decode().split("\n")[:-1]:
            what, *words = line.split(" ")
            if what == "sent":
                group = dict(word.split("@") for word in words)
                self.sent.update(group)
                self.groups.append(list(group))
            elif what == "kept":
                for word in words:
                    serial, _, place = word.partition("@")
                    partition, _, offset = place.rpartition(":")
                    self.kept[serial] = (partition, int(offset))


def run_and_kill(directory: Path, run: int, seconds: float) -> bytes:
    """Start a victim, let it work, kill it; everything that it has said."""
    program = [sys.executable, victim.__file__, str(directory), str(run)]
    child = subprocess.Popen(program, stdout=subprocess.PIPE)
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    said = bytearray()
    deadline = time.monotonic() + 60
    end = None
    while child.poll() is None:
        said += child.stdout.read() or b""
        if end is None and b"ready\n" in said:
            end = time.monotonic() + seconds
        if end is not None and time.monotonic() >= end:
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert time.monotonic() < deadline, "the victim does not start"
        time.sleep(0.002)
    assert child.returncode == -signal.SIGKILL, "the victim ended by itself"
    os.set_blocking(child.stdout.fileno(), True)
    said += child.stdout.read()
    child.stdout.close()
    return bytes(said)


def check(directory: Path, told: Told) -> None:
    """Everything acknowledged is at its place; nothing is there twice, in part, or from nowhere."""
    disk = SystemDisk()
    scheduler = ManualScheduler(disk, ManualClock())
    engine = LocalEngine(disk, str(directory), scheduler.clock, victim.options(), scheduler)
    engine.open()
    assert not [one for one in engine.findings if one.what in DAMAGE], engine.findings
    places: dict[str, tuple[str, int]] = {}
    for topic, partitions in victim.TOPICS.items():
        for number in range(partitions):
            id = PartitionId(topic, number)
            found = read_all(engine, scheduler, id)
            records = [record for _, records in found for record in records]
            for record in records:
                assert record.value is not None
                serial = record.value.rstrip(b".").decode()
                assert serial in told.sent, f"{id} has a record that nobody sent: {record}"
                assert serial not in places, f"{id} has a record twice: {record}"
                places[serial] = (str(id), record.offset)
            if topic != "compact":
                offsets = [record.offset for record in records]
                assert offsets == list(range(engine.offsets(id).high_watermark)), f"hole in {id}"
    newest = newest_of_each_key(places)
    for serial, place in told.kept.items():
        if place[0] != "compact/0" or serial in places:
            assert places.get(serial) == place, f"{serial} was acknowledged at {place}"
        else:
            assert newest[key_of(serial)] > place[1], f"{serial} was the newest of its key"
    for group in told.groups:
        # What was compacted away was there; what is there tells.
        stays = [one for one in group if told.sent[one] != "compact/0"]
        assert len({one in places for one in stays}) <= 1, f"part of {group} is missing"
    engine.close()


def newest_of_each_key(places: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Of the compacted partition: any record but these may be gone."""
    newest: dict[str, int] = {}
    for serial, (partition, offset) in places.items():
        if partition == "compact/0":
            newest[key_of(serial)] = max(offset, newest.get(key_of(serial), -1))
    return newest


def key_of(serial: str) -> str:
    return serial.rpartition("-")[2]


@pytest.mark.parametrize("first", range(0, KILLS, KILLS_PER_STORE))
def test_a_killed_process_has_kept_what_it_acknowledged(first: int, tmp_path: Path) -> None:
    told = Told()
    random = Random(first)
    for run in range(first, min(first + KILLS_PER_STORE, KILLS)):
        told.take(run_and_kill(tmp_path / "data", run, random.uniform(0.01, 0.6)))
        check(tmp_path / "data", told)
    assert len(told.kept) > 1000
