"""Kafka's own client, in Java: what programs and pages about a cluster do through it.

Pages such as Kafbat's, AKHQ and Kafdrop are written with this client, so what it calls is what they
can show. It is taken from where `make kafka-peer` puts it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from bench.kafka_peer import jars

from broker_process import PATIENCE_SECONDS, BrokerProcess

PROGRAM = Path(__file__).with_name("KafkaTools.java")
GROUPS = ("classic", "cooperative", "consumer")
EXPECTED = {
    "describeCluster": "1 1",
    "createTopics": "2 60000",
    "listTopics": "[from-java]",
    "createPartitions": "null",
    "describeTopics": "3 from-java",
    "incrementalAlterConfigs": "null",
    "describeConfigs": "90000 DEFAULT_CONFIG true",
    "describeTopics in pages": "[0, 1, 2] false",
    "listConfigResources": "[BROKER 1, TOPIC from-java]",
    "describeMetadataQuorum": "1 1 [1] true",
    "describeFeatures": "true",
    "listPartitionReassignments": "{}",
    "electLeaders": "ElectionNotNeededException",
    "produce none": "19",
    "produce gzip": "39",
    "produce snappy": "59",
    "produce lz4": "79",
    "produce zstd": "99",
    "listOffsets by time": "0",
    "listOffsets earliest": "0",
    "listOffsets latest": "100",
    "describeLogDirs": "true",
    "deleteRecords": "10",
    "page of messages": "10 [95, 96, 97, 98, 99]",
    "consume classic": "2 Stable Classic",
    "consume cooperative": "2 Stable Classic",
    "consume consumer": "2 Stable Consumer",
    "share": "90 1 1",
    "describeAcls": "UnsupportedVersionException",
    "describeClientQuotas": "UnsupportedVersionException",
    "listTransactions": "UnsupportedVersionException",
    "deleteTopics": "null",
    **{f"listConsumerGroupOffsets {group}": "100" for group in GROUPS},
    **{f"alterConsumerGroupOffsets {group}": "null" for group in GROUPS},
    **{f"listGroups {group}": "[Empty]" for group in GROUPS},
    **{f"deleteConsumerGroupOffsets {group}": "null" for group in GROUPS},
    **{f"deleteConsumerGroups {group}": "null" for group in GROUPS},
}


def test_tools_that_use_the_client_of_java_find_all_that_they_ask_for(
    broker: BrokerProcess,
) -> None:
    if shutil.which("javac") is None:
        pytest.skip("a JDK is missing: apt-get install default-jdk-headless")
    library = jars()
    if library is None:
        pytest.skip("Kafka's jars are missing: set KAFKA_HOME, or run `make kafka-peer`")
    done = subprocess.run(
        ["java", "-cp", library, str(PROGRAM), broker.kafka],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    # Which of those that came in the same millisecond is the newest is not said.
    assert 0 <= int(said.pop("listOffsets newest")) < 100
    assert said == EXPECTED, done.stderr[-2000:]
    assert done.returncode == 0
