"""Producers and consumers of a broker that is killed again and again, and what they have seen.

They talk HTTP to whatever broker is there. When it goes away they wait for the next one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from random import Random
from typing import Any

import httpx

TOPIC, GROUP = "orders", "readers"
# Longer than any answer takes, also on a busy machine.
ANSWER_SECONDS = 60.0
# What a member may hear that was not heard of for long, on a busy machine: it joins again.
JOIN_AGAIN = ("member_unknown", "stale_generation", "partition_not_assigned")


class Seen:
    """What everybody has seen so far. Each method is one step: nobody sees half of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: set[str] = set()
        # Where the broker said that a record is.
        self.placed: dict[tuple[int, int], str] = {}
        # What was read: by partition and offset.
        self.read: dict[tuple[int, int], str] = {}
        self.ends: defaultdict[int, int] = defaultdict(int)
        # The highest offset that the broker said was committed.
        self.committed: defaultdict[int, int] = defaultdict(int)
        self.trouble: list[str] = []

    def send(self, values: list[str]) -> None:
        with self._lock:
            self.sent.update(values)

    def place(self, values: list[str], places: list[dict[str, Any]]) -> None:
        with self._lock:
            for value, place in zip(values, places, strict=True):
                self._agree(self.placed, (place["partition"], place["offset"]), value)

    def receive(self, messages: list[dict[str, Any]]) -> None:
        with self._lock:
            for message in messages:
                partition, offset = message["partition"], message["offset"]
                if message["value"] not in self.sent:
                    self.trouble.append(f"nobody sent {message}")
                if offset > self.ends[partition]:
                    self.trouble.append(
                        f"{partition}/{offset} came, and all before {self.ends[partition]} was read"
                    )
                self._agree(self.read, (partition, offset), message["value"])
                self.ends[partition] = max(self.ends[partition], offset + 1)

    def commit(self, offsets: list[dict[str, Any]]) -> None:
        with self._lock:
            for one in offsets:
                partition = one["partition"]
                self.committed[partition] = max(self.committed[partition], one["offset"])

    def found_committed(self, offsets: dict[int, int]) -> None:
        """After a restart: nothing that was told is less."""
        with self._lock:
            for partition, offset in self.committed.items():
                if offsets.get(partition, -1) < offset:
                    self.trouble.append(
                        f"{offset} was committed in {partition}, and it is {offsets} now"
                    )
            for partition, offset in offsets.items():
                self.committed[partition] = max(self.committed[partition], offset)

    def _agree(
        self, places: dict[tuple[int, int], str], place: tuple[int, int], value: str
    ) -> None:
        for known in (self.placed, self.read):
            if known.get(place, value) != value:
                self.trouble.append(f"{place} is {known[place]} and {value}")
        places[place] = value


class Address:
    """Where the broker is now; None while there is none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._url: str | None = None
        self.is_over = False

    def set(self, url: str | None) -> None:
        with self._changed:
            self._url = url
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def wait(self) -> str | None:
        """The broker's address once there is one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._url is not None or self.is_over)
            return None if self.is_over else self._url


class Worker:
    """A thread that works with each broker in turn, until the end."""

    def __init__(self, name: str, address: Address, seen: Seen) -> None:
        self.name = name
        self.address = address
        self.seen = seen
        self.random = Random(name)
        self.is_done = False
        self.thread = threading.Thread(target=self.run, name=name, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.is_done and (url := self.address.wait()) is not None:
            try:
                with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as http:
                    self.work(http)
            except httpx.TransportError:
                # Killed in the middle: what was not answered may be there or not.
                continue

    def work(self, http: httpx.Client) -> None:
        raise NotImplementedError

    def answered(self, answer: httpx.Response) -> bool:
        """Whether it was done. A broker that is starting or stopping may refuse."""
        if answer.status_code >= 500 or answer.status_code == 429:
            return False
        if answer.is_error and answer.json()["error"] in JOIN_AGAIN:
            return False
        if answer.is_error:
            self.seen.trouble.append(f"{self.name}: {answer.status_code} {answer.text}")
            return False
        return True


class Producer(Worker):
    count = 0

    def work(self, http: httpx.Client) -> None:
        while not self.is_done and not self.address.is_over:
            values = [self.value() for _ in range(self.random.choice((1, 1, 5)))]
            self.seen.send(values)
            if len(values) == 1:
                answer = http.post(f"/v1/topics/{TOPIC}/messages", json={"value": values[0]})
                places = [answer.json()]
            else:
                messages = [{"value": value, "key": value} for value in values]
                answer = http.post(f"/v1/topics/{TOPIC}/batch", json={"messages": messages})
                places = answer.json().get("placed", [])
            if self.answered(answer):
                self.seen.place(values, places)

    def value(self) -> str:
        self.count += 1
        return f"{self.name}.{self.count}"


class Reader(Worker):
    """A sequential consumer: it comes back with its id, and acks what it read."""

    id: str | None = None

    def __init__(self, name: str, address: Address, seen: Seen) -> None:
        # What was read of each partition, and what the broker said was acked.
        self.read: dict[int, list[int]] = defaultdict(list)
        self.acked: defaultdict[int, int] = defaultdict(int)
        super().__init__(name, address, seen)

    def work(self, http: httpx.Client) -> None:
        consumers = f"/v1/topics/{TOPIC}/consumers"
        wishes = {"consumer_id": self.id} if self.id is not None else {}
        answer = http.post(consumers, json=wishes)
        if not self.answered(answer):
            return
        opened = answer.json()
        self.id = opened["consumer_id"]
        expected = {one["partition"]: one["offset"] for one in opened["positions"]}
        for partition, offset in expected.items():
            # An ack whose answer was lost may count; one that was answered must.
            if not self.acked[partition] <= offset <= len(set(self.read[partition])):
                self.seen.trouble.append(f"{self.name} is at {expected}, acked {self.acked}")
        while not self.address.is_over:
            answer = http.get(f"{consumers}/{self.id}/next", params={"limit": 20, "timeout": 0.2})
            if not self.answered(answer):
                return
            if answer.status_code == 204:
                continue
            for message in answer.json()["messages"]:
                partition, offset = message["partition"], message["offset"]
                if offset != expected[partition] or message["value"] not in self.seen.sent:
                    self.seen.trouble.append(f"{self.name} expected {expected}, not {message}")
                expected[partition] = offset + 1
                self.read[partition].append(offset)
            ack = {"partition": partition, "offset": offset}
            answer = http.post(f"{consumers}/{self.id}/ack", json=ack)
            if self.answered(answer):
                self.acked[partition] = offset + 1


class Consumer(Worker):
    """Every second one commits by itself; for the others the broker does."""

    def work(self, http: httpx.Client) -> None:
        group = f"/v1/groups/{GROUP}"
        is_manual = int(self.name[-1]) % 2 == 0
        wishes = {
            "topics": [TOPIC],
            "client_id": self.name,
            "auto_offset_reset": "earliest",
            "auto_commit": not is_manual,
            "auto_commit_interval_ms": 20,
            "session_timeout_ms": 10_000,
        }
        answer = http.post(f"{group}/join", json=wishes)
        if not self.answered(answer):
            return
        standing = answer.json()
        while not self.address.is_over:
            place = {key: standing[key] for key in ("member_id", "generation")}
            asked: dict[str, Any] = {"timeout": 0.2, "limit": self.random.choice((1, 10, 100))}
            if "number" in standing:
                asked["received"] = standing["number"]
            answer = http.get(f"{group}/poll", params=asked | place)
            if not self.answered(answer):
                return
            standing = answer.json()
            self.seen.receive(standing["messages"])
            if is_manual and standing["parts"]:
                self.commit(http, standing)

    def commit(self, http: httpx.Client, standing: dict[str, Any]) -> None:
        offsets = [
            {"topic": TOPIC, "partition": part["partition"], "offset": part["next_offset"]}
            for part in standing["parts"]
        ]
        place = {key: standing[key] for key in ("member_id", "generation")}
        answer = http.post(f"/v1/groups/{GROUP}/commit", json=place | {"offsets": offsets})
        if self.answered(answer):
            self.seen.commit(offsets)
