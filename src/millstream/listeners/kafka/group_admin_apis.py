"""Groups as administrators see them: DescribeGroups, ListGroups, DeleteGroups.

All groups are shown, whatever their members speak. Members of HTTP, and of Kafka's consumer
protocol, are described as if they had agreed on their partitions by themselves: that is what the
tools of people can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin.groups import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)

from millstream.engine.pending import Pending, follow
from millstream.errors import GroupUnknown, MillstreamError
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.codes import message_of
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.consumer_protocol import assignment, subscription

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from millstream.broker.classic_values import ClassicFacts, ClassicState
    from millstream.broker.group_values import (
        GroupFacts,
        GroupProtocol,
        GroupSummary,
        MemberFacts,
    )
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.context import Context
    from millstream.log.partition import PartitionId

# As Kafka calls what a group is at.
STATES: Mapping[ClassicState, str] = {
    "empty": "Empty",
    "preparing": "PreparingRebalance",
    "completing": "CompletingRebalance",
    "stable": "Stable",
}
OTHER_STATES = {"empty": "Empty", "stable": "Stable", "rebalancing": "Reconciling"}
DEAD = "Dead"
CONSUMER, SHARE, CLASSIC = "consumer", "share", "classic"
# What one may do, as a set of bits; the last alone says that it is not told: there is no access
# control.
NOT_KNOWN = frozenset((31,))
UNKNOWN_IS_AN_ERROR_FROM = 6
# Groups that are looked at in one turn of the loop.
IN_TURN = 100


def group_admin_apis(context: Context) -> list[Api]:
    return [
        control(DescribeGroupsRequest, (0, 6), lambda call, asked: describe(context, call, asked)),
        control(ListGroupsRequest, (0, 5), lambda call, asked: list_groups(context, call, asked)),
        control(DeleteGroupsRequest, (0, 2), lambda _, asked: delete(context, asked)),
    ]


# ---- DescribeGroups


def describe(context: Context, call: Call, asked: Any) -> Pending[Any]:
    return follow(_describe(context, call, asked))


def _describe(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    groups = []
    for at, name in enumerate(dict.fromkeys(asked.groups)):
        if at and at % IN_TURN == 0:
            yield context.pause()
        try:
            facts = yield context.broker.directory.describe(name)
            groups.append(_described(context, name, facts))
        except MillstreamError as error:
            groups.append(_not_described(context, call, name, error))
    return DescribeGroupsResponse(throttle_time_ms=0, groups=groups)


def _described(context: Context, name: str, facts: GroupFacts) -> Any:
    classic = context.broker.classic_groups.facts(name)
    if classic is not None:
        return _of_classic(name, classic)
    summary = facts.summary
    return _group(
        name,
        state=OTHER_STATES[summary.state],
        protocol_type=_protocol_type(context, summary),
        protocol=summary.assignor if facts.members else "",
        members=[_of_other(one) for one in facts.members],
    )


def _of_classic(name: str, facts: ClassicFacts) -> Any:
    Member = DescribeGroupsResponse.DescribedGroup.DescribedGroupMember  # noqa: N806  a class
    members = [
        Member(
            member_id=one.member_id,
            group_instance_id=one.instance_id,
            client_id=one.client_id,
            client_host=one.host,
            member_metadata=one.metadata,
            member_assignment=one.assignment,
        )
        for one in facts.members
    ]
    return _group(
        name,
        state=STATES[facts.state],
        protocol_type=facts.protocol_type,
        protocol=facts.protocol if facts.state == "stable" else "",
        members=members,
    )


def _of_other(member: MemberFacts) -> Any:
    Member = DescribeGroupsResponse.DescribedGroup.DescribedGroupMember  # noqa: N806  a class
    return Member(
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        client_id=member.client_id,
        client_host="",
        member_metadata=subscription(member.topics),
        member_assignment=assignment(_by_topic(member.assignment)),
    )


def _by_topic(ids: Iterable[PartitionId]) -> list[tuple[str, list[int]]]:
    found = groupby(sorted(ids), lambda one: one.topic)
    return [(topic, [one.number for one in ones]) for topic, ones in found]


def _not_described(context: Context, call: Call, name: str, error: MillstreamError) -> Any:
    if isinstance(error, GroupUnknown) and call.version < UNKNOWN_IS_AN_ERROR_FROM:
        return _group(name, state=DEAD)
    return _group(name, state=DEAD, code=context.coordinator_code(error), why=message_of(error))


def _group(
    name: str,
    *,
    state: str,
    protocol_type: str = "",
    protocol: str = "",
    members: list[Any] | None = None,
    code: Code = Code.NONE,
    why: str | None = None,
) -> Any:
    return DescribeGroupsResponse.DescribedGroup(
        error_code=code,
        error_message=why,
        group_id=name,
        group_state=state,
        protocol_type=protocol_type,
        protocol_data=protocol,
        members=members or [],
        authorized_operations=NOT_KNOWN,
    )


# ---- ListGroups


def list_groups(context: Context, call: Call, asked: Any) -> Pending[Any]:
    return follow(_list(context, call, asked))


def _list(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    states = {one.lower() for one in asked.states_filter or ()} if call.version >= 4 else set()
    types = {one.lower() for one in asked.types_filter or ()} if call.version >= 5 else set()
    try:
        summaries: list[GroupSummary] = yield context.broker.directory.summaries()
    except MillstreamError as error:
        code = context.coordinator_code(error)
        return ListGroupsResponse(throttle_time_ms=0, error_code=code, groups=[])
    Group = ListGroupsResponse.ListedGroup  # noqa: N806  a class
    groups = []
    for one in summaries:
        kind = _type(context, one)
        classic = context.broker.classic_groups.facts(one.group)
        if classic is not None:
            state, protocol_type = STATES[classic.state], classic.protocol_type
        else:
            state, protocol_type = OTHER_STATES[one.state], _protocol_type(context, one)
        if (states and state.lower() not in states) or (types and kind not in types):
            continue
        groups.append(
            Group(
                group_id=one.group, protocol_type=protocol_type, group_state=state, group_type=kind
            )
        )
    return ListGroupsResponse(throttle_time_ms=0, error_code=Code.NONE, groups=groups)


def _protocol(context: Context, summary: GroupSummary) -> GroupProtocol | None:
    """An empty group is what it was."""
    return summary.protocol or context.broker.directory.last_protocol(summary.group)


def _type(context: Context, summary: GroupSummary) -> str:
    protocol = _protocol(context, summary)
    return CONSUMER if protocol == "http" else protocol or CLASSIC


def _protocol_type(context: Context, summary: GroupSummary) -> str:
    """Of any but a classic group: those may be of other things than consumers."""
    return SHARE if _protocol(context, summary) == "share" else CONSUMER


# ---- DeleteGroups


def delete(context: Context, asked: Any) -> Pending[Any]:
    return follow(_delete(context, asked))


def _delete(context: Context, asked: Any) -> Generator[Pending[Any], Any, Any]:
    Result = DeleteGroupsResponse.DeletableGroupResult  # noqa: N806  a class
    results = []
    for at, name in enumerate(dict.fromkeys(asked.groups_names)):
        if at and at % IN_TURN == 0:
            yield context.pause()
        code = Code.NONE
        try:
            yield context.broker.groups.delete(name)
        except MillstreamError as error:
            code = context.coordinator_code(error)
        results.append(Result(group_id=name, error_code=code))
    return DeleteGroupsResponse(throttle_time_ms=0, results=results)
