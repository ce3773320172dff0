"""Fifty producers and fifty consumers, and half of them are killed in the middle: every message
that was confirmed comes out exactly once, or is still there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from broker_process import BrokerProcess, wait_until
from soak.sizes import sized

CLIENTS = Path(__file__).parent / "clients.py"
# Of each role, in two processes, of which one is killed.
EACH = 25
COUNT = sized(60, 5_000)
ENDING_S = 3600.0


class Crowd:
    """Clients of one role in one process, and what they wrote down."""

    def __init__(self, process: subprocess.Popen[bytes], journal: Path) -> None:
        self.process = process
        self._journal = journal

    def lines(self, mark: str) -> list[str]:
        if not self._journal.exists():
            return []
        # A line that is cut short was being written when its writer was killed; it tells nothing.
        whole = self._journal.read_text().rpartition("\n")[0].split("\n")
        return [line[2:] for line in whole if line[:1] == mark]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ENDING_S)

    def end(self) -> None:
        """Let it come to its own end."""
        assert self.process.wait(ENDING_S) == 0


@contextmanager
def crowd(broker: BrokerProcess, folder: Path, role: str, way: str, first: int) -> Iterator[Crowd]:
    journal = folder / f"{role}-{first}"
    place = broker.url("").removeprefix("http://")
    numbers = [str(first), str(EACH), str(COUNT)]
    process = subprocess.Popen(
        [sys.executable, str(CLIENTS), role, way, place, "q", str(journal), *numbers]
    )
    try:
        yield Crowd(process, journal)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(ENDING_S)


def drained(broker: BrokerProcess) -> list[str]:
    found: list[str] = []
    while (answer := broker.get("/queues/q/dequeue?max=1000")).status_code == 200:
        found += [one["payload"] for one in answer.json()["messages"]]
    return found


@pytest.mark.parametrize("way", ["http", "ws"])
def test_what_is_confirmed_comes_out_exactly_once_or_is_still_there(
    tmp_path: Path, way: str
) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(str(tmp_path))).wait_until_ready()
        # A queue that a consumer may wait on has to be there.
        broker.put("/queues/q", {})
        consumers = [
            stack.enter_context(crowd(broker, tmp_path, "consume", way, first))
            for first in (0, EACH)
        ]
        wait_until(lambda: broker.get("/queues/q").json()["waiting"], "consumers")
        producers = [
            stack.enter_context(crowd(broker, tmp_path, "produce", way, first))
            for first in (0, EACH)
        ]
        wait_until(lambda: len(producers[0].lines("c")) > EACH, "messages in")
        wait_until(lambda: len(consumers[0].lines("r")) > EACH, "messages out")
        producers[0].kill()
        consumers[0].kill()
        producers[1].end()
        consumers[1].process.send_signal(signal.SIGTERM)
        consumers[1].end()
        wait_until(lambda: broker.get("/queues/q").json()["waiting"] == 0, "nobody who waits")
        page = broker.get("/queues/q").json()
        still_there = drained(broker)

    sent = [one for crowd in producers for one in crowd.lines("s")]
    confirmed = {one for crowd in producers for one in crowd.lines("c")}
    received = [one for crowd in consumers for one in crowd.lines("r")]
    seen = received + still_there

    assert [one for one, count in Counter(seen).items() if count > 1] == []
    assert set(seen) <= set(sent)
    assert len(producers[1].lines("c")) == EACH * COUNT
    # The broker counts what it took and gave, and nothing went away in between.
    assert page["size"] == len(still_there)
    assert page["enqueued_total"] == page["dequeued_total"] + page["size"]
    # A client that was killed had at most one message on its way in.
    assert len(confirmed) <= page["enqueued_total"] <= len(confirmed) + EACH
    # What was on its way out to those that were killed died with them, and nothing else did.
    lost = confirmed - set(seen)
    assert len(lost) <= page["dequeued_total"] - len(received)
    if way == "http":
        assert len(lost) <= EACH
        asked, answered = consumers[0].lines("a"), consumers[0].lines("r") + consumers[0].lines("e")
        assert len(lost) <= len(asked) - len(answered)


@pytest.mark.parametrize("way", ["http", "ws"])
def test_when_only_producers_are_killed_nothing_is_lost(tmp_path: Path, way: str) -> None:
    """Consumers leave one after the other, in the middle, as one should."""
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(str(tmp_path))).wait_until_ready()
        broker.put("/queues/q", {})
        consumers = [
            stack.enter_context(crowd(broker, tmp_path, "consume", way, first))
            for first in (0, EACH)
        ]
        producers = [
            stack.enter_context(crowd(broker, tmp_path, "produce", way, first))
            for first in (0, EACH)
        ]
        wait_until(lambda: len(consumers[0].lines("r")) > EACH, "messages out")
        producers[0].kill()
        consumers[0].process.send_signal(signal.SIGTERM)
        consumers[0].end()
        producers[1].end()
        consumers[1].process.send_signal(signal.SIGTERM)
        consumers[1].end()
        wait_until(lambda: broker.get("/queues/q").json()["waiting"] == 0, "nobody who waits")
        still_there = drained(broker)
    seen = still_there + [one for crowd in consumers for one in crowd.lines("r")]
    confirmed = {one for crowd in producers for one in crowd.lines("c")}
    assert [one for one, count in Counter(seen).items() if count > 1] == []
    assert confirmed <= set(seen)
    assert len(set(seen) - confirmed) <= EACH
