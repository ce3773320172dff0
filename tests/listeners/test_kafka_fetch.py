"""Fetch: waiting, limits, epochs and sessions; and where offsets are."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kafka.protocol.consumer import (
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)

from broker.making import local_house
from faults.simulated_disk import SimulatedDisk
from listeners.http_scene import run, until
from listeners.kafka_scene import T0, Client, FetchResponse, Scene, fetch
from millstream.engine.pending import Pending
from millstream.engine.protocol import Engine
from millstream.kinds import Address
from millstream.listeners.kafka.apis import Call
from millstream.listeners.kafka.connection import Counts, Shared
from millstream.listeners.kafka.context import Context
from millstream.listeners.kafka.fetch import _Poll
from millstream.listeners.kafka.fetch import fetch as handle
from millstream.listeners.kafka.list_offsets import list_offsets_apis
from millstream.listeners.kafka.sessions import PARTITIONS_MAX, SESSIONS_MAX, Session, Sessions
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.wire.kafka import fetch as wire
from millstream.wire.kafka.codes import Code

HOUR_MS = 3_600_000


async def part_of(client: Client, message: Any, version: int = 11) -> Any:
    """The only partition of the answer to a fetch."""
    client.send(message, version)
    _, fetched = await client.answer(FetchResponse, version)
    return fetched.responses[0].partitions[0]


def offsets_in(part: Any) -> list[int]:
    data = bytes(part.records or b"")
    return [
        one.offset
        for at, header in batches.walk(data)
        for one in batches.decode(data[at : at + header.size])
    ]


def test_a_fetch_gets_whole_batches_from_the_one_that_holds_its_offset() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for _ in range(3):
                await scene.append(b"a", b"b")
            part = await part_of(client, fetch(offset=3))
            assert offsets_in(part) == [2, 3, 4, 5]
            assert (part.high_watermark, part.log_start_offset) == (6, 0)
            assert offsets_in(await part_of(client, fetch(offset=6))) == []

    run(scenario())


def test_a_limit_ends_the_answer_after_at_least_one_batch() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for _ in range(3):
                await scene.append(b"x" * 1000)
            assert offsets_in(await part_of(client, fetch(bytes_max=1))) == [0]
            assert offsets_in(await part_of(client, fetch(bytes_max=2500))) == [0, 1]

    run(scenario())


@pytest.mark.parametrize("offset", [-1, 3])
def test_an_offset_that_is_not_there_is_out_of_range(offset: int) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await scene.append(b"a", b"b")
            part = await part_of(client, fetch(offset=offset, wait_ms=HOUR_MS))
            assert part.error_code == Code.OFFSET_OUT_OF_RANGE
            assert scene.shared.counts.errors == {"OFFSET_OUT_OF_RANGE": 1}

    run(scenario())


def test_a_fetch_waits_for_as_many_bytes_as_it_wants() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS, bytes_min=2500), 11, 1)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            for _ in range(3):
                await scene.append(b"x" * 1000)
            _, fetched = await client.answer(FetchResponse, 11)
            # What came in pieces is one run of batches.
            assert offsets_in(fetched.responses[0].partitions[0]) == [0, 1, 2]

    run(scenario())


def test_a_fetch_is_answered_by_its_deadline_with_what_there_is() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await scene.append(b"a")
            part = await part_of(client, fetch(wait_ms=30, bytes_min=1_000_000))
            assert offsets_in(part) == [0]
            assert offsets_in(await part_of(client, fetch(offset=1, wait_ms=30))) == []

    run(scenario())


def test_a_topic_that_is_deleted_ends_the_wait() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS), 11, 1)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            await scene.broker.topics.delete("t")
            _, fetched = await client.answer(FetchResponse, 11)
            code = fetched.responses[0].partitions[0].error_code
            assert code == Code.UNKNOWN_TOPIC_OR_PARTITION

    run(scenario())


def test_a_client_with_another_epoch_is_told() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            message = fetch()
            part = message.topics[0].partitions[0]
            part.current_leader_epoch = 1
            assert (await part_of(client, message)).error_code == Code.UNKNOWN_LEADER_EPOCH
            part.current_leader_epoch = 0
            assert (await part_of(client, message)).error_code == Code.NONE

    run(scenario())


def test_memory_that_is_taken_makes_answers_small() -> None:
    async def scenario() -> None:
        async with Scene(buffer_bytes_max=1_000_000) as scene:
            client = await scene.connect()
            for _ in range(10):
                await scene.append(b"x" * 1000)
            scene.shared.hold(498_000)
            assert len(offsets_in(await part_of(client, fetch()))) == 1
            scene.shared.release(498_000)
            assert len(offsets_in(await part_of(client, fetch()))) == 10

    run(scenario())


class SlowDisk:
    """An engine whose reads end when a test says so."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.reading: Pending[Any] = Pending()

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Any]:
        del id, offset, bytes_max
        return self.reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_a_read_that_takes_long_keeps_nobody_else_waiting() -> None:
    """What is not in the page cache is read in a thread; the loop goes on."""

    async def scenario() -> None:
        async with Scene() as scene:
            await scene.append(b"a")
            disk = SlowDisk(scene.engine)
            slow, other = await scene.connect(), await scene.connect()
            scene.context.engine = cast("Engine", disk)
            slow.send(fetch(), 11, 1)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            scene.context.engine = scene.engine
            for _ in range(3):
                assert offsets_in(await part_of(other, fetch())) == [0]
            scene.engine.read(T0, 0, 1000).then(lambda done: disk.reading.succeed(done.result()))
            _, fetched = await slow.answer(FetchResponse, 11)
            assert offsets_in(fetched.responses[0].partitions[0]) == [0]

    run(scenario())


class Watched:
    """An engine that knows which of the chunks that it gave are still held by anybody."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._given: list[tuple[weakref.ref[memoryview], int]] = []
        self.peak = 0

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Any]:
        chunk = self._engine.read(id, offset, bytes_max).result()
        data = memoryview(bytes(chunk.data))
        self._given.append((weakref.ref(data), len(data)))
        self.peak = max(self.peak, self.held())
        return Pending.of(chunk._replace(data=data))

    def held(self) -> int:
        return sum(size for one, size in self._given if one() is not None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def watched(scene: Scene) -> Watched:
    engine = Watched(scene.engine)
    scene.context.engine = cast("Engine", engine)
    return engine


def test_fetches_that_wait_hold_no_records() -> None:
    async def scenario() -> None:
        async with Scene(buffer_bytes_max=2_000_000) as scene:
            engine = watched(scene)
            for _ in range(6):
                await scene.append(b"x" * 100_000)
            count = 20
            client = await scene.connect()
            for number in range(count):
                client.send(fetch(wait_ms=HOUR_MS, bytes_min=650_000), 11, number)
            await until(lambda: scene.requests("Fetch") == count, "the fetches")
            assert engine.held() == 0
            assert scene.shared.buffer_bytes < 100 * count
            await scene.append(b"x" * 100_000)
            given = []
            for number in range(count):
                correlation_id, fetched = await client.answer(FetchResponse, 11)
                assert correlation_id == number
                given.append(offsets_in(fetched.responses[0].partitions[0]))
            # One is given all of it, and others what there is room for.
            assert all(offsets == list(range(len(offsets))) for offsets in given)
            assert [0, 1, 2, 3, 4, 5, 6] in given
            assert engine.peak < 1_150_000
            assert scene.broker.traffic.of("t").messages_out >= 7
            await until(lambda: scene.shared.buffer_bytes == 0, "everything is given up")

    run(scenario())


def test_what_came_in_pieces_is_counted_once() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS, bytes_min=2500), 11, 1)
            for _ in range(3):
                await scene.append(b"x" * 1000)
            await client.answer(FetchResponse, 11)
            traffic = scene.broker.traffic.of("t")
            assert traffic.messages_out == 3
            assert 3000 < traffic.bytes_out < 4000

    run(scenario())


def test_an_answer_that_waits_for_its_turn_is_held() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await scene.append(b"x" * 100_000)
            client = await scene.connect()
            client.send(fetch(offset=1, wait_ms=HOUR_MS), 11, 1)
            client.send(fetch(), 11, 2)
            await until(lambda: scene.requests("Fetch") == 2, "the fetches")
            assert scene.shared.buffer_bytes > 100_000
            client.writer.transport.abort()
            await until(lambda: not scene.shared.connections, "its end")
            assert scene.shared.buffer_bytes == 0

    run(scenario())


def test_nobody_waits_for_more_than_there_is_room_for() -> None:
    async def scenario() -> None:
        async with Scene(buffer_bytes_max=1_000_000) as scene:
            client = await scene.connect()
            await scene.append(b"x" * 1000)
            client.send(fetch(wait_ms=HOUR_MS, bytes_min=400_000), 11, 1)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            scene.shared.hold(200_000)
            await scene.append(b"x" * 1000)
            _, fetched = await client.answer(FetchResponse, 11)
            assert offsets_in(fetched.responses[0].partitions[0]) == [0, 1]
            # Without any room it gets nothing, and still learns where the partition ends.
            client.send(fetch(offset=2, wait_ms=HOUR_MS, bytes_min=100_000), 11, 2)
            await until(lambda: scene.requests("Fetch") == 2, "the fetch")
            scene.shared.hold(300_000)
            await scene.append(b"x" * 1000)
            _, fetched = await client.answer(FetchResponse, 11)
            part = fetched.responses[0].partitions[0]
            assert (offsets_in(part), part.high_watermark) == ([], 3)
            scene.shared.release(500_000)

    run(scenario())


def test_a_read_under_way_holds_what_it_may_bring() -> None:
    async def scenario() -> None:
        async with Scene(buffer_bytes_max=1_000_000) as scene:
            await scene.append(b"a")
            disk = SlowDisk(scene.engine)
            scene.context.engine = cast("Engine", disk)
            clients = [await scene.connect() for _ in range(4)]
            for client in clients:
                client.send(fetch(bytes_max=200_000), 11)
            # The fourth is not read: the first three may bring as much as there is room for.
            await until(lambda: scene.shared.room <= 0, "no room")
            assert scene.requests("Fetch") == 3
            clients[0].writer.transport.abort()
            chunk = await scene.engine.read(T0, 0, 1000)
            disk.reading.succeed(chunk)
            for client in clients[1:]:
                _, fetched = await client.answer(FetchResponse, 11)
                assert offsets_in(fetched.responses[0].partitions[0]) == [0]
            assert scene.shared.buffer_bytes == 0

    run(scenario())


# ---- sessions


def in_session(message: Any, id: int, epoch: int) -> Any:
    message.session_id, message.session_epoch = id, epoch
    return message


def nothing(id: int, epoch: int) -> Any:
    """A fetch in a session that changes nothing in it."""
    message = in_session(fetch(), id, epoch)
    message.topics = []
    return message


def test_a_session_says_only_what_is_new() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()

            async def ask(message: Any) -> Any:
                client.send(message, 11)
                return (await client.answer(FetchResponse, 11))[1]

            opened = await ask(in_session(fetch(), 0, 0))
            id = opened.session_id
            assert id > 0
            assert len(opened.responses) == 1
            assert (await ask(nothing(id, 1))).responses == []
            await scene.append(b"a")
            moved = await ask(nothing(id, 2))
            assert offsets_in(moved.responses[0].partitions[0]) == [0]
            # The client says where it is now; there is nothing new to tell.
            assert (await ask(in_session(fetch(offset=1), id, 3))).responses == []
            wrong = await ask(nothing(id, 3))
            assert wrong.error_code == Code.INVALID_FETCH_SESSION_EPOCH
            assert (await ask(nothing(id, 4))).error_code == Code.NONE
            closed = await ask(in_session(fetch(offset=1), id, -1))
            assert (closed.session_id, len(closed.responses)) == (0, 1)
            gone = await ask(nothing(id, 5))
            assert gone.error_code == Code.FETCH_SESSION_ID_NOT_FOUND

    run(scenario())


def test_a_whole_answer_stays_whole_when_another_fetch_of_its_session_comes() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await scene.broker.topics.create("other", 1)
            sessions = Sessions(lambda _: 6)

            def ask(message: Any) -> Pending[Any]:
                body = memoryview(bytes(message.encode(version=11)))
                call = Call(11, "c", body, False, Address("h", 1), "p")
                return cast("Pending[Any]", handle(scene.context, sessions, call))

            both = in_session(fetch(wait_ms=HOUR_MS), 0, 0)
            Topic = type(both.topics[0])  # noqa: N806  a class
            both.topics.append(Topic(topic="other", partitions=both.topics[0].partitions))
            first, second = ask(both), ask(nothing(7, 1))
            assert second.is_done
            assert not first.is_done
            await scene.append(b"a")
            told = FetchResponse.decode(b"".join(await first), version=11)
            assert {one.topic for one in told.responses} == {"t", "other"}

    run(scenario())


def request(id: int, epoch: int, *, partitions: int = 1, forget: int | None = None) -> wire.Request:
    parts = [wire.Part(number, -1, 0, 100) for number in range(partitions)]
    forgotten = [] if forget is None else [("t", [forget])]
    return wire.Request(0, 1, 100, id, epoch, [("t", parts)] if parts else [], forgotten)


def opened(sessions: Sessions, partitions: int = 1) -> Session:
    session = sessions.of(request(0, 0, partitions=partitions))
    assert isinstance(session, Session)
    return session


def test_a_session_forgets_what_it_is_told_to() -> None:
    sessions = Sessions()
    session = opened(sessions, 3)
    again = sessions.of(request(session.id, 1, partitions=0, forget=1))
    assert again is session
    assert [part.number for _, part in session.parts()] == [0, 2]


def test_a_busy_partition_goes_to_the_end() -> None:
    session = opened(Sessions(), 3)
    given = [wire.Given(0, 0, 5, 0, (memoryview(b"x"),)), wire.Given(1, 0, 0, 0)]
    session.answer([("t", one) for one in given], is_whole=True)
    assert [part.number for _, part in session.parts()] == [1, 2, 0]


def test_the_session_used_least_recently_makes_room() -> None:
    sessions = Sessions()
    all_of_them = [opened(sessions) for _ in range(SESSIONS_MAX)]
    first, second = all_of_them[:2]
    assert sessions.of(request(first.id, 1, partitions=0)) is first
    opened(sessions)
    assert len(sessions) == SESSIONS_MAX
    assert sessions.of(request(second.id, 1)) is Code.FETCH_SESSION_ID_NOT_FOUND
    assert sessions.of(request(first.id, 2)) is first


def test_partitions_of_all_sessions_are_bounded() -> None:
    sessions = Sessions()
    first, second = opened(sessions, PARTITIONS_MAX), opened(sessions, 1)
    assert sessions.of(request(first.id, 1)) is Code.FETCH_SESSION_ID_NOT_FOUND
    assert sessions.of(request(second.id, 1)) is second


def test_epochs_go_round_without_the_ones_that_mean_something() -> None:
    sessions = Sessions()
    session = opened(sessions)
    session.epoch = 2**31 - 1
    assert sessions.of(request(session.id, 2**31 - 1)) is session
    assert session.epoch == 1


# ---- where offsets are


def test_offsets_are_listed_by_time_and_by_name() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            data = batches.encode([(at * 10, None, b"x", []) for at in (5, 9, 7)])
            await scene.engine.append(T0, data)

            async def at(timestamp: int) -> tuple[int, int]:
                Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806  a class
                part = Topic.ListOffsetsPartition(
                    partition_index=0, current_leader_epoch=-1, timestamp=timestamp
                )
                topics = [Topic(name="t", partitions=[part])]
                client.send(ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=topics), 7)
                _, found = await client.answer(ListOffsetsResponse, 7)
                one = found.topics[0].partitions[0]
                return one.offset, one.timestamp

            assert await at(-2) == (0, -1)
            assert await at(-1) == (3, -1)
            assert await at(-3) == (1, 90)
            assert await at(50) == (0, 50)
            assert await at(51) == (1, 90)
            assert await at(91) == (-1, -1)

    run(scenario())


def test_an_offset_has_the_epoch_in_which_its_record_was_written() -> None:
    disk = SimulatedDisk()
    for epoch in range(4):
        house = local_house(disk).start()
        if epoch == 0:
            house.done(house.broker.topics.create("t", 1))
        elif epoch != 2:
            data = batches.encode([(epoch * 10, None, b"x", [])] * 2)
            house.done(house.engine.append(T0, data))
        own = house.engine.leader_epoch(T0)
        if epoch < 3:
            house.engine.close()
    shared = cast("Shared", SimpleNamespace(counts=Counts()))
    context = Context(house.broker, house.engine, shared, house.scheduler, node_id=1)
    (api, _) = list_offsets_apis(context)

    def at(timestamp: int) -> tuple[int, int]:
        Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806  a class
        part = Topic.ListOffsetsPartition(
            partition_index=0, current_leader_epoch=-1, timestamp=timestamp
        )
        topics = [Topic(name="t", partitions=[part])]
        message = ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=topics)
        body = memoryview(bytes(message.encode(version=7)))
        outcome = api.answer(Call(7, "c", body, True, Address("h", 1), "p"))
        house.scheduler.run()
        assert isinstance(outcome, Pending)
        found = ListOffsetsResponse.decode(b"".join(map(bytes, outcome.result() or ())), version=7)
        one = found.topics[0].partitions[0]
        return one.offset, one.leader_epoch - own

    assert at(5) == (0, -2)
    assert at(25) == (2, 0)
    # The start, the end, the newest.
    assert at(-2) == (0, -2)
    assert at(-1) == (4, 0)
    assert at(-3) == (2, 0)


def test_an_epoch_ends_where_the_log_does_while_it_lasts() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await scene.append(b"a", b"b")

            async def end_of(epoch: int) -> tuple[int, int]:
                Topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic  # noqa: N806  a class
                part = Topic.OffsetForLeaderPartition(
                    partition=0, current_leader_epoch=-1, leader_epoch=epoch
                )
                topics = [Topic(topic="t", partitions=[part])]
                client.send(OffsetForLeaderEpochRequest(replica_id=-1, topics=topics), 3)
                _, found = await client.answer(OffsetForLeaderEpochResponse, 3)
                one = found.topics[0].partitions[0]
                return one.leader_epoch, one.end_offset

            assert await end_of(0) == (0, 2)
            assert await end_of(1) == (-1, -1)

    run(scenario())


def test_a_fetch_that_fails_while_it_waits_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            closed: list[object] = []

            def close(poll: _Poll) -> None:
                closed.append(poll)

            def fail(*_: object, **__: object) -> None:
                raise RuntimeError("a fault")

            monkeypatch.setattr(_Poll, "close", close)
            monkeypatch.setattr(_Poll, "wait", fail)
            client = await scene.connect()
            client.send(fetch(wait_ms=60_000), 4)
            await until(lambda: len(closed) == 1, "the wait is given up")
            await client.frame()

    run(scenario())
