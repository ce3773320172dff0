"""Runs the tests of other people's clients against a broker of ours: `make test-clients`.

Their tests are fetched with the source package of the version that is installed here, and thrown
away afterwards. (The source package of aiokafka has no tests in it.) A test that fails must have an
excuse below, and an excuse must be needed: one whose test passes is to be taken away.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree as ET

from broker_process import BrokerProcess

PACKAGE = "kafka-python"
# What their client takes us for, from the versions of our messages.
LIKE_KAFKA = "3.2"
REPLICAS = "moves replicas, which is for more than one broker"
TRANSACTIONS = "needs transactions"
ACCESS = "needs access control"
OWN_BROKER = "starts a broker of its own, from Kafka's jars"
# By the end of a test's name, without its parameters.
EXCUSED = {
    "test_create_describe_delete_acls": ACCESS,
    "test_elect_leaders": REPLICAS,
    "test_describe_log_dirs": REPLICAS,
    "test_alter_replica_log_dirs": REPLICAS,
    "test_alter_partition_reassignments": REPLICAS,
    "test_list_partition_reassignments": REPLICAS,
    "test_transactional_producer_messages": TRANSACTIONS,
    "test_transactional_producer_offsets": TRANSACTIONS,
    "test_ssl_handshake": OWN_BROKER,
    "test_legacy_kafka_client_ssl": OWN_BROKER,
}
# Their tests expect it of the broker.
FLAGS = ("--kafka", "127.0.0.1:0", "--node-id", "0", "--topic-partitions", "4")
SECONDS_MAX = 60
# A part of their tests that their package leaves out: how a broker that runs already is held.
SERVICE = """
class ExternalService:
    def __init__(self, host, port):
        self.host, self.port = host, port

    def open(self):
        pass

    def close(self):
        pass


class SpawnedService:
    def __init__(self, *_):
        raise RuntimeError("only brokers that run already are tested")
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        source = fetch(Path(directory))
        report = Path(directory) / "report.xml"
        with BrokerProcess(directory, *FLAGS) as broker:
            broker.wait_until_ready()
            run(source, broker.kafka, report)
        return judge(report)


def fetch(directory: Path) -> Path:
    """Their source, with what it needs to be tested."""
    wanted = f"{PACKAGE}=={version(PACKAGE)}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", PACKAGE, "--dest", str(directory), wanted]
    subprocess.run(pip, check=True)
    (package,) = directory.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(directory, filter="data")
    source = package.with_name(package.name.removesuffix(".tar.gz"))
    (source / "test" / "__init__.py").touch()
    (source / "test" / "service.py").write_text(SERVICE)
    return source


def run(source: Path, address: str, report: Path) -> None:
    environment = os.environ | {
        "KAFKA_URI": f"kafka://{address}",
        "KAFKA_VERSION": LIKE_KAFKA,
        # Where Kafka's jars would be; it has to be a directory.
        "KAFKA_ROOT": str(source),
    }
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb", "short"]
    program += ["--show-capture", "no", "--timeout", str(SECONDS_MAX)]
    program += [f"--junitxml={report}", "test/integration"]
    subprocess.run(program, cwd=source, env=environment, check=False)


def judge(report: Path) -> int:
    """0 when nothing failed without an excuse, and every excuse was needed."""
    outcomes = dict(results(report))
    failed = {name for name, has_failed in outcomes.items() if has_failed}
    passed = outcomes.keys() - failed
    wrong = sorted(failed - EXCUSED.keys())
    idle = sorted(name for name in EXCUSED if name in passed or name not in outcomes)
    for name in sorted(failed & EXCUSED.keys()):
        print(f"excused: {name}: {EXCUSED[name]}")
    for name in wrong:
        print(f"failed: {name}")
    for name in idle:
        print(f"needs no excuse any more: {name}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(wrong)} of them without an excuse")
    return 1 if wrong or idle or not passed else 0


def results(report: Path) -> Iterator[tuple[str, bool]]:
    """Of each test that was run, whether it failed; of one with parameters, whether it ever did."""
    failed: dict[str, bool] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = case.attrib["name"].partition("[")[0]
        has_failed = case.find("failure") is not None or case.find("error") is not None
        failed[name] = failed.get(name, False) or has_failed
    yield from failed.items()


if __name__ == "__main__":
    sys.exit(main())
