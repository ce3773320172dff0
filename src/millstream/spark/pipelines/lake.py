"""An archive: Parquet files by topic and date, and a record of what they hold.

    <lake>/
      topic=orders/date=2026-11-19/<id>-00000.parquet    any reader of Parquet may use these
      _millstream/
        entries/<id>.json      what one micro-batch added: its files, and which offsets
        staged/<id>/…          files before they are in their place

`<id>` is the query's own id and the number of its micro-batch. A micro-batch becomes part of the
archive in three steps, and a crash between any two of them is made good by whoever comes next:

1. Its files are written under `staged/`. A crash here leaves files that no one sees; the
   micro-batch is written again.
2. Its entry is put in place, whole. From here on it counts: a repeat of the micro-batch finds the
   entry and adds nothing.
3. Its files are moved to their place. A crash here leaves some of them staged; they are moved by
   the repeat, by the next run, or by a reader of the entries.

So a reader of Parquet that knows nothing of entries never sees a record twice, nor one that may
yet be written again.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from pyarrow import fs

from millstream.errors import ArchiveInvalid
from millstream.spark.pipelines.places import opened

_OWN = "_millstream"
# What Spark calls the files of a write: `part-00003-<UUID of the write>.c001.snappy.parquet`, or
# with a dash before the c.
_PART = re.compile(r"part-(?P<task>\d+)-.+[-.]c(?P<file>\d+)\.")
# By topic, UUID and partition: the offset that comes next.
Ends: TypeAlias = dict[tuple[str, str, int], int]


class OffsetRange(msgspec.Struct, frozen=True):
    """Offsets of one partition that an entry covers: from `first` to before `next`."""

    topic: str
    uuid: str
    partition: int
    first: int
    next: int
    records: int
    # None where no record has a time that Spark can tell.
    oldest_ms: int | None
    newest_ms: int | None


class Entry(msgspec.Struct, frozen=True):
    """What one micro-batch added."""

    id: str
    written_ms: int
    files: list[str]  # relative to the lake
    ranges: list[OffsetRange]

    @property
    def records(self) -> int:
        return sum(one.records for one in self.ranges)

    def has(self, topic: str, uuid: str | None = None) -> bool:
        return any(one.topic == topic and uuid in (None, one.uuid) for one in self.ranges)


@dataclass(frozen=True, slots=True)
class Lake:
    """An archive in a folder of this machine, or wherever pyarrow can write: s3://, gs://, hdfs://.

    `url` is how Spark is told of it.
    """

    url: str
    files: Any
    root: str

    @classmethod
    def at(cls, where: str) -> Lake:
        try:
            return cls(*opened(where))
        except (OSError, ValueError) as error:
            raise ArchiveInvalid(f"{where} cannot be reached: {error}", archive=where) from error

    # ---- entries

    def entries(self) -> list[Entry]:
        """All, in the order in which they were written."""
        selector = fs.FileSelector(self._path(_OWN, "entries"), allow_not_found=True)
        paths = [one.path for one in self.files.get_file_info(selector)]
        found = [self._read(path) for path in paths if path.endswith(".json")]
        return sorted(found, key=lambda entry: (entry.written_ms, entry.id))

    def find(self, id: str) -> Entry | None:
        path = self._entry_path(id)
        return self._read(path) if self._is_there(path) else None

    def add(self, entry: Entry, ends: Ends) -> None:
        """Step 2: from now on the entry counts, and `ends` know it."""
        self._check_new(entry, ends)
        path = self._entry_path(entry.id)
        part = f"{path}.part"
        self.files.create_dir(posixpath.dirname(path), recursive=True)
        with self.files.open_output_stream(part) as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(entry)))
        self.files.move(part, path)
        ends.update({(one.topic, one.uuid, one.partition): one.next for one in entry.ranges})

    def finish(self, entry: Entry) -> None:
        """Step 3: move what is still staged to its place."""
        staged = self._path(_OWN, "staged", entry.id)
        if not self._is_there(staged):
            return
        waiting = {self._final_name(path, entry.id): path for path in self._staged(entry.id)}
        for name in entry.files:
            if name in waiting:
                self._move(waiting[name], self._path(name))
            elif not self._is_there(self._path(name)):
                raise ArchiveInvalid(f"{self._path(name)} is gone", archive=self.url)
        self.drop_staged(entry.id)

    def finish_all(self) -> None:
        """What a crash left between steps 2 and 3."""
        selector = fs.FileSelector(self._path(_OWN, "staged"), allow_not_found=True)
        for one in self.files.get_file_info(selector):
            entry = self.find(one.base_name)
            if entry is not None:
                self.finish(entry)

    # ---- staging

    def stage_url(self, id: str) -> str:
        """Where Spark writes the files of a micro-batch; what a first try left there is gone."""
        self.drop_staged(id)
        return f"{self.url}/{_OWN}/staged/{id}"

    def staged_names(self, id: str) -> list[str]:
        """The names that the staged files will have."""
        return sorted(self._final_name(path, id) for path in self._staged(id))

    def drop_staged(self, id: str) -> None:
        path = self._path(_OWN, "staged", id)
        try:
            self.files.delete_dir(path)
        except OSError:
            if self._is_there(path):
                raise

    def _move(self, source: str, place: str) -> None:
        """Readers finish entries too, so somebody may have been quicker."""
        self.files.create_dir(posixpath.dirname(place), recursive=True)
        try:
            self.files.move(source, place)
        except OSError:
            if not self._is_there(place):
                raise

    def _staged(self, id: str) -> Iterator[str]:
        selector = fs.FileSelector(
            self._path(_OWN, "staged", id), recursive=True, allow_not_found=True
        )
        for one in self.files.get_file_info(selector):
            if one.path.endswith(".parquet") and not one.base_name.startswith(("_", ".")):
                yield one.path

    def _final_name(self, staged: str, id: str) -> str:
        """`topic=…/date=…/<id>-<Spark's task>-<its file>.parquet`: a task may fill several."""
        folder, name = posixpath.split(staged[len(self._path(_OWN, "staged", id)) + 1 :])
        found = _PART.match(name)
        if found is None:
            raise ArchiveInvalid(f"{staged} has no name as Spark gives to files", archive=self.url)
        return f"{folder}/{id}-{found['task']}-{found['file']}.parquet"

    # ---- what it holds

    def ends(self, entries: list[Entry] | None = None) -> Ends:
        found: Ends = {}
        for entry in self.entries() if entries is None else entries:
            for one in entry.ranges:
                place = (one.topic, one.uuid, one.partition)
                found[place] = max(found.get(place, 0), one.next)
        return found

    def urls(self, entries: list[Entry], topic: str) -> list[str]:
        """The files of a topic, for Spark."""
        folder = f"topic={topic}/"
        return [
            f"{self.url}/{name}"
            for entry in entries
            for name in entry.files
            if name.startswith(folder)
        ]

    def _check_new(self, entry: Entry, ends: Ends) -> None:
        """Two archives of one topic in one lake would hold its records twice."""
        for one in entry.ranges:
            end = ends.get((one.topic, one.uuid, one.partition), 0)
            if one.first < end:
                raise ArchiveInvalid(
                    f"{self.url} holds partition {one.partition} of {one.topic} up to offset "
                    f"{end}, and offset {one.first} was to be added: another run archives the "
                    "topic here; archive it once, or to another place",
                    archive=self.url,
                )

    def _read(self, path: str) -> Entry:
        try:
            with self.files.open_input_stream(path) as stream:
                return msgspec.json.decode(stream.read(), type=Entry)
        except (OSError, msgspec.MsgspecError) as error:
            raise ArchiveInvalid(f"{path} cannot be read: {error}", archive=self.url) from error

    def _is_there(self, path: str) -> bool:
        return bool(self.files.get_file_info(path).type != fs.FileType.NotFound)

    def _entry_path(self, id: str) -> str:
        return self._path(_OWN, "entries", f"{id}.json")

    def _path(self, *parts: str) -> str:
        return posixpath.join(self.root, *parts)
