"""Whether bytes of a file are in the page cache: what is not would be waited for.

Reading says it by RWF_NOWAIT, but copies what it finds. Here nothing is: the file is mapped for a
moment, and `mincore` looks which of its pages are there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

# What `mmap` answers when it fails.
_FAILED = ctypes.c_void_p(-1).value


class Residency:
    """The calls of the C library, which keep the interpreter: they take microseconds, and some
    tens of them where a hundred thousand pages are looked for."""

    __slots__ = ("_map", "_mincore", "_unmap")

    def __init__(self, library: ctypes.PyDLL) -> None:
        size, place, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
        self._map = library.mmap
        self._map.argtypes = (place, size, number, number, number, ctypes.c_int64)
        self._map.restype = place
        self._mincore = library.mincore
        self._mincore.argtypes = (place, size, ctypes.c_char_p)
        self._mincore.restype = number
        self._unmap = library.munmap
        self._unmap.argtypes = (place, size)
        self._unmap.restype = number

    def has_all(self, file: int, size: int, position: int) -> bool:
        """False also where the system does not tell."""
        before = position % mmap.PAGESIZE
        span = before + size
        at = self._map(None, span, mmap.PROT_READ, mmap.MAP_SHARED, file, position - before)
        if at is None or at == _FAILED:
            return False
        try:
            # A byte for each page.
            pages = ctypes.create_string_buffer(-(-span // mmap.PAGESIZE))
            return self._mincore(at, span, pages) == 0 and b"\0" not in pages.raw
        finally:
            self._unmap(at, span)


def residency() -> Residency | None:
    """None where `sendfile` is not Linux's, so that nobody has to know."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return None
    return Residency(ctypes.PyDLL(None))
