"""A plugin for the tests of aiokafka: a broker of ours, where they start Kafka in a container.

It has the fixtures that their test cases ask for, and stands in the place of their `conftest.py`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from clients.other_suites import ADDRESS, ADDRESS_TLS, CERTIFICATES

# Which of their tests apply: what our versions of messages amount to.
LIKE_KAFKA = "2.8.1"
# What their tests ask for that need a broker.
BROKER = "setup_test_class"
# Certificates by our names and by theirs. The broker asks its clients for none.
FILES = {"ca.pem": "ca.crt", "cert.pem": "client.crt", "key.pem": "client.key"}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Theirs is about containers."""
    (early_config.rootpath / "tests" / "conftest.py").unlink(missing_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those of a broker: others of theirs only test aiokafka itself."""
    others = [one for one in items if BROKER not in getattr(one, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [one for one in items if one not in others]


@pytest.fixture(scope="class")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    one = asyncio.new_event_loop()
    yield one
    one.close()


@pytest.fixture(scope="class")
def setup_test_class_serverless(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("ssl")
    for name, theirs in FILES.items():
        shutil.copy(Path(os.environ[CERTIFICATES], name), folder / theirs)
    give(request, {"loop": loop, "ssl_folder": folder})


@pytest.fixture(scope="class")
def setup_test_class(request: pytest.FixtureRequest, setup_test_class_serverless: None) -> None:
    """Where the broker is. There is no port for SASL, no Kerberos and no access control: tests of
    those fail, and need their excuse."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    facts = {"kafka_host": host, "kafka_port": int(port), "kafka_version": LIKE_KAFKA}
    facts["kafka_ssl_port"] = int(os.environ[ADDRESS_TLS].rpartition(":")[2])
    facts |= dict.fromkeys(("kafka_sasl_plain_port", "kafka_sasl_ssl_port"), 0)
    facts |= dict.fromkeys(("acl_manager", "kafka_config", "kerberos_utils"))
    give(request, {**facts, "hosts": [os.environ[ADDRESS]]})


def give(request: pytest.FixtureRequest, facts: Mapping[str, object]) -> None:
    """Their test cases find them on themselves."""
    for name, value in facts.items():
        setattr(request.cls, name, value)
