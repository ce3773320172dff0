"""The table of offsets: the same as a dictionary, by any changes, and as good as new from its own
entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from log.effort import effort
from millstream.broker.group_settings import GroupSettings
from millstream.broker.offset_table import (
    Mark,
    OffsetTable,
    group_key,
    group_value,
    offset_key,
    offset_value,
    settings_key,
    settings_value,
)

A, B = bytes(range(16)), bytes(range(16, 32))
GROUPS = st.sampled_from(["g", "group-2", "ä"])

KEYS = st.one_of(
    st.builds(offset_key, GROUPS, st.sampled_from([A, B]), st.sampled_from([0, 1, 2, 7, 400])),
    st.builds(group_key, GROUPS),
    st.builds(settings_key, GROUPS),
)
OFFSETS = st.builds(
    offset_value,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["", "text", "ü" * 100, "a\0b", "\0007"]),
    st.sampled_from([-1, 0, 7, 2**31 - 1]),
)
MARKS = st.builds(
    lambda generation, ms: group_value(Mark(generation, ms)),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
SETTINGS = st.builds(
    lambda ms, most: settings_value(GroupSettings(visibility_ms=ms, inflight_max=most)),
    st.one_of(st.none(), st.integers(100, 1000)),
    st.one_of(st.none(), st.integers(1, 1000)),
)
VALUES = {1: OFFSETS, 2: MARKS, 3: SETTINGS}


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[bytes, bytes | None]]:
    made = []
    for key in draw(st.lists(KEYS, max_size=30)):
        value = draw(st.one_of(st.none(), VALUES[key[0]]))
        made.append((key, value))
    return made


@effort(100)
@given(changes(), st.lists(KEYS, max_size=5))
def test_a_table_is_a_dictionary(
    made: list[tuple[bytes, bytes | None]], asked: list[bytes]
) -> None:
    table = OffsetTable("offsets")
    model: dict[bytes, bytes] = {}
    # Some at a time, as turns of the loop do; the rest at once, as a start does.
    for one in made[:5]:
        table.apply([one])
    table.apply(made[5:])
    for key, value in made:
        if value is None:
            model.pop(key, None)
        else:
            model[key] = value
    assert dict(table.entries()) == model
    assert [table.value_of(key) for key in asked] == [model.get(key) for key in asked]
    assert table.count == sum(key[0] == 1 for key in model)
    again = OffsetTable("offsets")
    again.apply(table.entries())
    assert dict(again.entries()) == model
    names = {(key[21:] if key[0] == 1 else key[1:]).decode() for key in model}
    assert set(table.groups()) == names


def test_it_is_read_by_group_and_by_topic() -> None:
    table = OffsetTable("offsets")
    table.apply(
        [
            (offset_key("g", A, 5), offset_value(50, 1000, "")),
            (offset_key("g", A, 3), offset_value(30, 3000, "x")),
            (offset_key("g", B, 0), offset_value(1, 2000, "")),
            (offset_key("h", A, 0), offset_value(2, 9, "")),
            (group_key("idle"), group_value(Mark(7, 4000))),
        ]
    )
    assert [(one.partition, one.offset) for one in table.of_topic("g", A)] == [(3, 30), (5, 50)]
    assert len(list(table.of_group("g"))) == 3
    assert table.get("g", A, 4) is None
    assert table.get("g", A, 6) is None
    found = table.get("g", A, 3)
    assert found is not None
    assert found.metadata == "x"
    assert table.newest_ms("g") == 3000
    assert table.newest_ms("idle") == 4000
    assert table.mark("idle") == Mark(7, 4000)
    assert table.has_group("idle")
    assert not table.has_group("nobody")


def test_an_epoch_lasts_until_a_commit_without_one() -> None:
    table = OffsetTable("offsets")
    key = offset_key("g", A, 1)

    def epoch() -> int | None:
        found = table.get("g", A, 1)
        return None if found is None else found.leader_epoch

    table.apply([(offset_key("g", A, 0), offset_value(1, 0, "")), (key, offset_value(1, 0, "", 4))])
    assert epoch() == 4
    table.apply([(key, offset_value(2, 0, ""))])
    assert epoch() == -1
    table.apply([(key, None), (key, offset_value(2, 0, "", 0))])
    assert epoch() == 0
    other = table.get("g", A, 0)
    assert other is not None
    assert other.leader_epoch == -1


def test_values_without_an_epoch_are_as_they_always_were() -> None:
    """What is on disk stays readable, and a broker from before reads an epoch as metadata."""
    assert offset_value(2, 3, "note") == b"\1" + bytes(7) + b"\2" + bytes(7) + b"\3note"
    assert offset_value(2, 3, "note", 5)[1:] == offset_value(2, 3, "note\0" + "5")[1:]


def test_what_lies_past_an_end_or_in_no_topic_is_found() -> None:
    table = OffsetTable("offsets")
    table.apply((offset_key("g", A, n), offset_value(10 * n, 0, "")) for n in range(4))
    table.apply([(offset_key("g", B, 2), offset_value(5, 0, ""))])
    past = list(table.past_ends({A: [0, 10, 19, 30], B: [0]}))
    assert [(group, one.partition, end) for group, one, end in past] == [("g", 2, 19)]
    assert list(table.orphans(frozenset({A}))) == [offset_key("g", B, 2)]
