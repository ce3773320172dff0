"""What a child process of the broker does around its work. The parent's side: `engine/child.py`."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec

from millstream.log.disk import Disk, SystemDisk

if TYPE_CHECKING:
    from collections.abc import Callable

Job = TypeVar("Job", bound=msgspec.Struct)


def work_for_parent(kind: type[Job], work: Callable[[Disk, Job], msgspec.Struct]) -> None:
    """A job, one line on standard input; its result on standard output."""
    os.nice(10)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(work(SystemDisk(), job)))


def _end_with_parent() -> None:
    """Standard input ends when the broker does, however it does. The next one must find nobody
    at work on its files."""
    while os.read(0, 1):
        pass
    os._exit(1)
