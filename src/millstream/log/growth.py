"""New partitions, of a new topic or of one that is there: the part of making them that only the
disk sees. A thousand of them take thousands of operations, so that is done in a thread, and the
store takes the result in when it is done.

A topic appears by one rename of its directory, with all its partitions. After a crash before that
the next start takes away what there is of it; after it, the topic is there, and empty.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.log.disk import Disk
    from millstream.log.partition import Partition
    from millstream.log.store import Topic


@dataclass(slots=True)
class Growth:
    """Partitions that are being made. `run` may happen in a thread: nobody else knows them."""

    disk: Disk
    # As it is so far; without partitions when it is new.
    topic: Topic
    partitions: int
    # The directory of all topics, and the names that this one's has, and will have, in it.
    root: str
    building: str
    directory: str
    # An empty directory inside that holds what the name has no room for.
    rest: str | None
    new_partition: Callable[[int], Partition]
    now_ms: int
    # What is on disk by now; it stays there, whatever comes after.
    made: list[Partition] = field(default_factory=list)

    def run(self) -> None:
        if self.topic.partitions:
            self._make_directories(f"{self.root}/{self.directory}")
            self._open()
        else:
            self._make_topic()

    def close(self) -> None:
        """Nobody takes it in."""
        for partition in self.made:
            partition.close()
        self.made.clear()

    def _make_topic(self) -> None:
        """All partitions, or none."""
        building, path = f"{self.root}/{self.building}", f"{self.root}/{self.directory}"
        remove_tree(self.disk, building)
        try:
            self.disk.make_directory(building)
            if self.rest is not None:
                self.disk.make_directory(f"{building}/{self.rest}")
            self._make_directories(building)
            self.disk.rename(building, path)
        except OSError:
            self._remove(building)
            raise
        try:
            self.disk.sync_directory(self.root)
            self._open()
        except OSError as error:
            self.close()
            self._take_back(path, error)
            raise

    def _make_directories(self, path: str) -> None:
        there = self.disk.list_directory(path)
        for number in range(self.topic.partitions, self.partitions):
            if str(number) not in there:
                self.disk.make_directory(f"{path}/{number}")
        self.disk.sync_directory(path)

    def _take_back(self, path: str, reason: OSError) -> None:
        """Whoever asked for the topic is told that it is not there, so it must not come back."""
        gone = f"{self.root}/gone-{self.topic.uuid.hex()}"
        try:
            self.disk.rename(path, gone)
            self.disk.sync_directory(self.root)
        except OSError:
            # Made again under another UUID, there would be two of that name.
            problem = f"whether {self.topic.name} is there is not known: {reason}"
            raise StorageFailed(problem) from reason
        self._remove(gone)

    def _remove(self, path: str) -> None:
        """Or let the next start do it."""
        with suppress(OSError):
            remove_tree(self.disk, path)

    def _open(self) -> None:
        for number in range(self.topic.partitions, self.partitions):
            partition = self.new_partition(number)
            partition.start_empty(self.now_ms)
            self.made.append(partition)


def remove_tree(disk: Disk, path: str) -> None:
    """Topics are two levels deep: partitions, and files in them."""
    if disk.size_of(path) is None:
        return
    for number in disk.list_directory(path):
        for name in disk.list_directory(f"{path}/{number}"):
            disk.unlink(f"{path}/{number}/{name}")
        disk.remove_directory(f"{path}/{number}")
    disk.remove_directory(path)
