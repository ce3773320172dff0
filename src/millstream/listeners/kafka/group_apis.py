"""Classic groups: JoinGroup, SyncGroup, Heartbeat, LeaveGroup.

Their members deal out partitions among themselves; the broker brings them together
(`broker.classic_groups`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer.group import (
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

from millstream.broker.classic_groups import Hurry
from millstream.broker.classic_values import ClassicJoin, ClassicSync
from millstream.engine.pending import Pending, follow
from millstream.errors import MemberIdRequired, MillstreamError, ParameterInvalid
from millstream.listeners.kafka.apis import Api, control
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.heartbeat import FLEXIBLE, VERSIONS, heartbeat_answer, read_heartbeat

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.classic_values import ClassicJoined, ClassicSynced
    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context

HEARTBEAT = 12
# From these versions on a new member is first given its id; may skip dealing out; names its
# protocol in more places.
KNOWN_ID_FROM = 4
SKIP_FROM = 9
NAMED_FROM = 7


def group_apis(context: Context) -> list[Api]:
    return [
        control(JoinGroupRequest, (0, 9), lambda call, asked: join(context, call, asked)),
        control(SyncGroupRequest, (0, 5), lambda call, asked: sync(context, call, asked)),
        Api(HEARTBEAT, "Heartbeat", VERSIONS, FLEXIBLE, lambda call: heartbeat(context, call)),
        control(LeaveGroupRequest, (0, 5), lambda call, asked: leave(context, call, asked)),
    ]


# ---- JoinGroup


def join(context: Context, call: Call, asked: Any) -> Pending[Any]:
    return follow(_join(context, call, asked))


def _join(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    wish = ClassicJoin(
        asked.member_id or None,
        asked.protocol_type,
        tuple((one.name, bytes(one.metadata or b"")) for one in asked.protocols),
        asked.session_timeout_ms,
        asked.rebalance_timeout_ms if call.version >= 1 else asked.session_timeout_ms,
        client_id=call.client_id,
        host=call.peer,
        instance_id=asked.group_instance_id if call.version >= 5 else None,
        must_know_id=call.version >= KNOWN_ID_FROM,
        can_skip=call.version >= SKIP_FROM,
    )
    call.on_hurry = hurry = Hurry()
    try:
        joined = yield context.broker.classic_groups.join(asked.group_id, wish, hurry)
    except MillstreamError as error:
        return _not_joined(context, call, error, asked.member_id)
    return _joined(call, joined)


def _joined(call: Call, joined: ClassicJoined) -> Any:
    Member = JoinGroupResponse.JoinGroupResponseMember  # noqa: N806  a class
    return JoinGroupResponse(
        throttle_time_ms=0,
        error_code=Code.NONE,
        generation_id=joined.generation,
        protocol_type=joined.protocol_type if call.version >= NAMED_FROM else None,
        protocol_name=joined.protocol,
        leader=joined.leader,
        skip_assignment=joined.is_skipped,
        member_id=joined.member_id,
        members=[
            Member(
                member_id=one.member_id, group_instance_id=one.instance_id, metadata=one.metadata
            )
            for one in joined.members
        ],
    )


def _not_joined(context: Context, call: Call, error: MillstreamError, member_id: str) -> Any:
    if isinstance(error, MemberIdRequired):
        member_id = str(error.fields["member_id"])
    if isinstance(error, ParameterInvalid) and error.fields["parameter"] == "session_timeout_ms":
        code = context.count(Code.INVALID_SESSION_TIMEOUT)
    else:
        code = context.coordinator_code(error)
    return JoinGroupResponse(
        throttle_time_ms=0,
        error_code=code,
        generation_id=-1,
        protocol_type=None,
        protocol_name=None if call.version >= NAMED_FROM else "",
        leader="",
        skip_assignment=False,
        member_id=member_id,
        members=[],
    )


# ---- SyncGroup


def sync(context: Context, call: Call, asked: Any) -> Pending[Any]:
    return follow(_sync(context, call, asked))


def _sync(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    says_protocol = call.version >= 5
    wish = ClassicSync(
        asked.member_id,
        asked.generation_id,
        asked.group_instance_id if call.version >= 3 else None,
        asked.protocol_type if says_protocol else None,
        asked.protocol_name if says_protocol else None,
        tuple((one.member_id, bytes(one.assignment or b"")) for one in asked.assignments),
    )
    call.on_hurry = hurry = Hurry()
    groups = context.broker.classic_groups
    try:
        synced: ClassicSynced = yield groups.sync(asked.group_id, wish, hurry)
    except MillstreamError as error:
        return SyncGroupResponse(
            throttle_time_ms=0,
            error_code=context.coordinator_code(error),
            protocol_type=None,
            protocol_name=None,
            assignment=b"",
        )
    return SyncGroupResponse(
        throttle_time_ms=0,
        error_code=Code.NONE,
        protocol_type=synced.protocol_type,
        protocol_name=synced.protocol,
        assignment=synced.assignment,
    )


# ---- Heartbeat and LeaveGroup


def heartbeat(context: Context, call: Call) -> Reply:
    asked = read_heartbeat(call.body, call.version)
    code = Code.NONE
    try:
        context.broker.classic_groups.heartbeat(
            asked.group, asked.member_id, asked.generation, asked.instance_id
        )
    except MillstreamError as error:
        code = context.coordinator_code(error)
    return heartbeat_answer(call.version, code)


def leave(context: Context, call: Call, asked: Any) -> Any:
    has_many = call.version >= 3
    if has_many:
        leaving = [(one.member_id, one.group_instance_id) for one in asked.members]
    else:
        leaving = [(asked.member_id, None)]
    code = Code.NONE
    try:
        outcomes = context.broker.classic_groups.leave(asked.group_id, leaving)
    except MillstreamError as error:
        return LeaveGroupResponse(
            throttle_time_ms=0, error_code=context.coordinator_code(error), members=[]
        )
    codes = [Code.NONE if one is None else context.coordinator_code(one) for one in outcomes]
    if not has_many:
        code = codes[0]
    Member = LeaveGroupResponse.MemberResponse  # noqa: N806  a class
    members = [
        Member(member_id=member_id, group_instance_id=instance_id, error_code=one)
        for (member_id, instance_id), one in zip(leaving, codes, strict=True)
    ]
    return LeaveGroupResponse(throttle_time_ms=0, error_code=code, members=members)
