from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker_process import BrokerProcess
from clients.making import KAFKA


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a Kafka listener, for all tests of a file."""
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *KAFKA) as one:
        yield one.wait_until_ready()
