"""Entries as they travel: whatever comes is read as they are, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.effort import effort
from millstream.errors import BatchInvalid, BodyInvalid
from millstream.log import batch as batches
from millstream.wire.staged import (
    BODY_BYTES_MAX,
    StagedEntry,
    is_too_large,
    join_entries,
    split_entries,
)

ENTRIES = st.lists(
    st.builds(
        StagedEntry,
        st.text(max_size=300),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=100).map(lambda value: batches.encode([(1, None, value, ())])),
    ),
    max_size=5,
)


@effort(100)
@given(ENTRIES)
def test_what_is_joined_is_split_again(entries: list[StagedEntry]) -> None:
    assert split_entries(join_entries(entries)) == entries


@effort(200)
@given(ENTRIES, st.data())
def test_what_is_bent_is_refused_or_read(entries: list[StagedEntry], data: st.DataObject) -> None:
    body = bytearray(join_entries(entries))
    for _ in range(data.draw(st.integers(1, 4))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] + data.draw(st.binary(max_size=20))
    try:
        found = split_entries(bytes(body))
    except (BodyInvalid, BatchInvalid):
        return
    assert join_entries(found) == bytes(body)


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True)])
def test_several_entries_have_a_limit_together(more: int, refused: bool) -> None:
    room = BODY_BYTES_MAX - len(join_entries([entry(b""), entry(b"")]))
    value = b"x" * (room - 200)
    entries = [entry(value), entry(b"")]
    left = BODY_BYTES_MAX - len(join_entries(entries))
    entries[1] = entry(b"y" * (left + more))
    body = join_entries(entries)
    # A longer value has a longer length before it.
    body_bytes = BODY_BYTES_MAX + more
    entries[1] = entry(b"y" * (left + more - (len(body) - body_bytes)))
    body = join_entries(entries)
    assert len(body) == body_bytes
    assert is_too_large(body) is refused


def test_one_entry_alone_has_none() -> None:
    assert not is_too_large(join_entries([entry(b"x" * (BODY_BYTES_MAX + 1))]))
    assert is_too_large(bytes(BODY_BYTES_MAX + 1))


def entry(value: bytes) -> StagedEntry:
    return StagedEntry("t", 0, 0, batches.encode([(1, None, value, ())]))
