"""A real broker is killed at random moments, again and again, with producers and consumers at
work: nothing that was answered is lost, no offset goes back, nothing is skipped or made up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from faults.consuming import GROUP, TOPIC, Address, Consumer, Producer, Reader, Seen, Worker

KILLS = 60 if os.environ.get("MILLSTREAM_FAULTS") == "full" else 4
# Kills on one store; after these a new one, so that reading all of it stays quick.
KILLS_PER_STORE = 10
PARTITIONS = 3
PRODUCERS = CONSUMERS = 4
# For the consumers to read what is left, on a busy machine.
READING_SECONDS = 240.0

# Small, so that segments end, checkpoints are made and snapshots are written between kills.
FLAGS = (
    "--segment-bytes=64K",
    "--batch-bytes-max=64K",
    "--topic-message-bytes-max=16K",
    "--journal-bytes=1M",
    "--checkpoint-interval=1s",
    "--view-snapshot-interval=1s",
)


def start(directory: Path) -> BrokerProcess:
    return BrokerProcess(str(directory), *FLAGS)


def committed(http: httpx.Client) -> dict[int, int]:
    answer = http.get(f"/v1/groups/{GROUP}/offsets")
    if answer.status_code == 404:
        return {}
    return {one["partition"]: one["offset"] for one in answer.json()["offsets"]}


def ends(http: httpx.Client) -> dict[int, int]:
    page = http.get(f"/v1/topics/{TOPIC}").raise_for_status().json()
    return {one["partition"]: one["end"] for one in page["details"]}


def everything(http: httpx.Client) -> dict[tuple[int, int], str]:
    """All that the topic has, read by offset."""
    found: dict[tuple[int, int], str] = {}
    asked: dict[str, Any] = {"offset": "earliest", "limit": 5000}
    while True:
        page = http.get(f"/v1/topics/{TOPIC}/messages", params=asked).raise_for_status().json()
        if not page["messages"]:
            return found
        for message in page["messages"]:
            found[message["partition"], message["offset"]] = message["value"]
        asked = {"positions": page["next"], "limit": 5000}


def work_and_kill(directory: Path, address: Address, seen: Seen, random: Random) -> None:
    with start(directory) as broker:
        if random.random() < 0.15:
            # Before it serves, or as soon as it does: recovery is interrupted, too.
            wait_until(lambda: broker.messages("starting"), "the start")
            time.sleep(random.uniform(0, 0.3))
        else:
            broker.wait_until_ready()
            url = broker.url("")
            with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as http:
                seen.found_committed(committed(http))
            before = len(seen.placed)
            address.set(url)
            # As long as chance will have it, but not before anything was answered.
            time.sleep(random.uniform(0.02, 0.8))
            wait_until(lambda: len(seen.placed) > before or seen.trouble, "an answer")
        broker.process.kill()
        broker.process.wait(PATIENCE_SECONDS)
        address.set(None)
    assert not seen.trouble, seen.trouble[:5]


def check_the_end(directory: Path, address: Address, seen: Seen, workers: list[Worker]) -> None:
    """The last broker is left alive: consumers read to the end, and all is where it should be."""
    producers = [one for one in workers if isinstance(one, Producer)]
    for one in producers:
        one.is_done = True
    with start(directory) as broker:
        broker.wait_until_ready()
        with httpx.Client(base_url=broker.url(""), timeout=PATIENCE_SECONDS) as http:
            seen.found_committed(committed(http))
            all_ends = ends(http)
            address.set(broker.url(""))
            deadline = time.monotonic() + READING_SECONDS
            while not seen.trouble and any(seen.ends[n] < all_ends[n] for n in all_ends):
                assert time.monotonic() < deadline, f"read {dict(seen.ends)} of {all_ends}"
                time.sleep(0.01)
            address.end()
            for worker in workers:
                worker.thread.join(PATIENCE_SECONDS)
                assert not worker.thread.is_alive(), f"{worker.name} does not end"
            found = everything(http)
            positions = committed(http)
    assert not seen.trouble, seen.trouble[:5]
    lost = {place: value for place, value in seen.placed.items() if found.get(place) != value}
    assert not lost, f"acknowledged and not there: {list(lost.items())[:5]}"
    assert len(set(found.values())) == len(found), "a record is there twice"
    for partition in range(PARTITIONS):
        offsets = sorted(offset for number, offset in found if number == partition)
        assert offsets == list(range(len(offsets))), f"hole in {partition}"
        # Nothing below the committed offset was skipped by the consumers together.
        unread = [n for n in range(positions[partition]) if (partition, n) not in seen.read]
        assert not unread, f"{partition}: committed past {unread[:5]}, which nobody read"
    assert all(found.get(place) == value for place, value in seen.read.items())
    assert sum(one.count for one in producers) >= len(seen.placed) > 0


# A start takes seconds where many tests run at once.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, KILLS, KILLS_PER_STORE))
def test_a_killed_broker_loses_nothing_and_its_consumers_go_on(first: int, tmp_path: Path) -> None:
    random = Random(first)
    seen, address = Seen(), Address()
    with start(tmp_path) as broker:
        broker.wait_until_ready()
        body = {"name": TOPIC, "partitions": PARTITIONS}
        made = httpx.post(broker.url("/v1/topics"), json=body, timeout=PATIENCE_SECONDS)
        assert made.status_code == 201, made.text
    workers: list[Worker] = [
        *(Producer(f"producer-{n}", address, seen) for n in range(PRODUCERS)),
        *(Consumer(f"consumer-{n}", address, seen) for n in range(CONSUMERS)),
        Reader("reader", address, seen),
    ]
    try:
        for _ in range(first, min(first + KILLS_PER_STORE, KILLS)):
            work_and_kill(tmp_path, address, seen, random)
        check_the_end(tmp_path, address, seen, workers)
    finally:
        address.end()
