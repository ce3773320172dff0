"""What users import and read: the public names, and the examples of the page about the client."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import millstream.client
from broker_process import BrokerProcess, plain_environment

PAGE = Path(__file__).parent.parent.parent / "docs" / "client.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_public_names_are_these() -> None:
    assert sorted(millstream.client.__all__) == [
        "AsyncClient",
        "BlockingDelivery",
        "BlockingLeased",
        "Client",
        "Committed",
        "Consumer",
        "ConsumerStatistics",
        "DeadLetter",
        "Delayed",
        "Delivery",
        "GroupFacts",
        "GroupLag",
        "GroupSummary",
        "Leased",
        "Message",
        "Place",
        "Producer",
        "ProducerStatistics",
        "QueueFacts",
        "Received",
        "RedriveFacts",
        "Reject",
        "Release",
        "Retry",
        "ScheduleFacts",
        "Settle",
        "Settled",
        "Staged",
        "TopicFacts",
        "TopicStream",
        "Work",
        "WorkStatistics",
        "WorkerStatistics",
        "WriterFacts",
    ]
    assert all(hasattr(millstream.client, name) for name in millstream.client.__all__)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_page_says_what_works(number: int, broker: BrokerProcess) -> None:
    with millstream.client.Client(broker.url("")) as client:
        client.publish("orders", {"n": 1})
    program = BLOCKS[number].replace("http://127.0.0.1:8080", broker.url(""))
    program = program.replace("Client()", f'Client("{broker.url("")}")')
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=plain_environment(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_client_needs_nothing_of_the_server() -> None:
    program = (
        "import sys, millstream.client\n"
        "print(sorted({'fastapi', 'uvicorn', 'uvloop', 'structlog', 'prometheus_client',"
        " 'httptools', 'yaml', 'typer', 'rich', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
