"""Bodies of staged entries: how large they may be."""

from __future__ import annotations

from millstream.log.batch import encode
from millstream.wire.staged import BODY_BYTES_MAX, StagedEntry, is_too_large, join_entries


def entry(size: int) -> StagedEntry:
    return StagedEntry("orders", 0, 0, encode([(0, None, b"x" * size, ())]))


def test_several_entries_are_bounded_and_one_is_not() -> None:
    large = entry(BODY_BYTES_MAX)
    assert not is_too_large(join_entries([large]))
    assert is_too_large(join_entries([large, entry(1)]))
    assert is_too_large(join_entries([entry(1), large]))
    assert not is_too_large(join_entries([entry(BODY_BYTES_MAX // 2), entry(1)]))
    assert is_too_large(bytes(BODY_BYTES_MAX + 1))
