"""Work queues through the client: leases, how they are settled, and how they are kept."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from broker_process import BrokerProcess, wait_until
from client.scripted import PATIENCE_SECONDS, Request, ScriptedServer, answer, run
from client.scripted import until as eventually
from millstream.client import (
    AsyncClient,
    BlockingLeased,
    Client,
    Leased,
    Reject,
    Release,
    Retry,
    Settle,
)
from millstream.errors import (
    BrokerUnreachable,
    ParameterInvalid,
    ReceiptStale,
    ReceiptUnknown,
    TopicUnknown,
)

# Long enough for a busy machine, short enough for a test that lets leases be extended.
SHORT_S = 1.5


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def call(**fixtures: Any) -> None:
        run(test(**fixtures))

    return call


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for what an async function says."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():  # noqa: ASYNC110  conditions of all kinds
            await asyncio.sleep(0.02)
    assert await condition(), what


@asynccontextmanager
async def jobs(broker: BrokerProcess, *values: Any, **settings: Any) -> AsyncIterator[AsyncClient]:
    """A client, and a topic with some records."""
    async with AsyncClient(broker.url("")) as client:
        await client.topics.create("jobs", partitions=1, settings=settings)
        for value in values:
            await client.publish("jobs", value)
        yield client


async def leases(client: AsyncClient) -> dict[int, Any]:
    """Of the group, by offset."""
    reply = await client._transport.ask("GET", "/v1/groups/g/leases")
    return {one["offset"]: one for one in msgspec.json.decode(reply.body)["leases"]}


async def counts(client: AsyncClient) -> dict[str, Any]:
    reply = await client._transport.ask("GET", "/v1/reliability/stats?group=g")
    page = msgspec.json.decode(reply.body)
    found: dict[str, Any] = (page["groups"] or [page["totals"]])[0]
    return found


@scenario
async def test_a_message_is_received_with_all_that_it_has(broker: BrokerProcess) -> None:
    async with jobs(broker) as client:
        await client.publish("jobs", {"n": 1}, key="k", headers={"h": b"\xff", "none": None})
        await client.publish("jobs", b"\xff\x00", lane="high")
        await client.publish("jobs", None, key="gone")
        high, first, gone = await client.receive("jobs", group="g", count=10)
        assert (first.topic, first.partition, first.offset, first.key) == ("jobs", 0, 0, b"k")
        assert (first.json(), first.is_json, first.deliveries) == ({"n": 1}, True, 1)
        assert first.headers == (("h", b"\xff"), ("none", None))
        assert first.lane == "normal"
        assert (high.value, high.lane, high.is_json, high.headers) == (
            b"\xff\x00",
            "high",
            False,
            (),
        )
        assert (gone.value, gone.text, gone.json()) == (None, "", None)
        settled = await client.ack([high, first.receipt, gone])
        assert [one.outcome for one in settled] == ["acked"] * 3
        assert await client.receive("jobs", group="g") == []


@scenario
async def test_each_way_to_settle_does_what_it_says(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abcde") as client:
        a, b, c, d, e = await client.receive("jobs", group="g", count=10)
        assert (await a.ack()).outcome == "acked"
        nacked = await b.nack("not today", delay_s=3600)
        assert (nacked.outcome, nacked.when_ms > b.timestamp_ms + 3_000_000) == ("retried", True)
        assert (await c.reject("nonsense")).outcome == "dead"
        assert (await d.release()).outcome == "released"
        extended = await e.extend(3600)
        assert extended.when_ms > e.timestamp_ms + 3_000_000
        with pytest.raises(ReceiptStale):
            await a.ack()
        (again,) = await client.receive("jobs", group="g", count=10)
        assert (again.text, again.deliveries) == ("d", 1)
        (dead,) = [one async for one in client.read("jobs.dlq")]
        assert dict(dead.headers)["ms-dead-error"] == b"nonsense"


@scenario
async def test_many_are_settled_together_each_with_its_result(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abc") as client:
        a, b, c = await client.receive("jobs", group="g", count=3)
        settled = await client.settle(
            [
                Settle("ack", a.receipt),
                Settle("nack", b.receipt, delay_ms=0, error="no"),
                Settle("ack", c.receipt.replace(":2:", ":9:")),
                Settle("release", c.receipt),
            ]
        )
        assert [one.outcome for one in settled] == ["acked", "retried", "", "released"]
        assert isinstance(settled[2].error, ReceiptUnknown)


@scenario
async def test_a_receive_waits_for_a_message(broker: BrokerProcess) -> None:
    async with jobs(broker) as client:
        receiving = asyncio.ensure_future(client.receive("jobs", group="g", wait_s=30))
        await asyncio.sleep(0)
        await client.publish("jobs", "news")
        (message,) = await receiving
        assert message.text == "news"


@scenario
async def test_settlings_that_wait_for_each_other_travel_together() -> None:
    sent: list[int] = []
    may_answer = asyncio.Event()

    async def script(request: Request) -> bytes:
        receipts = msgspec.json.decode(request.body)["receipts"]
        sent.append(len(receipts))
        await may_answer.wait()
        results = [{"outcome": "acked"} for _ in receipts]
        return answer(200, msgspec.json.encode({"refused": 0, "results": results}))

    async with ScriptedServer(script) as server, AsyncClient(server.url) as client:
        settler = client._leases.settler
        first = settler.settle(Settle("ack", "0"))
        await eventually(lambda: sent == [1], "the first to be on its way")
        others = [settler.settle(Settle("ack", str(n))) for n in range(1, 1501)]
        assert settler.waiting == 1500
        may_answer.set()
        settled = await asyncio.gather(first, *others)
        assert sent == [1, 1000, 500]
        assert [one.receipt for one in settled] == [str(n) for n in range(1501)]


@scenario
async def test_work_gives_messages_and_keeps_their_leases(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abc", deliveries_max=1) as client:
        seen: list[str] = []
        async with client.work("jobs", group="g", visibility_s=SHORT_S, prefetch=3) as work:
            async for message in work:
                seen.append(message.text)
                # Three times as long as the lease: this one, and those that wait behind it.
                if len(seen) == 1:
                    await eventually(lambda: work.statistics().extended >= 9, "extended leases")
                await message.ack()
                if len(seen) == 3:
                    break
            assert work.statistics().lost == 0
        found = await counts(client)
        assert seen == ["a", "b", "c"]
        assert (found["acked"], found["timeouts"], found["delivered"]) == (3, 0, 3)


@scenario
async def test_what_nobody_took_is_released_when_the_work_is_closed(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abcd") as client:
        async with client.work("jobs", group="g", prefetch=4) as work:
            async for message in work:
                await message.ack()
                break

        async def released() -> bool:
            return {one["state"] for one in (await leases(client)).values()} <= {"ready"}

        await until(released, "all to be given back")
        again = await client.receive("jobs", group="g", count=10)
        assert {one.deliveries for one in again} == {1}
        assert len(again) == 3


@scenario
async def test_a_message_that_was_dropped_without_a_word_comes_again(
    broker: BrokerProcess,
) -> None:
    async with (
        jobs(broker, "a") as client,
        client.work("jobs", group="g", visibility_s=0.5, prefetch=1) as work,
    ):
        message = await work.take()
        assert message is not None
        del message
        again = await work.take(60)
        assert again is not None
        assert again.deliveries == 2
        await again.ack()


@scenario
async def test_a_worker_acks_nacks_rejects_retries_and_releases(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abcde", retry_delay_ms=0) as client:
        seen: list[tuple[str, int]] = []

        @client.worker("jobs", group="g", concurrency=2)
        async def handle(message: Leased) -> None:
            seen.append((message.text, message.deliveries))
            first = message.deliveries == 1 and seen.count((message.text, 1)) == 1
            match message.text:
                case "b" if first:
                    raise ValueError("broken")
                case "c":
                    raise Reject("never")
                case "d" if first:
                    raise Release
                case "e":
                    raise Retry("later", delay_s=3600)
            if len(seen) >= 7:
                client.stop_workers()

        running = asyncio.ensure_future(client.run_workers())

        async def all_settled() -> bool:
            found = await counts(client)
            names = ("acked", "nacked", "rejected", "released")
            return tuple(found[name] for name in names) == (3, 2, 1, 1)

        await until(all_settled, "all to be settled")
        client.stop_workers()
        await running
        # What was released has not counted, what raised has.
        assert sorted(seen) == [
            ("a", 1), ("b", 1), ("b", 2), ("c", 1), ("d", 1), ("d", 1), ("e", 1),
        ]  # fmt: skip
        (dead,) = [one async for one in client.read("jobs.dlq")]
        assert dict(dead.headers)["ms-dead-error"] == b"never"
        assert {one["state"] for one in (await leases(client)).values()} == {"waiting"}


@scenario
async def test_the_error_text_says_what_a_handler_raised(broker: BrokerProcess) -> None:
    async with jobs(broker, "a", deliveries_max=1) as client:

        @client.worker("jobs", group="g")
        async def handle(message: Leased) -> None:
            client.stop_workers()
            raise KeyError("total")

        await client.run_workers()
        (dead,) = [one async for one in client.read("jobs.dlq")]
        assert dict(dead.headers)["ms-dead-error"] == b"KeyError: 'total'"


@scenario
async def test_a_handler_that_takes_longer_than_its_lease_loses_nothing(
    broker: BrokerProcess,
) -> None:
    async with jobs(broker, *"abc", deliveries_max=1) as client:
        done: list[str] = []

        @client.worker("jobs", group="g", visibility_s=SHORT_S, prefetch=2)
        async def handle(message: Leased) -> None:
            if message.text == "a":

                async def extended() -> bool:
                    return bool((await counts(client))["extended"] >= 9)

                await until(extended, "its own lease and those that wait to be extended")
            done.append(message.text)
            if len(done) == 3:
                client.stop_workers()

        await client.run_workers()
        found = await counts(client)
        assert done == ["a", "b", "c"]
        assert (found["acked"], found["timeouts"], found["dead"]) == (3, 0, 0)


@scenario
async def test_workers_that_stop_release_what_is_not_done(broker: BrokerProcess) -> None:
    async with jobs(broker, *"abcd") as client:
        begun = asyncio.Event()
        ended: list[str] = []

        @client.worker("jobs", group="g", concurrency=2, prefetch=2, grace_s=0.1)
        async def handle(message: Leased) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(message.text)

        running = asyncio.ensure_future(client.run_workers())
        await begun.wait()
        client.stop_workers()
        await running
        again = await client.receive("jobs", group="g", count=10)
        assert sorted(one.text for one in again) == ["a", "b", "c", "d"]
        assert {one.deliveries for one in again} == {1}
        assert (await counts(client))["released"] >= len(ended) >= 1


@scenario
async def test_handlers_have_no_more_than_their_time_while_the_broker_is_away(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.client.work.CLOSE_S", 0.1)
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready()
        async with jobs(broker, *"ab") as client:
            begun, cancelled = asyncio.Event(), asyncio.Event()

            @client.worker("jobs", group="g", prefetch=2, grace_s=0.1)
            async def handle(message: Leased) -> None:
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            running = asyncio.ensure_future(client.run_workers())
            await begun.wait()

            async def all_are_here() -> bool:
                return len(await leases(client)) == 2

            await until(all_are_here, "one in hand and one that waits")
            broker.stop(signal.SIGKILL)
            client.stop_workers()
            # Less than the half minute for which the release of the other one is tried.
            async with asyncio.timeout(15):
                await cancelled.wait()
                await running


@scenario
async def test_handlers_have_their_time_when_workers_are_cancelled(broker: BrokerProcess) -> None:
    async with jobs(broker, "a") as client:
        begun, may_end = asyncio.Event(), asyncio.Event()

        @client.worker("jobs", group="g")
        async def handle(message: Leased) -> None:
            begun.set()
            await may_end.wait()

        running = asyncio.ensure_future(client.run_workers())
        await begun.wait()
        running.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def acked() -> bool:
            return bool((await counts(client))["acked"] == 1)

        await until(acked, "the ack of what was under way")


@scenario
async def test_a_plain_function_is_a_handler_too(broker: BrokerProcess) -> None:
    async with jobs(broker, *"ab") as client:
        threads: set[str] = set()

        @client.worker("jobs", group="g", concurrency=2)
        def handle(message: Leased) -> None:
            threads.add(threading.current_thread().name)
            if message.text == "b":
                raise Reject("not me")

        running = asyncio.ensure_future(client.run_workers())

        async def settled() -> bool:
            found = await counts(client)
            return (found["acked"], found["rejected"]) == (1, 1)

        await until(settled, "both")
        client.stop_workers()
        await running
        assert all(name.startswith("millstream-worker") for name in threads)


@scenario
async def test_a_worker_ends_with_what_the_broker_refuses_for_good(broker: BrokerProcess) -> None:
    async with AsyncClient(broker.url("")) as client:

        @client.worker("nowhere", group="g")
        async def handle(message: Leased) -> None:
            raise AssertionError(message)

        with pytest.raises(TopicUnknown):
            await client.run_workers()


@scenario
async def test_a_worker_goes_on_after_the_broker_was_away(tmp_path: Any) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        address = broker.wait_until_ready().url("").removeprefix("http://")
        async with jobs(broker, "before") as client:
            seen: list[str] = []

            @client.worker("jobs", group="g", visibility_s=30)
            async def handle(message: Leased) -> None:
                seen.append(message.text)

            running = asyncio.ensure_future(client.run_workers())

            async def saw(text: str) -> bool:
                return text in seen

            await until(lambda: saw("before"), "the first")
            broker.stop(signal.SIGKILL)
            with BrokerProcess(str(tmp_path), "--http", address) as again:
                again.wait_until_ready()
                await client.publish("jobs", "after")
                await until(lambda: saw("after"), "the second")
                client.stop_workers()
                await running


@scenario
async def test_what_is_asked_wrongly_is_refused_before_anything_is_sent() -> None:
    async with AsyncClient("http://127.0.0.1:1", retry_s=0) as client:
        for prefetch in (0, 1001):
            with pytest.raises(ParameterInvalid):
                client.work("jobs", group="g", prefetch=prefetch)
        with pytest.raises(ParameterInvalid):
            await client.ack([])
        with pytest.raises(ParameterInvalid):
            await client.run_workers()
        client.worker("jobs", group="g", concurrency=0)(print)
        with pytest.raises(ParameterInvalid):
            await client.run_workers()
        with pytest.raises(BrokerUnreachable):
            await client.receive("jobs", group="g")


# ---- the blocking face


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as made:
        made.topics.create("jobs", partitions=1)
        for value in "abc":
            made.publish("jobs", value)
        yield made


def test_blocking_a_message_is_received_and_settled(client: Client) -> None:
    a, b, c = client.receive("jobs", group="g", count=5)
    assert (a.text, a.topic, a.partition, a.offset) == ("a", "jobs", 0, 0)
    assert (a.key, a.value, a.headers, a.is_json) == (None, b"a", (), False)
    assert (a.lane, a.deliveries, a.timestamp_ms > 0) == ("normal", 1, True)
    assert a.ack().outcome == "acked"
    assert b.extend(60).outcome == "extended"
    assert b.nack("no", delay_s=3600).outcome == "retried"
    assert client.ack(c)[0].outcome == "acked"
    with pytest.raises(ReceiptStale):
        c.release()


def test_blocking_work_is_an_iterator(client: Client) -> None:
    with client.work("jobs", group="g") as work:
        seen = []
        for message in work:
            seen.append(message.text)
            message.ack()
            if len(seen) == 3:
                break
        assert work.take(0.01) is None
        assert work.statistics().received == 3
    assert seen == ["a", "b", "c"]


def test_blocking_workers_run_in_threads(client: Client) -> None:
    seen: list[str] = []

    @client.worker("jobs", group="g", concurrency=2)
    def handle(message: BlockingLeased) -> None:
        seen.append(message.text)
        if message.text == "c":
            raise Reject("no")

    running = threading.Thread(target=client.run_workers)
    running.start()
    wait_until(lambda: len(seen) == 3, "all")
    client.stop_workers()
    running.join(60)
    assert sorted(seen) == ["a", "b", "c"]
    assert client.receive("jobs", group="g") == []
