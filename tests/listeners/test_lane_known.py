"""Heads that were seen before: a request is answered the same, known or not, however it comes."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listeners.http_scene import Client, Response, Scene, get, post, run, until
from millstream.listeners.http.heads import KNOWN_BYTES_MAX, KNOWN_MAX

pytestmark = pytest.mark.usefixtures("short_linger")

CHUNKED = b"POST /enqueue HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


class Step(NamedTuple):
    """A request, and what it does to the two queues of `Model`."""

    request: bytes
    does: str
    body: bytes = b""


def steps() -> list[Step]:
    bodies = [b"", b"x", b"y" * 100, b"\r\n\r\nGET /dequeue HTTP/1.1\r\n\r\n", b"z" * 3000]
    found = [Step(post("/enqueue", body), "raw in", body) for body in bodies]
    found += [Step(post("/enqueue", body, "X-A: b"), "raw in", body) for body in bodies[:2]]
    for text in (b"1", b'"a longer text"', b'{"a":[1,2,3]}'):
        body = b'{"payload":%b}' % text
        found.append(Step(post("/queues/q/enqueue", body), "json in", text))
    found += [
        Step(CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", "raw in", b"abc"),
        Step(get("/dequeue"), "raw out"),
        Step(get("/dequeue", "Connection: keep-alive"), "raw out"),
        Step(get("/queues/q/dequeue"), "json out"),
        Step(get("/queues/q/dequeue?max=2"), "batch out"),
        Step(get("/queues/q/dequeue?timeout=0"), "json out"),
        Step(get("/queues/q/dequeue?timeout=0.01"), "json out"),
        Step(post("/queues/q/enqueue", b"{"), "bad json"),
        Step(post("/enqueue", b"!" * 5000), "too large"),
        Step(get("/dequeue?max=x"), "bad query"),
        Step(get("/dequeue", "Origin: http://evil.example"), "foreign"),
        Step(get("/queues/none/dequeue"), "unknown"),
        Step(get("/livez"), "cold"),
    ]
    return found


class Model:
    """What the answers should be."""

    def __init__(self) -> None:
        self.raw: deque[bytes] = deque()
        self.json: deque[bytes] = deque()

    def check(self, step: Step, answer: Response) -> None:
        status, payloads = self._expected(step)
        assert answer.status == status, (step.does, answer)
        if step.does == "json in":
            assert json.loads(answer.body)["queue_size"] == len(self.json)
        elif step.does == "raw out" and status == 200:
            assert answer.body == payloads[0]
        elif step.does == "json out" and status == 200:
            assert json.loads(answer.body)["payload"] == json.loads(payloads[0])
            assert json.loads(answer.body)["queue_size"] == len(self.json)
        elif step.does == "batch out" and status == 200:
            found = [one["payload"] for one in json.loads(answer.body)["messages"]]
            assert found == [json.loads(payload) for payload in payloads]

    def _expected(self, step: Step) -> tuple[int, list[bytes]]:
        if step.does == "raw in":
            self.raw.append(step.body)
            return 202, []
        if step.does == "json in":
            self.json.append(step.body)
            return 200, []
        if step.does in ("raw out", "json out", "batch out"):
            queue = self.raw if step.does == "raw out" else self.json
            count = 2 if step.does == "batch out" else 1
            taken = [queue.popleft() for _ in range(min(count, len(queue)))]
            return (200 if taken else 204), taken
        refused = {"bad json": 400, "too large": 413, "bad query": 400, "foreign": 403}
        return ({"unknown": 404, "cold": 200} | refused)[step.does], []


# Those that leave the connection open.
STEPS = [step for step in steps() if step.does != "too large"]


def packets(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    begin = 0
    for cut in sorted({cut % len(data) for cut in cuts} - {0}):
        yield data[begin:cut]
        begin = cut
    yield data[begin:]


async def play(client: Client, model: Model, chosen: list[Step], cuts: list[int]) -> None:
    await client.send(*packets(b"".join(step.request for step in chosen), cuts))
    for step in chosen:
        model.check(step, await client.answer())


@settings(max_examples=60)
@given(
    rounds=st.lists(
        st.tuples(
            st.lists(st.sampled_from(STEPS), min_size=1, max_size=12),
            st.lists(st.integers(0, 10_000), max_size=4),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_mix_of_requests_cut_anywhere(
    rounds: list[tuple[list[Step], list[int]]],
) -> None:
    async def scenario() -> None:
        async with Scene(message_bytes_max=4000) as scene:
            scene.queues.get_or_create("q")
            client, model = await scene.connect(), Model()
            # Twice: in the second round the heads are known.
            for chosen, cuts in rounds * 2:
                await play(client, model, chosen, cuts)
            client.close()

    run(scenario())


def test_a_known_request_may_be_cut_at_every_byte() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.queues.get_or_create("q")
            client, model = await scene.connect(), Model()
            chosen = [step for step in STEPS if step.does in ("raw in", "raw out")][:2]
            chosen += [step for step in STEPS if step.does in ("json in", "json out")][:4]
            size = len(b"".join(step.request for step in chosen))
            for cut in range(size):
                await play(client, model, chosen, [cut])

    run(scenario())


def test_a_known_head_means_the_same_on_every_connection() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.queues.get_or_create("q")
            clients, model = [await scene.connect() for _ in range(5)], Model()
            chance = random.Random(7)
            for _ in range(400):
                step = chance.choice(STEPS)
                await play(chance.choice(clients), model, [step], [])

    run(scenario())


def test_known_requests_are_counted_like_all_others() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for count in range(1, 50):
                await client.ask(post("/enqueue", b"x"))
                assert scene.guard.requests == count
            for count in range(50, 150):
                await client.ask(get("/dequeue"))
                assert scene.guard.requests == count
            assert scene.queues.dequeue_misses == 51
            counted = [
                sample.value
                for metric in scene.lane.metrics()
                for sample in metric.samples
                if sample.name.endswith("_duration_seconds_count")
            ]
            # One in sixteen is measured, for itself and for those before.
            assert counted == [48, 96]

    run(scenario())


def test_a_known_dequeue_waits_like_any_other() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client, other = await scene.connect(), await scene.connect()
            queue = scene.queues.get("default")
            for number in range(10):
                await client.send(get("/dequeue?timeout=30"))
                await until(lambda: queue.waiters, "the waiter")
                assert (await other.ask(post("/enqueue", b"%d" % number))).status == 202
                assert (await client.answer()).body == b"%d" % number
            await client.send(get("/dequeue?timeout=30"))
            await until(lambda: queue.waiters, "the last waiter")
            client.close()
            await until(lambda: not queue.waiters, "that it is gone")

    run(scenario())


def test_a_queue_that_goes_takes_its_known_heads_along() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            body = b'{"payload":1}'
            for _ in range(3):
                for _ in range(3):
                    answer = await client.ask(post("/queues/a/enqueue", body))
                    assert answer.status == 200
                assert json.loads(answer.body)["queue_size"] == 3
                assert (await client.ask(get("/queues/a/dequeue"))).status == 200
                scene.queues.delete("a")
                assert (await client.ask(get("/queues/a/dequeue"))).status == 404

    run(scenario())


def test_a_full_queue_refuses_known_requests_too() -> None:
    async def scenario() -> None:
        async with Scene(capacity=3) as scene:
            client = await scene.connect()
            for request in (post("/enqueue", b"x"), post("/queues/q/enqueue", b'{"payload":1}')):
                answers = [await client.ask(request) for _ in range(5)]
                assert [answer.status // 100 for answer in answers] == [2, 2, 2, 4, 4]
                assert answers[-1].headers["retry-after"] == "1"
                assert json.loads(answers[-1].body)["error"] == "queue_full"
            assert scene.queues.get("default").full_total == 2

    run(scenario())


def test_heads_without_end_are_not_all_kept() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for number in range(KNOWN_MAX + 100):
                request = get("/dequeue", f"X-Number: {number}")
                await client.send(request + request + request)
                assert [one.status for one in await client.answers(3)] == [204] * 3
            [lane] = scene.lanes
            assert len(lane.heads._known) <= KNOWN_MAX
            assert len(lane.heads._seen) <= KNOWN_MAX
            long = get("/dequeue", "X-Long: " + "x" * KNOWN_BYTES_MAX)
            for _ in range(3):
                assert (await client.ask(long)).status == 204
            assert long not in lane.heads._known

    run(scenario())


def test_a_bug_in_the_lane_itself_ends_the_connection_with_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with Scene() as scene:

            def broken(*_: object) -> int:
                raise RuntimeError("a secret")

            monkeypatch.setattr(type(scene.lane), "body_bytes_max", broken)
            client = await scene.connect()
            answer = await client.ask(get("/dequeue"))
            assert (answer.status, json.loads(answer.body)["error"]) == (500, "internal")
            assert await client.rest() == b""

    run(scenario())


def test_a_bug_in_a_hot_route_is_answered_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            requests = post("/enqueue", b"x") + get("/livez") + get("/dequeue")
            for _ in range(3):
                await client.send(requests)
                assert [one.status for one in await client.answers(3)] == [202, 200, 200]

            def broken(*_: object) -> int:
                raise RuntimeError("a secret")

            with monkeypatch.context() as patch:
                patch.setattr(type(scene.queues), "enqueue", broken)
                for _ in range(3):
                    await client.send(requests)
                    first, *others = await client.answers(3)
                    assert first.status == 500
                    assert json.loads(first.body)["error"] == "internal"
                    assert b"secret" not in first.body
                    assert [one.status for one in others] == [200, 204]
            await client.send(requests)
            assert [one.status for one in await client.answers(3)] == [202, 200, 200]

    run(scenario())
