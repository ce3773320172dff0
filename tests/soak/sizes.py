"""How much load these tests make: little by default, much with `make test-soak`."""

from __future__ import annotations

import os
import resource

IS_FULL = os.environ.get("MILLSTREAM_SOAK") == "full"


def sized(small: int, full: int) -> int:
    return full if IS_FULL else small


def raise_open_files(wanted: int) -> bool:
    """Let this process have so many files open; whether it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return False
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True
