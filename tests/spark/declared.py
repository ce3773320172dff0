"""A declarative pipeline of Spark's, as the page shows it: a topic becomes a table, and some of it
another topic."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pyspark.pipelines import cli

SPEC = """
name: orders
storage: file://{folder}/storage
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.shuffle.partitions: "2"
"""

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


@dataclass(frozen=True)
class Project:
    folder: Path

    @property
    def program(self) -> str:
        return str(cli.__file__)

    @property
    def run(self) -> tuple[str, ...]:
        return ("run", "--spec", str(self.folder / "spark-pipeline.yml"))


def declare(folder: Path, server: str, source: str, target: str) -> Project:
    """The files of a project, as `spark-pipelines init` would lay them out."""
    (folder / "transformations").mkdir()
    (folder / "storage").mkdir()
    (folder / "spark-pipeline.yml").write_text(SPEC.format(folder=folder), encoding="utf-8")
    text = shown()
    for there, here in (
        ("http://127.0.0.1:8080", server),
        ('subscribe="orders"', f'subscribe="{source}"'),
        ('"topic": "big"', f'"topic": "{target}"'),
    ):
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    (folder / "transformations" / "orders.py").write_text(text, encoding="utf-8")
    return Project(folder)


def shown() -> str:
    """What the page about Spark shows."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [found] = [one for one in blocks if "@dp.table" in one]
    return str(found)
