"""Snapshots of views, beside the local log: `<data>/views/<view>/<offset>.snapshot`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from millstream.engine.pending import Pending
from millstream.log.compaction import Source
from millstream.log.view_snapshot import (
    SnapshotJob,
    SnapshotResult,
    ViewSnapshot,
    newest_snapshot,
)

if TYPE_CHECKING:
    from millstream.engine.scheduler import Scheduler
    from millstream.log.disk import Disk
    from millstream.log.partition import Partition
    from millstream.log.segment import Segment

FOLDER = "views"


class ViewFiles:
    __slots__ = ("_disk", "_newest", "_root", "_scheduler")

    def __init__(self, disk: Disk, root: str, scheduler: Scheduler) -> None:
        self._disk = disk
        self._root = f"{root}/{FOLDER}"
        self._scheduler = scheduler
        # The offset of the newest snapshot that is known to be good, by view.
        self._newest: dict[str, int] = {}

    def load(self, partition: Partition, view: str) -> Pending[ViewSnapshot | None]:
        """The newest snapshot that the log can go on from."""
        pending: Pending[ViewSnapshot | None] = Pending()
        first, last = _compacted_to(partition), partition.high_watermark
        folder, uuid = f"{self._root}/{view}", partition.uuid

        def done(found: ViewSnapshot | None, error: BaseException | None) -> None:
            if error is not None:
                # The log has everything; it only takes longer.
                _logger().warning("snapshot of a view not read", view=view, error=str(error))
            elif found is not None:
                self._newest[view] = found.offset
            pending.succeed(found)

        self._scheduler.background(
            lambda: newest_snapshot(self._disk, folder, uuid, first, last), done
        )
        return pending

    def save(self, partition: Partition, view: str) -> Pending[int | None]:
        """Up to where there is a snapshot now; None when there is nothing new to put into one."""
        segments = _sealed(partition)
        newest = self._newest.get(view)
        if not segments or segments[-1].next_offset <= (newest or 0):
            return Pending.of(None)
        if newest is not None and newest < _compacted_to(partition):
            newest = None
        pending: Pending[int | None] = Pending()
        try:
            self._make_folder(view)
        except OSError as error:
            return Pending.failed(error)
        for segment in segments:
            segment.hold()

        def done(result: SnapshotResult | None, error: BaseException | None) -> None:
            for segment in segments:
                segment.release()
            if result is None:
                assert error is not None
                pending.fail(error)
                return
            self._newest[view] = result.offset
            pending.succeed(result.offset)

        job = SnapshotJob(
            directory=partition.directory,
            sources=[Source.of(segment) for segment in segments],
            uuid=partition.uuid.hex(),
            folder=f"{self._root}/{view}",
            previous=newest,
        )
        self._scheduler.snapshot_view(job, done)
        return pending

    def _make_folder(self, view: str) -> None:
        """Not synced: a snapshot that is lost with its folder is made again."""
        for path in (self._root, f"{self._root}/{view}"):
            if self._disk.size_of(path) is None:
                self._disk.make_directory(path)


def _sealed(partition: Partition) -> list[Segment]:
    """Sealed segments from the first on, up to where one is missing."""
    sealed: list[Segment] = []
    for segment in partition.segments[:-1]:
        if not segment.sealed or (sealed and sealed[-1].next_offset != segment.base_offset):
            break
        sealed.append(segment)
    return sealed


def _compacted_to(partition: Partition) -> int:
    """Before this, compaction may have removed the mark that a key was deleted: a snapshot from
    before would bring it back."""
    return max((one.next_offset for one in partition.segments if one.generation), default=0)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.engine")
    return logger
