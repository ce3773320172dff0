"""Groups as members see them: joining, polling, committing, going; and what they may not."""

from __future__ import annotations

import pytest

from broker.grouping import (
    Consumer,
    committed,
    group_options,
    house_with,
    make_unreadable,
    publish,
    refused,
    settle,
)
from broker.making import local_house, memory_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.group_values import Commit, Join, Poll
from millstream.broker.reading import Fetched, Reader
from millstream.engine.pending import Pending
from millstream.errors import (
    GroupNameInvalid,
    GroupNotEmpty,
    GroupUnknown,
    LogDamaged,
    MemberUnknown,
    MetadataTooLarge,
    MillstreamError,
    OffsetOutOfRange,
    OffsetUnknown,
    ParameterInvalid,
    PartitionUnknown,
    StaleGeneration,
    TooManyGroups,
    TooManyMembers,
    TopicReserved,
    TopicUnknown,
)

# ---- joining and reading


def test_the_first_member_gets_everything_and_reads_it() -> None:
    house = house_with()
    publish(house, "a", "b")
    publish(house, "c", partition=3)
    member = Consumer(house).join()
    assert member.numbers == [0, 1, 2, 3]
    assert member.poll() == ["a", "b", "c"]
    assert member.poll() == []


def test_a_member_id_is_the_client_id_and_a_random_part() -> None:
    house = house_with()
    one = Consumer(house).join(client_id="billing")
    two = Consumer(house).join(client_id="billing")
    assert one.id.startswith("billing-")
    assert two.id.startswith("billing-")
    assert one.id != two.id


def test_a_new_group_starts_at_the_end_unless_it_says_otherwise() -> None:
    house = house_with()
    publish(house, "old")
    member = Consumer(house).join(auto_offset_reset=None)
    publish(house, "new")
    assert member.poll() == ["new"]


def test_where_a_group_started_is_kept_even_when_nobody_commits() -> None:
    """Or records that come while it is away would never be read."""
    house = house_with()
    publish(house, "old")
    Consumer(house).join(auto_offset_reset="latest").leave()
    publish(house, "meanwhile")
    member = Consumer(house).join(auto_offset_reset="latest")
    assert member.poll() == ["meanwhile"]


def test_a_group_without_offsets_that_wants_none_made_up_is_told() -> None:
    house = house_with(partitions=1)
    member = Consumer(house).join(auto_offset_reset="none")
    error = refused(house, member.start_poll(wait_ms=0).pending, OffsetUnknown)
    assert error.fields["topic"] == "orders"
    publish(house, "a", "b")
    member.commit(1)
    assert member.poll() == ["b"]


def test_a_poll_is_bounded_and_partitions_take_turns() -> None:
    house = house_with(partitions=2)
    publish(house, "a1", "a2", "a3", partition=0)
    publish(house, "b1", "b2", partition=1)
    member = Consumer(house).join()
    assert member.poll(count_max=2) == ["a1", "a2"]
    assert member.poll(count_max=2) == ["b1", "b2"]
    assert member.poll(count_max=2) == ["a3"]


def test_a_poll_is_bounded_by_bytes_but_gives_one_record_whole() -> None:
    house = house_with(partitions=1)
    for name in ("a", "b", "c"):
        publish(house, name * 1000)
    member = Consumer(house).join()
    assert [value[0] for value in member.poll(bytes_max=1)] == ["a"]
    assert [value[0] for value in member.poll(bytes_max=1500)] == ["b", "c"]


def test_a_long_poll_ends_when_a_record_comes() -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.run()
    assert not polling.pending.is_done
    publish(house, "now", partition=2)
    assert member.hear(house.done(polling.pending)) == ["now"]


def test_a_long_poll_ends_with_nothing_after_its_time() -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=2_000)
    house.scheduler.advance(1.9)
    assert not polling.pending.is_done
    house.scheduler.advance(0.2)
    assert member.hear(polling.pending.result()) == []


def test_a_second_poll_takes_the_place_of_the_first() -> None:
    house = house_with()
    member = Consumer(house).join()
    first = member.start_poll(wait_ms=30_000)
    second = member.start_poll(wait_ms=30_000)
    assert house.done(first.pending).parts == []
    publish(house, "x")
    assert member.hear(house.done(second.pending)) == ["x"]


def test_a_poll_that_was_superseded_takes_nothing_from_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b")
    member = Consumer(house).join()
    fetch, gates = Reader.fetch, list[Pending[Fetched]]()

    def held(*_: object) -> Pending[Fetched]:
        gates.append(Pending())
        return gates[-1]

    monkeypatch.setattr(Reader, "fetch", held)
    first = member.start_poll(wait_ms=0, received=0)
    second = member.start_poll(wait_ms=0, received=0)
    house.scheduler.run()
    monkeypatch.undo()
    fetched = house.done(fetch(house.broker.reader, "orders", 0, 0, 10, 1000))
    for gate in reversed(gates):
        gate.succeed(fetched)
        house.scheduler.run()
    assert member.hear(second.pending.result()) == ["a", "b"]
    assert first.pending.result().parts == []
    # Whoever hears only the first has got nothing yet; nor if nobody hears of either.
    assert member.poll(received=first.pending.result().number) == ["a", "b"]
    first.cancel()
    assert member.poll(received=0) == ["a", "b"]


def test_a_poll_waits_for_what_the_one_before_it_has_written_though_that_waits_too() -> None:
    house = local_house(options_=group_options()).start()
    house.done(house.broker.topics.create("orders", 1))
    member = Consumer(house).join()
    assert member.poll() == []
    publish(house, "a")
    house.done(house.broker.topics.purge("orders"))
    publish(house, "b")
    # It writes that the group goes on at 1.
    first = member.start_poll(wait_ms=0)
    second = member.start_poll(wait_ms=0)
    assert not first.pending.is_done
    assert not second.pending.is_done
    assert member.hear(house.done(second.pending)) == ["b"]
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    assert committed(local_house(disk.crash("nothing")).start()) == 1


def test_a_poll_that_the_client_never_got_is_given_again() -> None:
    house = house_with()
    publish(house, "a", "b")
    member = Consumer(house).join()
    polling = member.start_poll(count_max=1, wait_ms=0)
    house.scheduler.run()
    polling.cancel()
    assert member.poll(count_max=1) == ["a"]
    number = member.number
    # The next answer is lost, and the client says which one it had.
    house.done(member.start_poll(count_max=1, wait_ms=0).pending)
    assert member.poll(received=number) == ["b"]


def test_a_cancelled_long_poll_takes_nothing() -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.run()
    polling.cancel()
    publish(house, "a")
    house.scheduler.run()
    assert member.poll() == ["a"]


def test_drain_answers_those_who_wait() -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.run()
    house.broker.groups.drain()
    assert house.done(polling.pending).parts == []


def test_a_member_reads_several_topics() -> None:
    house = house_with()
    house.done(house.broker.topics.create("bills", 2))
    member = Consumer(house, topics=("orders", "bills")).join()
    polling = member.start_poll(wait_ms=30_000)
    publish(house, "bill", topic="bills", partition=1)
    assert member.hear(house.done(polling.pending)) == ["bill"]


# ---- committing


def test_a_partition_that_cannot_be_read_does_not_keep_the_others_from_the_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=3)
    for partition in range(3):
        publish(house, f"{partition}a", f"{partition}b", partition=partition)
    member = Consumer(house).join()
    make_unreadable(monkeypatch, 0)
    assert member.poll(count_max=2) == ["1a", "1b"]
    assert member.poll() == ["2a", "2b"]
    polling = member.start_poll(wait_ms=0).pending
    assert isinstance(house.failed(polling), LogDamaged)
    publish(house, "1c", partition=1)
    assert member.poll() == ["1c"]
    monkeypatch.undo()
    assert member.poll() == ["0a", "0b"]


def test_a_commit_is_what_the_next_member_begins_with() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b", "c")
    member = Consumer(house).join(auto_commit=False)
    done = member.commit(2, metadata="half way")
    assert (done[0].offset, done[0].metadata) == (2, "half way")
    # It may go back, too.
    member.commit(1)
    member.leave()
    assert Consumer(house).join().poll() == ["b", "c"]


def test_the_broker_commits_what_was_handled_every_few_seconds() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b")
    member = Consumer(house).join()
    member.poll(count_max=1)
    # The first record is handled when the member asks for more.
    member.poll(count_max=1)
    assert committed(house) == 0
    house.scheduler.advance(5.1)
    assert committed(house) == 1
    member.poll()
    house.scheduler.advance(5.1)
    assert committed(house) == 2


def test_a_stop_commits_what_was_handled() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b")
    member = Consumer(house).join()
    member.poll(count_max=1)
    member.poll(count_max=1)
    house.broker.stop()
    house.scheduler.run()
    assert committed(house) == 1


def test_leaving_commits_what_was_polled() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b")
    member = Consumer(house).join()
    member.poll()
    member.leave()
    assert committed(house) == 2


@pytest.mark.parametrize(
    ("session_ms", "interval_ms"), [(2_000, 666), (9_000, 3_000), (None, 3_000)]
)
def test_a_short_session_has_room_for_two_lost_heartbeats(
    session_ms: int | None, interval_ms: int
) -> None:
    house = house_with(partitions=1)
    join = Join(("orders",), session_timeout_ms=session_ms)
    assert house.done(house.broker.groups.join("g", join)).heartbeat_interval_ms == interval_ms


def test_a_crash_gives_what_was_not_committed_again() -> None:
    house = house_with(partitions=1, session_timeout_ms=1_000)
    publish(house, "a", "b")
    Consumer(house).join().poll()
    house.scheduler.advance(2)
    assert Consumer(house).join().poll() == ["a", "b"]


@pytest.mark.parametrize(
    ("commit", "error"),
    [
        (Commit("orders", 0, -1), OffsetOutOfRange),
        (Commit("orders", 0, 3), OffsetOutOfRange),
        (Commit("orders", 4, 0), PartitionUnknown),
        (Commit("orders", -1, 0), PartitionUnknown),
        (Commit("nothing", 0, 0), TopicUnknown),
        (Commit("__offsets", 0, 0), TopicReserved),
        (Commit("orders", 0, 0, "x" * 4097), MetadataTooLarge),
        (Commit("orders", 0, 0, "\ud800"), ParameterInvalid),
    ],
)
def test_one_bad_commit_and_none_is_kept(commit: Commit, error: type[MillstreamError]) -> None:
    house = house_with()
    publish(house, "a", "b")
    member = Consumer(house).join(auto_commit=False)
    groups = house.broker.groups
    generation = member.standing.generation
    refused(
        house, groups.commit("g", [Commit("orders", 0, 2), commit], member.id, generation), error
    )
    assert committed(house) == 0
    member.leave()
    refused(house, groups.commit("g", [Commit("orders", 0, 2), commit]), error)
    assert committed(house) == 0
    house.done(groups.commit("g", [Commit("orders", 0, 2, "x" * 4096)]))
    assert committed(house) == 2


def test_a_commit_without_a_member_needs_a_group_without_members() -> None:
    house = house_with()
    groups = house.broker.groups
    house.done(groups.commit("g", [Commit("orders", 0, 0)]))
    member = Consumer(house).join()
    error = refused(house, groups.commit("g", [Commit("orders", 0, 0)]), GroupNotEmpty)
    assert error.fields["members"] == 1
    refused(house, groups.commit("g", [Commit("orders", 0, 0)], member.id), ParameterInvalid)


def test_records_that_retention_took_are_counted_and_skipped_by_the_rule() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b", "c", "d")
    early = Consumer(house, "early").join()
    late = Consumer(house, "late").join()
    none = Consumer(house, "none").join()
    none.join(member_id=none.id, auto_offset_reset="none")
    late.join(member_id=late.id, auto_offset_reset="latest")
    for one in (early, late, none):
        assert one.poll(count_max=1) == ["a"]
    house.done(house.broker.topics.purge("orders"))
    publish(house, "e")
    assert early.poll() == ["e"]
    assert late.poll() == []
    refused(house, none.start_poll(wait_ms=0).pending, OffsetOutOfRange)
    publish(house, "f")
    assert late.poll() == ["f"]
    counts = house.broker.groups.counts
    assert counts.resets_removed >= 3
    assert counts.expired_records >= 9


# ---- seen from outside


def test_groups_are_listed_and_described() -> None:
    house = house_with()
    groups = house.broker.groups
    house.done(groups.commit("quiet", [Commit("orders", 1, 0)]))
    member = Consumer(house).join(client_id="c", instance_id="i")
    listed = house.done(house.broker.directory.summaries())
    assert [(one.group, one.state, one.members) for one in listed] == [
        ("g", "stable", 1),
        ("quiet", "empty", 0),
    ]
    facts = house.done(house.broker.directory.describe("g"))
    assert facts.summary.topics == ("orders",)
    assert facts.members[0].member_id == member.id
    assert facts.members[0].assignment == member.standing.assignment
    house.scheduler.advance(2)
    assert house.done(house.broker.directory.describe("g")).members[0].idle_ms >= 2000
    second = Consumer(house).join()
    assert house.done(house.broker.directory.describe("g")).summary.state == "rebalancing"
    assert second.standing.is_rebalancing


def test_a_group_without_members_can_be_deleted() -> None:
    house = house_with()
    member = Consumer(house).join()
    groups = house.broker.groups
    refused(house, groups.delete("g"), GroupNotEmpty)
    member.leave()
    house.done(groups.delete("g"))
    refused(house, house.broker.directory.describe("g"), GroupUnknown)
    refused(house, groups.delete("g"), GroupUnknown)
    assert house.done(house.broker.directory.summaries()) == []


def test_a_generation_never_comes_twice() -> None:
    house = house_with()
    seen = []
    for _ in range(3):
        member = Consumer(house).join()
        seen.append(member.standing.generation)
        other = Consumer(house).join()
        settle(member, other)
        seen += [member.standing.generation, other.standing.generation]
        member.leave()
        other.leave()
    assert sorted(set(seen)) == sorted(seen)
    assert seen[0] < seen[3] < seen[6]


# ---- limits and nonsense


@pytest.mark.parametrize(
    "join",
    [
        Join(()),
        Join(("orders",) * 1001),
        Join(("orders",), client_id=""),
        Join(("orders",), client_id="with space"),
        Join(("orders",), client_id="x" * 201),
        Join(("orders",), instance_id="a/b"),
        Join(("orders",), assignor="fair"),  # type: ignore[arg-type]
        Join(("orders",), auto_offset_reset="now"),  # type: ignore[arg-type]
        Join(("orders",), session_timeout_ms=499),
        Join(("orders",), session_timeout_ms=1_800_001),
        Join(("orders",), auto_commit_interval_ms=9),
    ],
)
def test_a_join_out_of_range_is_refused(join: Join) -> None:
    house = house_with()
    error = refused(house, house.broker.groups.join("g", join), ParameterInvalid)
    assert error.fields["parameter"]
    assert house.done(house.broker.directory.summaries()) == []


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "x" * 256, "__own"])
def test_group_names_are_checked(name: str) -> None:
    house = house_with()
    groups = house.broker.groups
    refused(house, groups.join(name, Join(("orders",))), GroupNameInvalid)
    refused(house, groups.commit(name, [Commit("orders", 0, 0)]), GroupNameInvalid)
    refused(house, house.broker.directory.describe(name), GroupNameInvalid)


@pytest.mark.parametrize(
    "poll",
    [
        Poll(count_max=0),
        Poll(count_max=501),
        Poll(bytes_max=0),
        Poll(bytes_max=1 << 40),
        Poll(wait_ms=-1),
        Poll(wait_ms=30_001),
    ],
)
def test_a_poll_out_of_range_is_refused(poll: Poll) -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = house.broker.groups.poll("g", member.id, member.standing.generation, poll)
    refused(house, polling.pending, ParameterInvalid)


def test_a_leave_with_a_stale_generation_changes_nothing() -> None:
    house = house_with(partitions=1)
    groups = house.broker.groups
    publish(house, "a", "b")
    member = Consumer(house).join()
    old = member.standing.generation
    house.done(house.broker.topics.add_partitions("orders", 2))
    member.heartbeat()
    member.heartbeat()
    assert member.standing.generation > old
    polled = member.poll()
    before = committed(house), committed(house, 1)
    for wrong in (old, member.standing.generation + 1):
        error = refused(house, groups.leave("g", member.id, None, wrong), StaleGeneration)
        assert error.fields["current"] == member.standing.generation
    # It is still there, and what it polled does not count as handled because of that.
    member.heartbeat()
    assert member.numbers == [0, 1]
    assert (committed(house), committed(house, 1)) == before
    house.done(groups.leave("g", member.id, member.number, member.standing.generation))
    assert sum(committed(house, number) or 0 for number in (0, 1)) == len(polled)
    refused(house, groups.heartbeat("g", member.id, member.standing.generation), MemberUnknown)


def test_unknown_topics_groups_and_members() -> None:
    house = house_with()
    groups = house.broker.groups
    refused(house, groups.join("g", Join(("nothing",))), TopicUnknown)
    refused(house, groups.join("g", Join(("__topics",))), TopicReserved)
    refused(house, groups.join("g", Join(("orders",), member_id="who")), MemberUnknown)
    refused(house, groups.heartbeat("g", "who", 1), MemberUnknown)
    refused(house, groups.leave("g", "who"), MemberUnknown)
    member = Consumer(house).join(instance_id="one")
    refused(house, groups.heartbeat("g", "who", 1), MemberUnknown)
    refused(house, groups.join("g", Join(("orders",), member_id=member.id)), ParameterInvalid)


def test_there_are_only_so_many_groups_and_members() -> None:
    house = memory_house(group_options(groups_max=2, members_max=2))
    house.done(house.broker.topics.create("orders", 1))
    groups = house.broker.groups
    Consumer(house, "one").join()
    Consumer(house, "two").join()
    error = refused(house, groups.join("three", Join(("orders",))), TooManyGroups)
    assert error.retriable
    refused(house, groups.commit("three", [Commit("orders", 0, 0)]), TooManyGroups)
    Consumer(house, "two").join()
    error = refused(house, groups.join("two", Join(("orders",))), TooManyMembers)
    assert error.fields["members_max"] == 2
