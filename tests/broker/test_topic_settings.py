"""The table of topic settings: what is read from it, and that the docs have it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.broker.topic_settings import (
    TABLE,
    TopicDefaults,
    TopicSettings,
    known_settings,
    merge,
    parse_settings,
)
from millstream.config import BY_NAME
from millstream.log.partition import PartitionSettings

DEFAULTS = TopicDefaults(PartitionSettings())
DOCS = Path(__file__).parents[2] / "docs" / "topics.md"


def test_the_docs_have_every_setting_and_what_it_follows() -> None:
    page = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+)` \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in rows] == [row.name for row in TABLE]
    for _, follows, _ in rows:
        assert follows in BY_NAME or follows in ("false", "none", "create", "50/25/15/7/3", "30s")


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ({"retention_ms": 5000}, {"retention_ms": 5000}),
        ({"retention_ms": 5000.0}, {"retention_ms": 5000}),
        ({"retention_ms": " 5s "}, {"retention_ms": 5000}),
        ({"retention_ms": "unlimited"}, {"retention_ms": "unlimited"}),
        ({"retention_bytes": "1G"}, {"retention_bytes": 1 << 30}),
        ({"retention_bytes": 1 << 30}, {"retention_bytes": 1 << 30}),
        ({"compact": True}, {"compact": True}),
        ({"compact": "off"}, {"compact": False}),
        ({"fsync": "NONE"}, {"fsync": "none"}),
        ({"lane_weights": "9/4/3/2/1"}, {"lane_weights": (9, 4, 3, 2, 1)}),
        ({"lane_weights": [9.0, 4, 3, 2, 1]}, {"lane_weights": (9, 4, 3, 2, 1)}),
        ({"lane_weights": [9, 4, 3, 2, 1]}, {"lane_weights": (9, 4, 3, 2, 1)}),
        ({"visibility_ms": "2m"}, {"visibility_ms": 120_000}),
        ({"fsync": None}, {"fsync": None}),
    ],
)
def test_values_are_numbers_or_text(given: dict[str, object], parsed: dict[str, object]) -> None:
    assert parse_settings(given) == parsed


def test_what_was_parsed_can_be_stored_and_parsed_again() -> None:
    given = {"retention_ms": "unlimited", "compact": "on", "segment_bytes": "1M", "fsync": "none"}
    parsed = parse_settings(given)
    assert known_settings(parsed) == (parsed, [])
    assert known_settings({**parsed, "fsync": "?", "new": 1}) == (
        {name: value for name, value in parsed.items() if name != "fsync"},
        ["fsync", "new"],
    )


def test_the_defaults_are_the_brokers() -> None:
    settings = DEFAULTS.effective({})
    assert isinstance(settings, TopicSettings)
    engine = DEFAULTS.for_engine(settings)
    assert replace(engine, batch_bytes_max=0) == replace(DEFAULTS.partition, batch_bytes_max=0)
    limits = DEFAULTS.effective(merge({}, {"retention_ms": "unlimited", "fsync": None}))
    assert (limits.retention_ms, limits.fsync) == (None, "every")


def test_the_largest_message_fits_into_a_batch() -> None:
    settings = DEFAULTS.effective(parse_settings({"message_bytes_max": "4M"}))
    engine = DEFAULTS.for_engine(settings)
    assert engine.batch_bytes_max > 4 << 20
    small = DEFAULTS.for_engine(DEFAULTS.effective(parse_settings({"segment_bytes": "64K"})))
    assert small.segment_bytes == 64 << 10
