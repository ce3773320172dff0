"""Both implementations of the batch codec, and the records that their tests are made of."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from hypothesis import strategies as st

from millstream.log import _batch_pure

Fields: TypeAlias = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]

PURE: ModuleType = _batch_pure
COMPILED: ModuleType | None
try:
    COMPILED = importlib.import_module("millstream.log._batch")
except ImportError:
    COMPILED = None

needs_compiled = pytest.mark.skipif(COMPILED is None, reason="the compiled twin is not built")
both_twins = pytest.mark.parametrize(
    "twin",
    [
        pytest.param(PURE, id="pure"),
        pytest.param(COMPILED, id="compiled", marks=needs_compiled),
    ],
)

timestamps = st.integers(0, 2**42)
contents = st.none() | st.binary(max_size=80)
names = st.text(max_size=8)
headers = st.lists(st.tuples(names, contents), max_size=3)
fields = st.tuples(timestamps, contents, contents, headers)
several_fields = st.lists(fields, min_size=1, max_size=20)


def plain(records: Any) -> list[tuple[int, Fields]]:
    """Any codec's records as tuples that can be compared."""
    return [
        (
            record.offset,
            (
                record.timestamp,
                record.key,
                record.value,
                [(name, content) for name, content in record.headers],
            ),
        )
        for record in records
    ]


def numbered(records: list[Fields], base_offset: int = 0) -> list[tuple[int, Fields]]:
    return list(enumerate(records, base_offset))


def some_fields(count: int) -> list[Fields]:
    """Records with and without each thing that a record can lack."""
    return [
        (
            1_700_000_000_000 + index,
            None if index % 3 == 0 else b"key-%d" % index,
            None if index % 5 == 4 else b"value-%d " % index * 8,
            [("ms-lane", b"high"), ("empty", b""), ("none", None)][: index % 4],
        )
        for index in range(count)
    ]
