"""The hash of keys, in both twins; the vectors of others are in tests/wire."""

from __future__ import annotations

from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st

from log.batch_twins import PURE, both_twins


@both_twins
@given(key=st.binary(max_size=100))
def test_both_twins_give_the_same_hash(twin: ModuleType, key: bytes) -> None:
    number = twin.murmur2(key)
    assert number == PURE.murmur2(key)
    assert 0 <= number < 2**32


@both_twins
def test_a_known_hash(twin: ModuleType) -> None:
    assert twin.murmur2(b"abc") == 479470107
