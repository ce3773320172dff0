"""Groups of one to five members, each a process: they come, leave and are killed, and every record
is read by one of those that are there. All clients, and all ways in which they deal out."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from clients.crew_member import HEARTBEAT_MS, SESSION_MS
from clients.crews import fill, group_page
from clients.making import KAFKA, make_topic
from clients.readers import require_kcat

PARTITIONS = 10
MEMBERS_MAX = 5
PROGRAM = Path(__file__).with_name("crew_member.py")
# Who deals out, and how: the clients, or the broker.
WAYS = [("librdkafka", "cooperative-sticky"), ("librdkafka", "consumer"), ("kcat", "range")]
WAYS += [("aiokafka", "range"), ("kafka-python", "range")]
MORE_WAYS = [("librdkafka", "range"), ("librdkafka", "roundrobin"), ("aiokafka", "roundrobin")]
MORE_WAYS += [("aiokafka", "sticky"), ("kafka-python", "roundrobin"), ("kafka-python", "sticky")]
MORE_WAYS += [("kafka-python", "cooperative-sticky")]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Where the broker deals out, it says how often members call, and how long they may not."""
    flags = ("--group-session-timeout", "3s", "--group-heartbeat-interval", "200ms")
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *KAFKA, *flags) as one:
        yield one.wait_until_ready()


class Crew:
    def __init__(self, broker: BrokerProcess, client: str, way: str, folder: Path) -> None:
        self.broker = broker
        # Both tests may meet the same broker; each has a folder of its own.
        self.group = f"{client}-{way}-{folder.name}"
        self.topic = make_topic(broker, f"for-{self.group}", PARTITIONS)
        self.members: list[subprocess.Popen[bytes]] = []
        self.produced: list[bytes] = []
        self._client = client
        self._way = way
        self._folder = folder

    def join(self) -> None:
        journal = self._folder / f"journal-{len(list(self._folder.iterdir()))}"
        journal.touch()
        if self._client == "kcat":
            with journal.open("ab") as out:
                self.members.append(subprocess.Popen(self._kcat(), stdout=out, stderr=out))
            return
        names = [self._client, self.broker.kafka, self.group, self.topic, self._way, str(journal)]
        self.members.append(subprocess.Popen([sys.executable, str(PROGRAM), *names]))

    def _kcat(self) -> list[str]:
        options = {
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 100,
            "partition.assignment.strategy": self._way,
        }
        program = ["kcat", "-b", self.broker.kafka, "-q", "-u"]
        for name, value in options.items():
            program += ["-X", f"{name}={value}"]
        return [*program, "-G", self.group, self.topic]

    def kill(self) -> None:
        member = self.members.pop(0)
        member.kill()
        member.wait(PATIENCE_SECONDS)

    def leave(self) -> None:
        member = self.members.pop()
        member.send_signal(signal.SIGTERM)
        assert member.wait(PATIENCE_SECONDS) == 0

    def settle(self) -> None:
        """Until those who are there have all partitions, and have read all there is."""
        count = len(self.members)
        wait_until(lambda: self._is_dealt(count), f"{count} members with all partitions")
        more = [b"%d-%d" % (len(self.produced), number) for number in range(2 * PARTITIONS)]
        fill(self.broker, self.topic, more, PARTITIONS)
        self.produced += more
        wait_until(lambda: self.read() >= {*self.produced}, "all records")

    def _is_dealt(self, count: int) -> bool:
        page = group_page(self.broker, self.group)
        shares = [
            [number for part in one["assignment"] for number in part["partitions"]]
            for one in page.get("members", ())
        ]
        numbers = sorted(number for share in shares for number in share)
        sizes = [len(share) for share in shares]
        is_even = bool(sizes) and max(sizes) - min(sizes) <= 1
        return len(shares) == count and is_even and numbers == list(range(PARTITIONS))

    def read(self) -> set[bytes]:
        return {line for one in self._folder.iterdir() for line in one.read_bytes().splitlines()}

    def committed(self) -> int:
        url = self.broker.url(f"/v1/groups/{self.group}/offsets")
        page = httpx.get(url, timeout=PATIENCE_SECONDS).json()
        return sum(one["offset"] for one in page["offsets"])

    def end(self) -> None:
        for one in self.members:
            one.kill()
            one.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("client", "way"), [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in MORE_WAYS)]
)
def test_up_to_five_members_come_and_leave_and_die(
    broker: BrokerProcess, tmp_path: Path, client: str, way: str
) -> None:
    if client == "kcat":
        require_kcat()
    crew = Crew(broker, client, way, tmp_path)
    try:
        crew.join()
        crew.settle()
        # From here on they find others there.
        for _ in range(MEMBERS_MAX - 1):
            crew.join()
            crew.settle()
        crew.kill()
        crew.settle()
        crew.leave()
        crew.settle()
        crew.kill()
        crew.leave()
        crew.settle()
        crew.leave()
    finally:
        crew.end()
    wait_until(lambda: group_page(broker, crew.group)["members"] == [], "all to have left")
    assert crew.committed() == len(crew.produced)


@pytest.mark.parametrize(("client", "way"), MORE_WAYS)
def test_two_members_share_in_every_way_and_the_one_that_stays_takes_over(
    broker: BrokerProcess, tmp_path: Path, client: str, way: str
) -> None:
    """The short form of the other test, for ways in which that takes long."""
    crew = Crew(broker, client, way, tmp_path)
    try:
        crew.join()
        crew.join()
        crew.settle()
        crew.leave()
        crew.settle()
        crew.leave()
    finally:
        crew.end()
    wait_until(lambda: group_page(broker, crew.group)["members"] == [], "all to have left")
    assert crew.committed() == len(crew.produced)
