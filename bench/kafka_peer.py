"""An Apache Kafka on this machine, one node in KRaft mode: the peer of the Kafka listener.

Its jars are looked for in `KAFKA_HOME`, then where `make kafka-peer` puts them: that asks Maven for
them, which takes them from Maven Central or whatever stands in for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from confluent_kafka.admin import AdminClient

from bench.harness import Bench, NotMeasured
from bench.servers import free_port

VERSION = "4.1.0"
HOME = Path.home() / ".cache" / "millstream" / f"kafka-{VERSION}"
START_SECONDS = 120.0
FETCH_SECONDS = 900.0
CLUSTER = "bWlsbHN0cmVhbS1iZW5jaA"
# As Kafka's own start script gives it.
HEAP = "-Xmx1G"

PROJECT = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId>
  <artifactId>kafka-peer</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""
# One node for everything; `flush` is how often it syncs.
PROPERTIES = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
group.initial.rebalance.delay.ms=0
log.flush.interval.messages={flush}
"""
NEVER = 2**63 - 1


def kafka_or_why(bench: Bench, stack: ExitStack, *, mode: str, partitions: int) -> tuple[str, str]:
    """Where one is that was started, and why there is none: one of the two is empty."""
    library = jars()
    if library is None:
        return "", "no Apache Kafka: set KAFKA_HOME, or run `make kafka-peer`"
    if shutil.which("java") is None:
        return "", "java is missing: apt-get install default-jre-headless"
    return stack.enter_context(
        running(bench.scratch, library, mode=mode, partitions=partitions)
    ), ""


def jars() -> str | None:
    homes = [Path(home) for home in (os.environ.get("KAFKA_HOME"),) if home]
    for home in (*homes, HOME):
        if any((home / "libs").glob("kafka_2*.jar")):
            return str(home / "libs" / "*")
    return None


@contextmanager
def running(scratch: Path, jars: str, *, mode: str, partitions: int) -> Iterator[str]:
    folder = scratch / f"kafka-{time.monotonic_ns()}"
    folder.mkdir()
    port, controller = free_port(), free_port()
    properties = folder / "server.properties"
    properties.write_text(
        PROPERTIES.format(
            port=port,
            controller=controller,
            data=folder / "data",
            partitions=partitions,
            flush=1 if mode == "every" else NEVER,
        )
    )
    java = ["java", HEAP, "-cp", jars]
    named = ["-t", CLUSTER, "-c", str(properties)]
    output = subprocess.DEVNULL
    storage = [*java, "kafka.tools.StorageTool", "format", *named]
    if subprocess.run(storage, stdout=output, stderr=output, check=False).returncode:
        raise NotMeasured("Apache Kafka could not make its storage")
    process = subprocess.Popen(
        [*java, "kafka.Kafka", str(properties)], stdout=output, stderr=output
    )
    server = f"127.0.0.1:{port}"
    try:
        _wait_for(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(server: str, process: subprocess.Popen[bytes]) -> None:
    client = AdminClient({"bootstrap.servers": server, "log_level": 0})
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.list_topics(timeout=1).brokers:
                return
        except Exception:  # noqa: BLE001  not there yet; librdkafka has many ways to say so
            time.sleep(0.1)
    raise NotMeasured("Apache Kafka did not start")


def fetch() -> str | None:
    """Have Maven put the jars in their place; why not, when it could not."""
    if shutil.which("mvn") is None:
        return "mvn is missing: apt-get install maven"
    libs = HOME / "libs"
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "pom.xml").write_text(PROJECT)
    program = ["mvn", "-B", "-q", "dependency:copy-dependencies", f"-DoutputDirectory={libs}"]
    done = subprocess.run(
        program, cwd=HOME, timeout=FETCH_SECONDS, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"mvn failed:\n{done.stdout[-2000:]}"


if __name__ == "__main__":
    problem = fetch()
    sys.stderr.write(f"{problem or f'Apache Kafka {VERSION} is in {HOME}'}\n")
    sys.exit(problem is not None)
