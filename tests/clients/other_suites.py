"""Runs the tests of other people's clients against brokers of ours: `make test-clients`.

Their tests are fetched with the source package of the version that is installed here, and thrown
away afterwards. A test that fails, or is skipped, must have an excuse below, and an excuse must be
needed: one whose test passes is to be taken away.

kafka-python's are in its source package. aiokafka's are not: what it puts on PyPI has had no tests
since 0.1.0. They come from its repository, or from the folder that `AIOKAFKA_SOURCE` names, in
which its folder `tests` is. Where there is neither they are not run, and that is a failure, unless
`LEAVE_OUT=aiokafka` says that it is meant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from broker_process import BrokerProcess
from certificates import Pair

# What excuses a test: all of this comes later, or never.
TRANSACTIONS = "needs transactions"
ACCESS = "needs access control"
KERBEROS = "needs Kerberos"
SECOND_BROKER = "needs a second broker"
# And one that no broker of today passes.
OLDER = "is for brokers older than Kafka 0.10.1"
REASONS = frozenset((TRANSACTIONS, ACCESS, KERBEROS, SECOND_BROKER, OLDER))
SECONDS_MAX = 60
CLONE_SECONDS_MAX = 120
# By which the plugins below find the broker: its addresses, and a folder with certificates.
ADDRESS = "MILLSTREAM_SUITE_BROKER"
ADDRESS_TLS = "MILLSTREAM_SUITE_BROKER_TLS"
CERTIFICATES = "MILLSTREAM_SUITE_CERTIFICATES"
LEAVE_OUT = "LEAVE_OUT"


class Suite(NamedTuple):
    package: str
    # Where its tests are in its source, and the plugin that gives them a broker.
    tests: str
    plugin: str
    # What its tests expect of a broker.
    flags: tuple[str, ...]
    # Why a test may fail or be skipped, by its file and name, without its parameters.
    excused: Mapping[str, str]
    # Of a package that comes without tests: what names a folder that has them, and where they are.
    elsewhere: str = ""
    repository: str = ""


KAFKA_PYTHON = Suite(
    "kafka-python",
    "test/integration",
    "clients.kafka_python_plugin",
    ("--node-id", "0", "--topic-partitions", "4"),
    {
        "test_admin_integration.py::test_create_describe_delete_acls": ACCESS,
        "test_consumer_integration.py::test_kafka_consumer_offsets_for_time_old": OLDER,
        "test_producer_integration.py::test_transactional_producer_messages": TRANSACTIONS,
        "test_producer_integration.py::test_transactional_producer_offsets": TRANSACTIONS,
        "test_sasl_integration.py::test_admin": ACCESS,
        "test_sasl_integration.py::test_client": ACCESS,
        "test_sasl_integration.py::test_produce_and_consume": ACCESS,
    },
)
AIOKAFKA = Suite(
    "aiokafka",
    "tests",
    "clients.aiokafka_plugin",
    ("--topic-partitions", "2"),
    {
        **{
            f"test_sasl.py::test_{name}": KERBEROS
            for name in ("sasl_plaintext_gssapi", "admin_client_sasl_plaintext_gssapi")
        },
        **{
            f"test_sasl.py::test_{name}": ACCESS
            for name in (
                "admin_client_sasl_plaintext_basic",
                "admin_client_sasl_plaintext_scrum",
                "sasl_deny_autocreate_cluster",
                "sasl_deny_group_describe",
                "sasl_deny_group_read",
                "sasl_deny_topic_describe",
                "sasl_deny_topic_read",
                "sasl_deny_topic_write",
                "sasl_deny_transaction_group_describe",
                "sasl_deny_transaction_group_read",
                "sasl_deny_txnid_describe",
                "sasl_deny_txnid_during_transaction",
                "sasl_deny_txnid_write",
                "sasl_plaintext_basic",
                "sasl_plaintext_scram",
                "sasl_unknown_topic_describe",
            )
        },
        **{
            f"test_transactional_consumer.py::test_consumer_{name}": TRANSACTIONS
            for name in (
                "several_transactions",
                "simple_read_only_control_record",
                "transactional_abort",
                "transactional_commit",
                "transactional_read_only_control_record",
                "transactions_not_supported",
            )
        },
        **{
            f"test_transactional_producer.py::test_producer_transactional_{name}": TRANSACTIONS
            for name in (
                "aborting_previous_failure",
                "cancel_txn_methods",
                "empty_txn",
                "fences_off_previous",
                "flush_2_batches_before_commit",
                "flush_before_commit",
                "raise_out_of_sequence",
                "restart_reaquire_pid",
                "send_batch_outside_txn",
                "send_message_outside_txn",
                "send_offsets_and_abort",
                "send_offsets_error_checks",
                "send_offsets_to_transaction",
                "simple",
            )
        },
    },
    elsewhere="AIOKAFKA_SOURCE",
    repository="https://github.com/aio-libs/aiokafka",
)


def main() -> int:
    return max([run(suite) for suite in (KAFKA_PYTHON, AIOKAFKA)])


def run(suite: Suite) -> int:
    if suite.package in os.environ.get(LEAVE_OUT, "").split(","):
        print(f"{suite.package} {version(suite.package)}: left out, as {LEAVE_OUT} says")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        source = fetch(suite, Path(directory))
        if not any((source / suite.tests).glob("**/test_*.py")):
            print(not_run(suite))
            return 1
        report = Path(directory) / "report.xml"
        pair = Pair(Path(directory))
        flags = ("--kafka", "127.0.0.1:0", "--kafka-tls", "127.0.0.1:0", *pair.flags)
        with BrokerProcess(directory, *flags, *suite.flags) as broker:
            broker.wait_until_ready()
            test(suite, source, broker, report)
        return judge(suite, report)


def not_run(suite: Suite) -> str:
    """That there are no tests, and what to do about it."""
    number = version(suite.package)
    missing = f"{suite.package} {number}: not run, because its package on PyPI brings no tests"
    if not suite.elsewhere:
        return missing
    missing += f", and {os.environ.get(suite.elsewhere) or suite.repository} gave none"
    folder = f"/tmp/{suite.package}"
    return f"""{missing}
to run them:
  git clone --depth 1 --branch v{number} {suite.repository} {folder}
  make test-clients {suite.elsewhere}={folder}
to leave them out:
  make test-clients {LEAVE_OUT}={suite.package}"""


def fetch(suite: Suite, directory: Path) -> Path:
    """Their source. Of what lies elsewhere only the tests, which then test what is installed."""
    if suite.elsewhere:
        own = os.environ.get(suite.elsewhere) or clone(suite, directory / "clone")
        source = directory / suite.package
        if Path(own, suite.tests).is_dir():
            shutil.copytree(Path(own, suite.tests), source / suite.tests)
        return source
    wanted = f"{suite.package}=={version(suite.package)}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--no-binary", suite.package, "--dest", str(directory), wanted]
    subprocess.run(pip, check=True)
    (package,) = directory.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(directory, filter="data")
    return package.with_name(package.name.removesuffix(".tar.gz"))


def clone(suite: Suite, folder: Path) -> Path:
    """Their repository as it was at this version; nothing where it cannot be reached."""
    program = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{version(suite.package)}"]
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        subprocess.run(
            [*program, suite.repository, str(folder)],
            env=environment,
            check=False,
            timeout=CLONE_SECONDS_MAX,
        )
    return folder


def test(suite: Suite, source: Path, broker: BrokerProcess, report: Path) -> None:
    own = Path(__file__).parent.parent
    path = [str(own), str(own.parent / "src"), os.environ.get("PYTHONPATH", "")]
    where = {ADDRESS: broker.kafka, ADDRESS_TLS: broker.kafka_tls, CERTIFICATES: str(report.parent)}
    environment = os.environ | where | {"PYTHONPATH": os.pathsep.join(path)}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb", "short"]
    program += ["-p", suite.plugin, "--rootdir", str(source), "-c", os.devnull]
    program += ["--show-capture", "no", "--timeout", str(SECONDS_MAX)]
    # The older form of the report names the file of each test.
    program += [f"--junitxml={report}", "-o", "junit_family=xunit1", suite.tests]
    subprocess.run(program, cwd=source, env=environment, check=False)


def judge(suite: Suite, report: Path) -> int:
    """0 when all passed that has no excuse, and every excuse was needed."""
    outcomes = results(suite, report)
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    wrong = sorted(outcomes.keys() - passed - suite.excused.keys())
    # Whose source lies elsewhere may have it in another version, without some of its tests.
    absent = set() if suite.elsewhere else suite.excused.keys() - outcomes.keys()
    idle = sorted(absent | (suite.excused.keys() & passed))
    excused = sorted(outcomes.keys() & (suite.excused.keys() - passed))
    for name in excused:
        print(f"excused, {outcomes[name]}: {name}: {suite.excused[name]}")
    for name in wrong:
        print(f"{outcomes[name]}: {name}")
    for name in idle:
        print(f"needs no excuse any more: {name}")
    counts = f"{len(passed)} passed, {len(excused)} excused, {len(wrong)} failed or skipped"
    print(f"{suite.package} {version(suite.package)}: {counts}")
    return 1 if wrong or idle or not passed else 0


# From the best to the worst; of a test with parameters, the worst counts.
OUTCOMES = ("passed", "skipped", "failed")


def results(suite: Suite, report: Path) -> dict[str, str]:
    """What came of each test, by its file and name."""
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        # What could not be collected has no file.
        file = case.attrib.get("file", "").removeprefix(f"{suite.tests}/")
        name = f"{file}::{case.attrib['name'].partition('[')[0]}"
        found[name] = max(found.get(name, "passed"), outcome, key=OUTCOMES.index)
    return found


if __name__ == "__main__":
    sys.exit(main())
