"""What a reader of segment files has to know: which files there are, and how far they may be read.

A manifest is as of one moment. Its bytes may be read up to the high watermark in it. A file that
is gone by then was retired by retention or compaction: the reader takes a new manifest.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.topics import partition_unknown
from millstream.engine.pending import Pending, follow
from millstream.errors import SegmentsUnavailable
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.engine.protocol import Engine, Files

# The topic whose UUID is the cluster's: every data directory has its own.
CLUSTER_TOPIC = "__topics"
# What the journal holds of a partition is written to its segment first: so many in one turn.
AT_ONCE = 16


class Manifest(NamedTuple):
    topic: Topic
    directory: str
    partitions: list[tuple[int, Files]]


class Manifests:
    __slots__ = ("_around", "_engine")

    def __init__(self, engine: Engine, around: Surroundings) -> None:
        self._engine = engine
        self._around = around

    @property
    def cluster_id(self) -> str:
        return cluster_id(self._engine)

    def of(self, name: str, numbers: Sequence[int] = ()) -> Pending[Manifest]:
        """Of these partitions, or of all."""
        return follow(self._of(name, numbers))

    def _of(self, name: str, numbers: Sequence[int]) -> Generator[Pending[Any], Any, Manifest]:
        topic = self._around.topics.get(name)
        for number in numbers:
            if number >= topic.partitions:
                raise partition_unknown(topic, number)
        found: list[tuple[int, Files]] = []
        for number in sorted(set(numbers)) or range(topic.partitions):
            files = self._engine.files(PartitionId(name, number))
            if files is None:
                raise SegmentsUnavailable(
                    "this broker keeps its records in no files; read them from it"
                )
            found.append((number, files))
            if len(found) % AT_ONCE == 0:
                yield self._around.breath()
        return Manifest(topic, found[0][1].directory, found)


def cluster_id(engine: Engine) -> str:
    """As Kafka writes one: 16 bytes in base64, without padding."""
    uuid = next(one.uuid for one in engine.topics() if one.name == CLUSTER_TOPIC)
    return base64.urlsafe_b64encode(uuid).rstrip(b"=").decode()
