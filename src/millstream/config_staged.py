"""Settings of staged writes, as rows of the one table in config.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.kinds import Duration, Integer, Size

if TYPE_CHECKING:
    from millstream.kinds import Kind

_SECOND_MS = 1_000
_DAY_MS = 24 * 3_600_000

STAGED_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "writers_max",
        "writers_max",
        Integer(1, 1_000_000),
        "10000",
        "How many writers are remembered, each with the number of its last batch. One more is "
        "refused with 429 and `too_many_writers`, until one is forgotten.",
    ),
    (
        "staged_parts_max",
        "staged_parts_max",
        Integer(1, 10_000_000),
        "100000",
        "How many parts may be staged and not committed, by all writers. One more is refused with "
        "429 and `too_many_parts`. Each takes about a kilobyte of memory.",
    ),
    (
        "commit_parts_max",
        "commit_parts_max",
        Integer(1, 100_000),
        "10000",
        "How many parts one commit may name. More is refused with 400 and `body_invalid`.",
    ),
    (
        "staged_bytes_max",
        "staged_bytes_max",
        Size(1 << 20, 1 << 50),
        "64G",
        "How many bytes may be staged and not committed, by all writers. Past it, staging is "
        "refused with 429 and `staged_full`. They lie on disk, beside what is committed.",
    ),
    (
        "staged_retention",
        "staged_retention_ms",
        Duration(_SECOND_MS, 365 * _DAY_MS),
        "1d",
        "How long what is staged is kept when nobody commits it. A batch that takes longer from "
        "its first part to its commit fails with `staged_part_unknown`.",
    ),
)
