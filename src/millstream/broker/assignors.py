"""Which member gets which partition: three ways, each a function without state.

    range        of each topic, a run of neighbouring partitions for each member
    round_robin  all partitions of all topics in order, dealt out in turn
    sticky       as even as can be, and everybody keeps as much as possible of what he had

Each gives every partition to exactly one of the members that want its topic, the same for the
same input, whatever the order in which members came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heapify, heapreplace
from itertools import groupby
from typing import NamedTuple, TypeAlias

from millstream.broker.group_values import Assignor
from millstream.log.partition import PartitionId


class Wish(NamedTuple):
    """What an assignor knows of a member."""

    topics: frozenset[str]
    # What it has now; only `sticky` cares.
    had: frozenset[PartitionId] = frozenset()


# Members by a name that is stable over time: the instance id, or the member id.
Wishes: TypeAlias = Mapping[str, Wish]
# How many partitions each topic has.
Counts: TypeAlias = Mapping[str, int]
Assignment: TypeAlias = dict[str, set[PartitionId]]


def assign(assignor: Assignor, wishes: Wishes, counts: Counts) -> Assignment:
    return _FUNCTIONS[assignor](wishes, counts)


def _range(wishes: Wishes, counts: Counts) -> Assignment:
    assignment: Assignment = {member: set() for member in wishes}
    for topic, members in _subscribers(wishes, counts).items():
        share, extra = divmod(counts[topic], len(members))
        first = 0
        for place, member in enumerate(members):
            end = first + share + (place < extra)
            assignment[member].update(PartitionId(topic, n) for n in range(first, end))
            first = end
    return assignment


def _round_robin(wishes: Wishes, counts: Counts) -> Assignment:
    assignment: Assignment = {member: set() for member in wishes}
    turn = deque(sorted(wishes))
    for topic, members in _subscribers(wishes, counts).items():
        wanting = set(members)
        for number in range(counts[topic]):
            while turn[0] not in wanting:
                turn.rotate(-1)
            assignment[turn[0]].add(PartitionId(topic, number))
            turn.rotate(-1)
    return assignment


def _sticky(wishes: Wishes, counts: Counts) -> Assignment:
    subscribers = _subscribers(wishes, counts)
    assignment, homeless = _kept(wishes, counts)
    if all(len(members) == len(wishes) for members in subscribers.values()):
        total = sum(counts[topic] for topic in subscribers)
        _level_alike(assignment, homeless, total)
    else:
        _level_mixed(assignment, homeless, subscribers)
    return assignment


def _kept(wishes: Wishes, counts: Counts) -> tuple[Assignment, list[PartitionId]]:
    """Everybody with what it had and still wants, and what nobody has."""
    assignment: Assignment = {}
    taken: set[PartitionId] = set()
    for member in sorted(wishes):
        topics, had = wishes[member]
        mine = {
            one
            for one in had
            if one.topic in topics and one.number < counts.get(one.topic, 0) and one not in taken
        }
        taken |= mine
        assignment[member] = mine
    wanted = _subscribers(wishes, counts)
    homeless = [
        one
        for topic in wanted
        for number in range(counts[topic])
        if (one := PartitionId(topic, number)) not in taken
    ]
    return assignment, homeless


def _level_alike(assignment: Assignment, homeless: list[PartitionId], total: int) -> None:
    """All want the same topics: each ends with its share, and the first few with one more. Who
    has most now is first, so that the fewest move."""
    if not assignment:
        return
    share, extra = divmod(total, len(assignment))
    order = sorted(assignment, key=lambda member: (-len(assignment[member]), member))
    shares = {member: share + (place < extra) for place, member in enumerate(order)}
    for member in order:
        mine = assignment[member]
        for one in sorted(mine)[shares[member] :]:
            mine.discard(one)
            homeless.append(one)
    homeless.sort()
    rest = deque(homeless)
    for member in order:
        mine = assignment[member]
        while len(mine) < shares[member]:
            mine.add(rest.popleft())


def _level_mixed(
    assignment: Assignment, homeless: list[PartitionId], subscribers: Mapping[str, list[str]]
) -> None:
    """Members want different topics: what is free goes to who has least, then partitions move
    as long as that makes two members more even. Each move makes the sum of squares smaller, so
    there is an end to it."""
    for topic, free in groupby(homeless, lambda one: one.topic):
        least_first = [(len(assignment[member]), member) for member in subscribers[topic]]
        heapify(least_first)
        for one in free:
            size, member = least_first[0]
            assignment[member].add(one)
            heapreplace(least_first, (size + 1, member))
    while _move_some(assignment, subscribers):
        pass


def _move_some(assignment: Assignment, subscribers: Mapping[str, list[str]]) -> bool:
    """From those who have most to those who have least; False when nothing moved."""
    has_moved = False
    for giver in sorted(assignment, key=lambda member: (-len(assignment[member]), member)):
        mine = assignment[giver]
        if len(mine) - min(map(len, assignment.values())) < 2:
            break
        for topic in sorted({one.topic for one in mine}):
            movable = sorted((one for one in mine if one.topic == topic), reverse=True)
            while movable:
                least = min(
                    subscribers[topic], key=lambda member: (len(assignment[member]), member)
                )
                if len(mine) - len(assignment[least]) < 2:
                    break
                one = movable.pop()
                mine.discard(one)
                assignment[least].add(one)
                has_moved = True
    return has_moved


def _subscribers(wishes: Wishes, counts: Counts) -> dict[str, list[str]]:
    """Of each topic that is there and wanted, in order, who wants it, in order."""
    found: dict[str, list[str]] = {}
    for member in sorted(wishes):
        for topic in wishes[member].topics:
            if counts.get(topic, 0):
                found.setdefault(topic, []).append(member)
    return dict(sorted(found.items()))


_FUNCTIONS: Mapping[Assignor, Callable[[Wishes, Counts], Assignment]] = {
    "sticky": _sticky,
    "range": _range,
    "round_robin": _round_robin,
}
