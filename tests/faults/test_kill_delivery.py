"""A real broker is killed, or stopped for longer than its leases, with workers at it: no record is
leased twice at a time, comes back after its ack, is lost, or is a dead letter twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from faults.consuming import TOPIC, Address, Producer, Seen
from faults.leasing import DELIVERIES_MAX, GROUP, LeaseWorker, Lives, everything, left

KILLS = 50 if os.environ.get("MILLSTREAM_FAULTS") == "full" else 2
# Kills on one store; after these a new one, so that settling all of it stays quick.
KILLS_PER_STORE = 10
PRODUCERS, WORKERS = 2, 4
# For the workers to settle what is left, on a busy machine.
DRAINING_SECONDS = 240.0

# Small, so that segments end, and checkpoints are made, between kills.
FLAGS = (
    "--segment-bytes=64K",
    "--batch-bytes-max=64K",
    "--topic-message-bytes-max=16K",
    "--journal-bytes=1M",
    "--checkpoint-interval=1s",
    # On a busy machine most leases run out after a kill; that must not pause dead letters.
    "--breaker-settlings-min=1000000",
)


def make_topic(broker: BrokerProcess, **settings: Any) -> None:
    body = {"name": TOPIC, "partitions": 3, **settings}
    made = httpx.post(broker.url("/v1/topics"), json=body, timeout=PATIENCE_SECONDS)
    assert made.status_code == 201, made.text


def work_and_kill(directory: Path, address: Address, lives: Lives, random: Random) -> None:
    with BrokerProcess(str(directory), *FLAGS) as broker:
        broker.wait_until_ready()
        before = lives.settled
        address.set(broker.url(""))
        # As long as chance will have it, but not before anything was answered.
        time.sleep(random.uniform(0.02, 1.5))
        wait_until(lambda: lives.settled > before or lives.trouble, "an answer")
        broker.process.kill()
        broker.process.wait(PATIENCE_SECONDS)
        address.set(None)
    assert not lives.trouble, lives.trouble[:5]


def check_the_end(
    directory: Path,
    address: Address,
    seen: Seen,
    lives: Lives,
    workers: list[Producer | LeaseWorker],
) -> None:
    """The last broker is left alive, and the workers settle everything."""
    for one in workers:
        one.is_done = isinstance(one, Producer)
    with BrokerProcess(str(directory), *FLAGS) as broker:
        broker.wait_until_ready()
        with httpx.Client(base_url=broker.url(""), timeout=PATIENCE_SECONDS) as http:
            address.set(broker.url(""))
            deadline = time.monotonic() + DRAINING_SECONDS
            while left(http) and not lives.trouble:
                assert time.monotonic() < deadline, f"{left(http)} are not settled"
                time.sleep(0.05)
            address.end()
            for worker in workers:
                worker.thread.join(PATIENCE_SECONDS)
                assert not worker.thread.is_alive(), f"{worker.name} does not end"
            dead = everything(http, f"{TOPIC}.dlq")
    assert not lives.trouble, lives.trouble[:5]
    assert not seen.trouble, seen.trouble[:5]
    assert len(set(dead)) == len(dead), "a record is a dead letter twice"
    for value in seen.placed.values():
        life = lives.of[value]
        is_dead = value in set(dead)
        assert is_dead or life.may_be_acked, f"lost: {value} {life}"
        assert not (is_dead and life.acked is not None), f"acked and dead: {value} {life}"
        assert is_dead or not life.is_dead, f"no dead letter: {value} {life}"
        assert max(life.deliveries, 1) <= DELIVERIES_MAX
    assert lives.of.keys() <= seen.sent


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, KILLS, KILLS_PER_STORE))
def test_a_killed_broker_keeps_its_leases_and_what_was_settled(first: int, tmp_path: Path) -> None:
    random = Random(first)
    seen, lives, address = Seen(), Lives(), Address()
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        broker.wait_until_ready()
        make_topic(broker, settings={"deliveries_max": DELIVERIES_MAX})
    workers: list[Producer | LeaseWorker] = [
        *(Producer(f"producer-{n}", address, seen) for n in range(PRODUCERS)),
        *(LeaseWorker(f"worker-{n}", address, seen, lives) for n in range(WORKERS)),
    ]
    try:
        for _ in range(first, min(first + KILLS_PER_STORE, KILLS)):
            work_and_kill(tmp_path, address, lives, random)
        check_the_end(tmp_path, address, seen, lives, workers)
    finally:
        address.end()
    assert lives.deliveries > lives.settled > 0
    assert lives.again > 0


# ---- stopped for longer than the leases


def receive(http: httpx.Client, **how: Any) -> list[dict[str, Any]]:
    body = {"topics": [TOPIC], "limit": 10} | how
    answer = http.post(f"/v1/groups/{GROUP}/receive", json=body).raise_for_status()
    messages: list[dict[str, Any]] = answer.json()["messages"]
    return messages


def publish(http: httpx.Client, *values: str) -> None:
    for value in values:
        http.post(f"/v1/topics/{TOPIC}/messages", json={"value": value}).raise_for_status()


def settle(http: httpx.Client, word: str, receipt: str) -> str:
    """What became of it, or the code of the error."""
    page = http.post(f"/v1/messages/{word}", json={"receipt": receipt}).json()
    return str(page.get("outcome", page.get("error")))


def test_leases_run_out_while_the_broker_is_stopped_and_settlings_are_kept(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        broker.wait_until_ready()
        make_topic(broker)
        with httpx.Client(base_url=broker.url(""), timeout=PATIENCE_SECONDS) as http:
            publish(http, "kept", "done", "late")
            messages = {one["value"]: one for one in receive(http, visibility_ms=1000)}
            assert settle(http, "ack", messages["done"]["receipt"]) == "acked"
            broker.process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)
            broker.process.send_signal(signal.SIGCONT)
            again: dict[str, dict[str, Any]] = {}

            def came_back() -> bool:
                found = receive(http, visibility_ms=60_000)
                again.update({one["value"]: one for one in found})
                return len(again) == 2

            wait_until(came_back, "the records whose leases ran out")
            assert {name: one["deliveries"] for name, one in again.items()} == {
                "kept": 2,
                "late": 2,
            }
            assert settle(http, "ack", messages["late"]["receipt"]) == "receipt_stale"
            assert settle(http, "ack", again["late"]["receipt"]) == "acked"
            assert settle(http, "ack", again["kept"]["receipt"]) == "acked"
            assert left(http) == 0


# Receives one record, says so, waits for a line, acks it and says what the broker answered.
SLOW_WORKER = """
import json, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))
    except urllib.error.HTTPError as error:
        return json.load(error)

wish = {"topics": [sys.argv[2]], "wait_ms": 20000, "visibility_ms": 1000}
(message,) = post(f"/v1/groups/{sys.argv[3]}/receive", wish)["messages"]
print(json.dumps(message), flush=True)
sys.stdin.readline()
print(json.dumps(post("/v1/messages/ack", {"receipt": message["receipt"]})), flush=True)
"""


def test_a_worker_that_was_stopped_for_longer_than_its_lease_settles_nothing(
    tmp_path: Path,
) -> None:
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        broker.wait_until_ready()
        make_topic(broker)
        command = [sys.executable, "-c", SLOW_WORKER, broker.url(""), TOPIC, GROUP]
        with (
            httpx.Client(base_url=broker.url(""), timeout=PATIENCE_SECONDS) as http,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as worker,
        ):
            assert worker.stdin is not None
            assert worker.stdout is not None
            publish(http, "job")
            try:
                message = json.loads(worker.stdout.readline())
                worker.send_signal(signal.SIGSTOP)
                (again,) = receive(http, wait_ms=20_000, visibility_ms=60_000)
                assert (message["deliveries"], again["deliveries"]) == (1, 2)
            finally:
                worker.send_signal(signal.SIGCONT)
            worker.stdin.write("\n")
            worker.stdin.flush()
            assert json.loads(worker.stdout.readline())["error"] == "receipt_stale"
            assert settle(http, "ack", again["receipt"]) == "acked"
            assert left(http) == 0
