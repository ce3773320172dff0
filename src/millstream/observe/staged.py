"""Staged writes on the metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.observe.metrics import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.staged_writes import StagedWrites


def staged_metrics(writes: StagedWrites) -> Iterator[Metric]:
    found = writes.statistics()
    counts, commits = found.counts, found.commits
    yield gauge("staged_writers", "Writers that are remembered.", found.writers)
    yield gauge("staged_parts", "Parts that are staged, and not committed.", found.parts)
    yield gauge("staged_bytes", "Bytes of batches that are staged.", found.bytes)
    yield gauge("staged_log_bytes", "Bytes on disk for them, until it is cut.", found.log_bytes)
    yield gauge("staged_commits_running", "Commits under way.", found.running)
    yield counter("staged_parts_added", "Parts that were staged.", counts.parts)
    yield counter("staged_records_added", "Records that were staged.", counts.records)
    yield counter("staged_bytes_added", "Bytes of batches that were staged.", counts.bytes)
    yield counter("staged_commits", "Batches that were committed.", commits.commits)
    yield counter("staged_commits_repeated", "Commits of what was committed.", counts.repeated)
    yield counter("staged_commit_steps", "Atomic appends of commits.", commits.steps)
    yield counter("staged_steps_refused", "Steps that were refused, tried again.", commits.refused)
    yield counter("staged_records_committed", "Records that commits copied.", commits.records)
    yield counter("staged_bytes_committed", "Bytes that commits copied.", commits.bytes)
    yield counter("staged_records_skipped", "Records that had no topic any more.", commits.skipped)
    yield counter("staged_parts_dropped", "Parts that no commit named.", commits.dropped)
    yield counter("staged_parts_aborted", "Parts of batches that were aborted.", counts.aborted)
    yield counter("staged_parts_expired", "Parts that nobody committed in time.", counts.expired)
    yield counter("staged_parts_moved", "Parts written again to cut the log.", found.moved)
