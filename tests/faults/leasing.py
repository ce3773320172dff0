"""Workers that receive by lease from a broker that is killed again and again, and what they saw."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import httpx

from faults.consuming import TOPIC, Address, Seen, Worker

GROUP = "workers"
DELIVERIES_MAX = 4
# Between the clocks of two processes on one machine, and a tick of the broker's wheel.
NEAR_MS = 50
# What becomes of a delivery, and how often.
KINDS = ("ack", "nack", "release", "reject", "nothing")
CHANCES = (80, 8, 5, 2, 5)


@dataclass(slots=True)
class Life:
    """What is known of one record."""

    # The newest delivery that anybody saw.
    deliveries: int = 0
    receipt: str = ""
    deadline_ms: int = 0
    # Something was said of it that may end its lease, and was not answered.
    is_unsure: bool = False
    # The delivery that was acked; and one whose ack was not answered.
    acked: int | None = None
    may_be_acked: bool = False
    is_dead: bool = False


class Lives:
    """Of all records. Each method is one step: nobody sees half of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.of: defaultdict[str, Life] = defaultdict(Life)
        self.trouble: list[str] = []
        self.deliveries = self.settled = self.refused = self.again = 0

    def receive(self, messages: list[dict[str, Any]], deadline_ms: int) -> None:
        with self._lock:
            now_ms = time.time_ns() // 1_000_000
            for message in messages:
                self.deliveries += 1
                self._receive(message, deadline_ms, now_ms)

    def _receive(self, message: dict[str, Any], deadline_ms: int, now_ms: int) -> None:
        life, number = self.of[message["value"]], message["deliveries"]
        self.again += number > 1
        if number > DELIVERIES_MAX:
            self.trouble.append(f"delivered too often: {message}")
        if number < life.deliveries:
            # It was granted before what we know, and told after it: a release takes one back,
            # and the next delivery has the same number again.
            return
        if life.acked is not None or life.is_dead:
            self.trouble.append(f"came back after it was settled: {message} {life}")
        if life.receipt and life.deadline_ms > now_ms + NEAR_MS and not life.is_unsure:
            self.trouble.append(f"two leases at once: {message} {life}")
        life.deliveries, life.receipt = number, message["receipt"]
        life.deadline_ms, life.is_unsure = deadline_ms, False

    def settling(self, settles: list[tuple[str, dict[str, Any]]]) -> None:
        with self._lock:
            for value, settle in settles:
                life = self.of[value]
                life.is_unsure = True
                life.may_be_acked |= settle["kind"] == "ack"

    def settle(
        self,
        settles: list[tuple[str, dict[str, Any]]],
        deadline_ms: int,
        results: list[dict[str, Any]],
    ) -> None:
        with self._lock:
            now_ms = time.time_ns() // 1_000_000
            for (value, settle), result in zip(settles, results, strict=True):
                life = self.of[value]
                outcome = result.get("outcome")
                if outcome is None:
                    self.refused += 1
                    if result["error"] == "receipt_stale" and deadline_ms > now_ms + NEAR_MS:
                        self.trouble.append(f"a good lease was refused: {settle} {result}")
                    continue
                self.settled += 1
                is_over = outcome in {"acked", "dead"}
                if is_over and (life.acked is not None or life.is_dead):
                    self.trouble.append(f"settled twice: {settle} {result} {life}")
                if outcome == "acked":
                    life.acked = life.deliveries
                life.is_dead |= outcome == "dead"
                if life.receipt == settle["receipt"]:
                    life.receipt = ""


class LeaseWorker(Worker):
    """It acks nearly everything, and forgets some."""

    def __init__(self, name: str, address: Address, seen: Seen, lives: Lives) -> None:
        self.lives = lives
        super().__init__(name, address, seen)

    def work(self, http: httpx.Client) -> None:
        while not self.address.is_over:
            wish = {
                "topics": [TOPIC],
                "limit": self.random.choice((1, 10, 50)),
                "wait_ms": 200,
                "visibility_ms": self.random.choice((1000, 3000)),
                "member": self.name,
            }
            answer = http.post(f"/v1/groups/{GROUP}/receive", json=wish)
            if not self.answered(answer):
                return
            page = answer.json()
            self.lives.receive(page["messages"], page["deadline_ms"])
            self.settle(http, page)

    def settle(self, http: httpx.Client, page: dict[str, Any]) -> None:
        settles: list[tuple[str, dict[str, Any]]] = []
        for message in page["messages"]:
            (kind,) = self.random.choices(KINDS, CHANCES)
            settle: dict[str, Any] = {"kind": kind, "receipt": message["receipt"]}
            if kind == "nack":
                settle["delay_ms"] = self.random.choice((0, 100))
            if kind != "nothing":
                settles.append((message["value"], settle))
        if not settles:
            return
        self.lives.settling(settles)
        body = {"settles": [settle for _, settle in settles]}
        answer = http.post(f"/v1/groups/{GROUP}/settle", json=body)
        if self.answered(answer):
            self.lives.settle(settles, page["deadline_ms"], answer.json()["results"])


def everything(http: httpx.Client, topic: str) -> list[str]:
    """The values of all that a topic has; of one that was never made, none."""
    found: list[str] = []
    asked: dict[str, Any] = {"offset": "earliest", "limit": 5000}
    while True:
        answer = http.get(f"/v1/topics/{topic}/messages", params=asked)
        if answer.status_code == 404:
            return found
        page = answer.raise_for_status().json()
        if not page["messages"]:
            return found
        found += [message["value"] for message in page["messages"]]
        asked = {"positions": page["next"], "limit": 5000}


def left(http: httpx.Client) -> int:
    """How many records the group has not settled."""
    page = http.get("/v1/reliability/stats", params={"group": GROUP}).raise_for_status().json()
    return sum(
        topic["leased"] + topic["waiting"] + topic["ready"]
        for group in page["groups"]
        for topic in group["topics"]
    )
