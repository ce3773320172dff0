"""Settings of retention and compaction, as rows of the one table in config.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.kinds import Duration, Size

if TYPE_CHECKING:
    from millstream.kinds import Kind

SECOND_MS = 1_000
HOUR_MS = 3_600_000
KIB = 1 << 10

RETENTION_ROWS: tuple[tuple[str, str, Kind, str, str], ...] = (
    (
        "retention_age",
        "retention_age_ms",
        Duration(SECOND_MS, otherwise="unlimited"),
        "7d",
        "How long records are kept, unless their topic says otherwise. A file is removed when "
        "its newest record is older.",
    ),
    (
        "retention_bytes",
        "retention_bytes",
        Size(64 * KIB, unlimited=True),
        "unlimited",
        "How many bytes a partition keeps, unless its topic says otherwise. The oldest files are "
        "removed first.",
    ),
    (
        "retention_check_interval",
        "retention_check_interval_ms",
        Duration(100, 24 * HOUR_MS),
        "5m",
        "How often the broker looks for files that retention lets it remove. Space is freed that "
        "much later.",
    ),
    (
        "compaction_interval",
        "compaction_interval_ms",
        Duration(100, 7 * 24 * HOUR_MS),
        "15m",
        "How often compacted topics are looked at. Longer leaves more outdated records on disk; "
        "shorter rewrites files more often.",
    ),
    (
        "tombstone_retention",
        "tombstone_retention_ms",
        Duration(0),
        "24h",
        "How long a compacted topic keeps the mark that a key was deleted. A reader that is "
        "further behind than this can miss the deletion.",
    ),
    (
        "file_delete_delay",
        "file_delete_delay_ms",
        Duration(0, 24 * HOUR_MS),
        "60s",
        "How long a file stays on disk after it was retired, for readers that still have it "
        "listed. Space is freed that much later.",
    ),
)
