"""A value of JSON means the same whatever stands beside it."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ValueInvalid
from millstream.spark.typed_values import CORRUPT, Values

ITEM = pa.field("element", pa.int32())
KINDS = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal": pa.decimal128(12, 3),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "time": pa.time64("ns"),
    "interval": pa.duration("us"),
    "array": pa.list_(ITEM),
    "dates": pa.list_(pa.date32()),
    "struct": pa.struct([("a", pa.int32()), ("at", pa.timestamp("us", "UTC"))]),
    "days": pa.struct([("on", pa.date32())]),
    "map": pa.map_(pa.string(), pa.int64()),
}
MISFIT = b"nope"

_digits = st.text("0123456789", min_size=1, max_size=25)
_numbers = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.tuples(_digits, _digits).map(lambda two: f"{int(two[0])}.{two[1]}"),
    st.tuples(_digits, st.integers(-420, 420)).map(lambda two: f"{int(two[0])}e{two[1]}"),
    st.sampled_from(["-0", "-0.0", "1E5", "2147483648", "16777217.00000000001", "9" * 400]),
)
_times = st.tuples(
    st.sampled_from(["2026-01-01", "0000-02-29", "9999-12-31", "2026-02-30", "2026-1-1", ""]),
    st.sampled_from(["", " ", "T", " 00:00:00", "T01:02", "T01", "T01:02:03.123456", "T24:00:00"]),
    st.sampled_from(["", "Z", "+01:00", "-0230", "+05", ".1234567", " UTC"]),
).map("".join)
_texts = st.one_of(
    st.text(max_size=8),
    _numbers,
    _times,
    st.sampled_from(["01:02:03", "01:02", "01:02:03.123456789", "true", "+1", ".5", "5.", " 1"]),
).map(json.dumps)
_scalars = st.one_of(_numbers, _texts, st.sampled_from(["true", "false", "null", '"\\ud800"']))
_odd = st.sampled_from(["NaN", "Infinity", "1e400", "[" * 3000 + "]" * 3000, "9" * 5000])
_listed = st.lists(_scalars, max_size=3).map(lambda found: f"[{','.join(found)}]")
_named = st.dictionaries(st.sampled_from(["a", "at", "on", "b"]), _scalars, max_size=3).map(
    lambda found: "{" + ",".join(f'"{name}":{value}' for name, value in found.items()) + "}"
)
ANY = st.one_of(_scalars, _scalars, _listed, _named)


def read(values: list[bytes | None], kind: Any, **more: Any) -> list[tuple[Any, str | None]]:
    reader = Values("json", kind, more.get("is_failing_fast", False), ("orders", 2))
    made = reader.read(pa.array(values, pa.binary()), pa.array(range(len(values)), pa.int64()))
    assert made["value"].type == kind
    made["value"].validate(full=True)
    # As they are stored: Python has no datetime for each.
    shown = [str(one) for one in made["value"].cast(_plain(kind)).to_pylist()]
    return list(zip(shown, made[CORRUPT].to_pylist(), strict=True))


def _plain(kind: Any) -> Any:
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_plain(one.type)) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_date(kind):
        return pa.int32()
    is_time = pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind)
    return pa.int64() if is_time else kind


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(text=st.one_of(ANY, _odd))
def test_a_value_is_the_same_alone_and_beside_one_that_does_not_fit(kind: Any, text: str) -> None:
    schema = pa.struct([("v", kind)])
    value = b'{"v":' + text.encode() + b"}"
    alone = read([value], schema)
    assert read([value, MISFIT], schema)[:1] == alone
    assert read([MISFIT, b"{}", value], schema)[2:] == alone


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(text=ANY.filter(lambda text: "ud800" not in text))
def test_a_field_is_the_same_beside_a_field_that_does_not_fit(kind: Any, text: str) -> None:
    schema = pa.struct([("v", kind), ("other", pa.int32())])
    fits = read([b'{"v":%s,"other":null}' % text.encode()], schema)
    does_not = read([b'{"v":%s,"other":"x"}' % text.encode()], schema)
    assert does_not[0][0] == fits[0][0]
    assert does_not[0][1] is not None


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("timestamp", '"2026-01-01 00:00:00"', 1767225600_000000),
        ("timestamp", '"2026-01-01"', 1767225600_000000),
        ("timestamp", '"2026-01-01T01:00:00+01:00"', 1767225600_000000),
        ("timestamp_ntz", '"2026-01-01 00:00:00"', 1767225600_000000),
        ("date", '"2026-01-01"', 20454),
        ("time", '"00:00:01"', 10**9),
        ("binary", '"a\\u00e4"', "aä".encode()),
        ("string", "1.10", "1.10"),
        ("string", '{"a": 1.10}', '{"a":1.10}'),
        ("map", '{"a": 1}', [("a", 1)]),
        ("double", "9" * 400, float("inf")),
        ("decimal", "999999999.5", Decimal("999999999.500")),
        ("decimal", "1000000000", None),
        ("double", "-0", -0.0),
        ("float", "-0.0", -0.0),
        ("bigint", "-0", 0),
        ("string", "-0", "-0"),
        ("string", "[-0, -1]", "[-0,-1]"),
        ("string", '"-0"', "-0"),
    ],
)
def test_each_type_is_read_as_it_is_written(kind: str, text: str, expected: object) -> None:
    schema = pa.struct([("v", KINDS[kind])])
    value = b'{"v":' + text.encode() + b"}"
    for beside in ([], [MISFIT]):
        assert read([value, *beside], schema)[0][0] == str({"v": expected})


def test_a_decimal_keeps_its_digits_beside_one_that_does_not_fit() -> None:
    schema = pa.struct([("v", pa.decimal128(38, 19))])
    value = b'{"v":0.1234567890123456789}'
    assert read([value, MISFIT], schema)[0] == read([value], schema)[0]
    assert "0.1234567890123456789" in read([value, MISFIT], schema)[0][0]


NOT_UTF_8 = [b'{"v":"\xff"}', b'{"x":"\xff"}', b'{"\xff":1}', b'{"v":"\xed\xa0\x80"}']


@pytest.mark.parametrize("value", NOT_UTF_8)
@pytest.mark.parametrize("beside", [[], [b'{"v":"a"}'], [MISFIT]])
def test_what_is_not_utf_8_is_corrupt_or_refused(value: bytes, beside: list[bytes]) -> None:
    schema = pa.struct([("v", pa.string())])
    found = read([value, *beside], schema)
    assert found[0] == ("None", value.decode("utf-8", "replace"))
    with pytest.raises(ValueInvalid) as caught:
        read([value, *beside], schema, is_failing_fast=True)
    assert caught.value.fields["offset"] == 0


def test_nothing_that_is_nested_or_long_ends_a_query() -> None:
    schema = pa.struct([("v", pa.int64())])
    deep = b'{"v":"x","d":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    large = b'{"v":"x","d":1e99999999999999999999}'
    for value in (deep, large):
        assert read([value, b'{"v":1}'], schema)[1] == (str({"v": 1}), None)
        assert read([value], schema)[0][1] is not None
