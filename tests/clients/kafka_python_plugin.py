"""A plugin for the tests of kafka-python: brokers of ours, where they would start some of Kafka's.

Their fixtures know of brokers that run already, but need a module for that which is not in their
package; and they start one of their own for TLS.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess
from certificates import Pair
from clients.other_suites import ADDRESS, KAFKA_PYTHON

# What their client takes us for, from the versions of our messages.
LIKE_KAFKA = "3.2"
# Tests that are skipped for such a broker, of what we have all the same.
NEWER = (
    "test_describe_metadata_quorum",
    "test_describe_topic_partitions",
    "test_describe_topic_partitions_pagination",
    "test_list_config_resources",
)


class ExternalService:
    """A broker that runs already."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


class SpawnedService:
    def __init__(self, *_: object) -> None:
        raise RuntimeError("only brokers that run already are tested")


class SecureBroker:
    """A broker with TLS, as their fixture of one looks to their tests."""

    def __init__(self) -> None:
        self.ssl_dir = tempfile.mkdtemp()
        self._process: BrokerProcess | None = None
        self.port = 0

    def start(self) -> None:
        pair = Pair(Path(self.ssl_dir))
        shutil.copy(pair.authority, Path(self.ssl_dir, "ca-cert"))
        flags = ("--kafka", "127.0.0.1:0", *KAFKA_PYTHON.flags, *pair.flags)
        self._process = BrokerProcess(self.ssl_dir, *flags)
        self.port = int(self._process.wait_until_ready().kafka.rpartition(":")[2])

    def close(self) -> None:
        if self._process is not None:
            self._process.__exit__()
        shutil.rmtree(self.ssl_dir)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of theirs is read."""
    source = early_config.rootpath
    sys.path.insert(0, str(source))
    (source / "test" / "__init__.py").touch()
    service: Any = types.ModuleType("test.service")
    service.ExternalService, service.SpawnedService = ExternalService, SpawnedService
    sys.modules["test.service"] = service
    os.environ["KAFKA_URI"] = f"kafka://{os.environ[ADDRESS]}"
    os.environ["KAFKA_VERSION"] = LIKE_KAFKA
    # Where Kafka's jars would be; it has to be a directory.
    os.environ["KAFKA_ROOT"] = str(source)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in NEWER:
            item.own_markers[:] = [one for one in item.own_markers if one.name != "skipif"]


def pytest_collection_finish() -> None:
    fixture: Any = sys.modules["test.integration.fixtures"].KafkaFixture
    running = fixture.instance

    def instance(*given: object, transport: str = "PLAINTEXT", **options: object) -> object:
        if transport == "SSL":
            return SecureBroker()
        return running(*given, transport=transport, **options)

    fixture.instance = instance
