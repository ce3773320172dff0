"""Spark's own Kafka connector: its jars are not part of what pip installs.

    python -m bench.spark_connector

has Maven put them in their place, for the version of Spark that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from bench.kafka_peer import FETCH_SECONDS

# What Spark does not have already.
ARTIFACTS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)
# Not every mirror has the connector of every version of Spark, nor both of its jars of one version.
# These two work with Spark 4.3 and are found in more places.
PUBLISHED, PUBLISHED_TOKENS = "4.2.0", "4.0.0"
MISSING = "no Kafka connector of Spark: run `make spark-kafka-jars`"
PROJECT = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId>
  <artifactId>spark-connector</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.spark</groupId>
      <artifactId>spark-sql-kafka-0-10_2.13</artifactId>
      <version>{version}</version>
      <exclusions>
        <exclusion>
          <groupId>org.apache.spark</groupId>
          <artifactId>spark-token-provider-kafka-0-10_2.13</artifactId>
        </exclusion>
      </exclusions>
    </dependency>
    <dependency>
      <groupId>org.apache.spark</groupId>
      <artifactId>spark-token-provider-kafka-0-10_2.13</artifactId>
      <version>{tokens}</version>
    </dependency>
  </dependencies>
</project>
"""


def versions() -> tuple[str, ...]:
    """That of the installed Spark; and one that was published, if that one was not."""
    import pyspark

    return tuple(dict.fromkeys((pyspark.__version__, PUBLISHED)))


def home(version: str) -> Path:
    return Path.home() / ".cache" / "millstream" / f"spark-kafka-{version}"


class Connector(NamedTuple):
    version: str
    jars: tuple[Path, ...]


def connector() -> Connector | None:
    """The nearest one that is there with all of its jars."""
    for version in versions():
        jars = sorted((home(version) / "libs").glob("*.jar"))
        if all(any(jar.name.startswith(one) for jar in jars) for one in ARTIFACTS):
            return Connector(version, tuple(jars))
    return None


def fetch() -> str | None:
    """Have Maven put the jars in their place; why not, when it could not."""
    if shutil.which("mvn") is None:
        return "mvn is missing: apt-get install maven"
    problem = None
    for version in versions():
        problem = _fetch(version)
        if problem is None:
            return None
    return problem


def _fetch(version: str) -> str | None:
    folder = home(version)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = PUBLISHED_TOKENS if version == PUBLISHED else version
    (folder / "pom.xml").write_text(PROJECT.format(version=version, tokens=tokens))
    program = [
        "mvn", "-B", "-q", "dependency:copy-dependencies", "-DincludeScope=runtime",
        f"-DincludeArtifactIds={','.join(ARTIFACTS)}", f"-DoutputDirectory={folder / 'libs'}",
    ]  # fmt: skip
    done = subprocess.run(
        program, cwd=folder, timeout=FETCH_SECONDS, capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"mvn failed:\n{done.stdout[-2000:]}"


if __name__ == "__main__":
    problem = fetch()
    sys.stderr.write(f"{problem or f'the connector is there: {connector()}'}\n")
    sys.exit(problem is not None)
