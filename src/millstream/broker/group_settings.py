"""What can be set for a group that receives by lease: one table.

A group keeps only what was set for it. In all else it follows its topics and the broker's
settings, also when those change. What was set stays when the group is not used for long; it goes
when the group is deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millstream.broker.topic_settings import VISIBILITY_MS_MAX, VISIBILITY_MS_MIN, Row, as_text
from millstream.errors import GroupSettingInvalid
from millstream.kinds import Duration, Integer

if TYPE_CHECKING:
    from collections.abc import Mapping

# As for the settings of the broker that these take the place of.
INFLIGHT_MAX = 10_000_000


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None was not set."""

    visibility_ms: int | None = None
    inflight_max: int | None = None
    member_inflight_max: int | None = None


TABLE = (
    Row(
        "visibility_ms",
        Duration(VISIBILITY_MS_MIN, VISIBILITY_MS_MAX),
        "How long a record that was received is a worker's own, whatever its topic says.",
    ),
    Row(
        "inflight_max",
        Integer(1, INFLIGHT_MAX),
        "How many records of the group may be leased or wait for a retry at a time.",
    ),
    Row(
        "member_inflight_max",
        Integer(1, INFLIGHT_MAX),
        "How many records a member of the group may have leased at a time.",
    ),
)
_BY_NAME = {row.name: row for row in TABLE}
assert tuple(_BY_NAME) == GroupSettings.__struct_fields__

NOTHING_SET = GroupSettings()


def changed(old: GroupSettings, changes: Mapping[str, object]) -> GroupSettings:
    """With values as they were sent, as numbers or as text such as `10m`; a None takes one out.
    Raises GroupSettingInvalid for the first wrong one."""
    parsed = {name: _parse(name, value) for name, value in changes.items()}
    return msgspec.structs.replace(old, **parsed)


def _parse(name: str, value: object) -> object:
    row = _BY_NAME.get(name)
    if row is None:
        raise GroupSettingInvalid(
            f"groups have no setting {name!r}; they have {', '.join(_BY_NAME)}",
            setting=name,
            value=value,
        )
    if value is None:
        return None
    try:
        return row.kind.parse(as_text(row.kind, value))
    except ValueError as error:
        raise GroupSettingInvalid(
            f"{name} = {value!r} {error}; use {row.kind.expects}", setting=name, value=value
        ) from None
