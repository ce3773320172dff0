"""What a run leaves beside its checkpoint, for `mill pipeline status` and for the next run.

<folder>/<name>/
  lock           held while a run goes on
  status.json    which pipeline with which options, how far it is, how it ended
  checkpoint/    Spark's own: where each query goes on
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from millstream.errors import PipelineInvalid, PipelineRunning, SettingInvalid

DEFAULT_FOLDER = "pipelines"
# How Spark writes folders of its own machine.
_FILE_URL = re.compile(r"^file:(?://)?(?=/(?!/))")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class QueryState(msgspec.Struct):
    """One streaming query of a run."""

    part: str
    id: str = ""
    batch: int = -1
    # Where it is, as the sources say it: a JSON text each.
    offsets: list[str] = []


class Status(msgspec.Struct):
    """What is known of the newest run under a name."""

    name: str
    pipeline: str
    state: str = "starting"  # starting, running, finished, stopped or failed
    started_ms: int = 0
    changed_ms: int = 0
    is_continuous: bool = False
    options: dict[str, str] = {}
    server: str = ""
    group: str = ""
    master: str = ""
    checkpoint: str = ""
    # Of this run; and of all runs with this checkpoint.
    records: int = 0
    records_ever: int = 0
    batches: int = 0
    behind: int | None = None
    queries: list[QueryState] = []
    results: list[str] = []
    error: str | None = None


@contextlib.contextmanager
def checkpoint_locked(checkpoint: str | None, name: str) -> Iterator[None]:
    """Nobody else runs with this checkpoint, under whatever name. Of one that is no folder of this
    machine nobody can say."""
    local = _FILE_URL.sub("", checkpoint or "")
    if checkpoint is None or ":/" in local:
        yield
        return
    with _lock_file(Path(local), "checkpoint", checkpoint) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PipelineRunning(
                f"another run has the checkpoint {checkpoint}; wait for it, stop it, or give "
                f"{name} another --checkpoint",
                name=name,
            ) from error
        yield


def _lock_file(folder: Path, flag: str, shown: str) -> IO[str]:
    """The file that is locked, in a folder that is made for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / "lock", "a", encoding="utf-8")
    except OSError as error:
        raise SettingInvalid(
            f"--{flag} is {shown!r}, and {folder} cannot be made or written: {error.strerror}",
            setting=flag,
            value=shown,
        ) from error


class RunFolder:
    """The folder of one name."""

    def __init__(self, folder: Path, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise SettingInvalid(
                f"--name is {name!r}; a run's name has letters, digits, `.`, `_` and `-`, at most "
                "100 of them",
                setting="name",
                value=name,
            )
        self.name = name
        self.path = folder / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs under this name: two runs would tear one checkpoint."""
        with _lock_file(self.path, "dir", str(self.path.parent)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PipelineRunning(
                    f"{self.name} runs already ({self.path}); wait for it, stop it, or run under "
                    "another --name",
                    name=self.name,
                ) from error
            yield

    def is_locked(self) -> bool:
        try:
            with open(self.path / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def read(self) -> Status | None:
        try:
            data = (self.path / "status.json").read_bytes()
        except FileNotFoundError:
            return None
        try:
            status = msgspec.json.decode(data, type=Status)
        except msgspec.MsgspecError as error:
            raise PipelineInvalid(
                f"{self.path / 'status.json'} cannot be read: {error}; remove it if the run is "
                "not needed",
                name=self.name,
            ) from error
        if status.state in ("starting", "running") and not self.is_locked():
            status.state = "died"
        return status

    def write(self, status: Status) -> None:
        write_whole(self.path / "status.json", msgspec.json.format(msgspec.json.encode(status)))

    def put_back(self, before: Status | None) -> None:
        """What `read` answered, instead of what was written since."""
        if before is None:
            (self.path / "status.json").unlink(missing_ok=True)
        else:
            self.write(before)


def write_whole(path: Path, data: bytes) -> None:
    """All of it or what was there before, so that nobody ever meets half of it; and on disk, for
    what the broker is told next counts on it."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_runs(folder: Path) -> list[RunFolder]:
    """Every name that was run from this folder."""
    if not folder.is_dir():
        return []
    return [
        RunFolder(folder, one.name)
        for one in sorted(folder.iterdir())
        if (one / "status.json").exists() and _NAME.fullmatch(one.name)
    ]
