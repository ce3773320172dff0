"""The plug is pulled on every view that the broker has. A new view gets a line in CASES."""

from __future__ import annotations

import os
from random import Random

import pytest

from faults.view_plug import Case, pull
from millstream.broker.dead_letter_view import (
    CHUNK_OFFSETS,
    DeadLetterView,
    Place,
    job_changes,
)
from millstream.broker.group_settings import GroupSettings
from millstream.broker.idempotency import MarksView
from millstream.broker.offset_table import (
    Mark,
    OffsetTable,
    group_key,
    group_value,
    offset_key,
    offset_value,
    settings_key,
    settings_value,
)
from millstream.broker.topics import SettingsView
from millstream.broker.views import Change

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"


def plain_changes(random: Random) -> list[Change]:
    """A few keys, most of them again and again, some of them taken out."""
    return [
        (
            b"key-%02d" % random.randrange(12),
            None if random.random() < 0.25 else random.randbytes(random.randrange(120)),
        )
        for _ in range(random.randint(1, 4))
    ]


def offset_changes(random: Random) -> list[Change]:
    """Commits, with and without metadata, generations and settings of groups, and some of each
    taken out."""
    changes: list[Change] = []
    for _ in range(random.randint(1, 4)):
        group = random.choice(("g", "another-group"))
        is_gone = random.random() < 0.25
        if random.random() < 0.2:
            mark = Mark(random.randrange(1000), random.randrange(1000))
            changes.append((group_key(group), None if is_gone else group_value(mark)))
            continue
        if random.random() < 0.1:
            settings = GroupSettings(visibility_ms=random.randrange(100, 1000))
            changes.append((settings_key(group), None if is_gone else settings_value(settings)))
            continue
        key = offset_key(group, bytes(15) + bytes((random.randrange(2),)), random.randrange(5))
        text = "x" * random.choice((0, 0, 0, 80))
        value = offset_value(random.randrange(1000), random.randrange(1000), text)
        changes.append((key, None if is_gone else value))
    return changes


def dead_letter_changes(random: Random) -> list[Change]:
    """Marks of offsets in some chunks, some of them all taken out, and jobs that go on."""
    view, place = DeadLetterView(), Place(bytes(16), random.randrange(2))
    chunks = [random.randrange(3) * CHUNK_OFFSETS for _ in range(random.randint(1, 3))]
    offsets = [first + random.randrange(100) for first in chunks]
    changes = list(view.marked(place, offsets))
    if random.random() < 0.25:
        return [(key, None) for key, _ in changes]
    progress = None if random.random() < 0.2 else random.randbytes(random.randrange(80))
    return [*changes, *job_changes(f"job-{random.randrange(5)}", b"job", progress)]


CASES = [
    Case("topic settings", SettingsView, plain_changes),
    Case("idempotency marks", MarksView, plain_changes),
    Case("dead letters", DeadLetterView, dead_letter_changes),
    Case("committed offsets", lambda: OffsetTable("offsets"), offset_changes),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(40 if IS_FULL else 2))
def test_the_plug_is_pulled_on_a_view(
    case: Case, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(case, monkeypatch.setattr, seed=seed)
