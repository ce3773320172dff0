"""A plugin for the tests of aiokafka: a broker of ours, where they start Kafka in a container.

It has the fixtures that their test cases ask for, and stands in the place of their `conftest.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping

import pytest

from clients.other_suites import ADDRESS

# Which of their tests apply: what our versions of messages amount to.
LIKE_KAFKA = "2.8.1"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Theirs is about containers."""
    (early_config.rootpath / "tests" / "conftest.py").unlink(missing_ok=True)


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
    give(request, {"loop": loop, "ssl_folder": tmp_path_factory.mktemp("ssl")})


@pytest.fixture(scope="class")
def setup_test_class(request: pytest.FixtureRequest, setup_test_class_serverless: None) -> None:
    """Where the broker is. There is no other port for TLS or SASL, no Kerberos and no access
    control: tests of those fail, and need their excuse."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    facts = {"kafka_host": host, "kafka_port": int(port), "kafka_version": LIKE_KAFKA}
    facts |= dict.fromkeys(("kafka_ssl_port", "kafka_sasl_plain_port", "kafka_sasl_ssl_port"), 0)
    facts |= dict.fromkeys(("acl_manager", "kerberos_utils"))
    give(request, {**facts, "hosts": [os.environ[ADDRESS]]})


def give(request: pytest.FixtureRequest, facts: Mapping[str, object]) -> None:
    """Their test cases find them on themselves."""
    for name, value in facts.items():
        setattr(request.cls, name, value)
