"""Calls are tried again where that is safe, and only there."""

from __future__ import annotations

import asyncio

import pytest

from client.scripted import Request, ScriptedServer, answer, run, until
from millstream.client import AsyncClient, Client
from millstream.client.transport import Transport
from millstream.errors import (
    BrokerUnreachable,
    ClientClosed,
    OutcomeUnknown,
    QueueFull,
    SettingInvalid,
    TopicUnknown,
)
from millstream.wire.refusals import Refused
from millstream.wire.retry import RetryPolicy

QUICK = RetryPolicy(timeout_s=20.0, pause_s=0.001, pause_s_max=0.01)
BUSY = answer(503, b'{"error":"engine_stopped","message":"later"}')
FULL = answer(429, b'{"error":"queue_full","message":"no room","queue_name":"q"}', retry_after="0")
UNKNOWN = answer(504, b'{"error":"outcome_unknown","message":"who knows"}')
GONE = answer(404, b'{"error":"topic_unknown","message":"there is none","topic":"t"}')


def test_a_client_that_names_no_broker_goes_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def server_of(*given: str) -> str:
        async with AsyncClient(*given) as client:
            return client.server

    monkeypatch.delenv("MILLSTREAM_SERVER", raising=False)
    assert run(server_of()) == "http://127.0.0.1:8080"
    monkeypatch.setenv("MILLSTREAM_SERVER", "https://there:8443/")
    assert run(server_of()) == "https://there:8443"
    assert run(server_of("http://here:1")) == "http://here:1"
    with Client() as client:
        assert client.inner.server == "https://there:8443"
    monkeypatch.setenv("MILLSTREAM_SERVER", "there:8443")
    with pytest.raises(SettingInvalid, match=r"^MILLSTREAM_SERVER: 'there:8443' is not where"):
        run(server_of())


def test_one_connection_serves_calls_one_after_the_other() -> None:
    async def scenario() -> None:
        async with ScriptedServer([answer(200, b"%d" % n) for n in range(5)]) as server:
            transport = Transport(server.url)
            bodies = [(await transport.ask("GET", "/x")).body for _ in range(5)]
            assert bodies == [b"0", b"1", b"2", b"3", b"4"]
            assert server.connections == 1
            await transport.close()

    run(scenario())


def test_what_is_busy_is_tried_again() -> None:
    async def scenario() -> None:
        async with ScriptedServer([BUSY, FULL, answer(200, b"ok")]) as server:
            transport = Transport(server.url, retry=QUICK)
            assert (await transport.ask("POST", "/x", b"{}")).body == b"ok"
            assert len(server.requests) == 3
            await transport.close()

    run(scenario())


def test_a_refusal_is_the_error_that_it_is() -> None:
    async def scenario() -> None:
        async with ScriptedServer([GONE]) as server:
            transport = Transport(server.url, retry=QUICK)
            with pytest.raises(TopicUnknown) as caught:
                await transport.ask("GET", "/x")
            assert caught.value.message == "there is none"
            assert caught.value.fields == {"topic": "t"}
            assert len(server.requests) == 1
            await transport.close()

    run(scenario())


def test_a_code_that_is_not_known_here_is_kept() -> None:
    async def scenario() -> None:
        async with ScriptedServer([answer(409, b'{"error":"of_the_future","message":"x"}')]) as s:
            transport = Transport(s.url, retry=QUICK)
            with pytest.raises(Refused) as caught:
                await transport.ask("POST", "/x")
            assert caught.value.code == "of_the_future"
            await transport.close()

    run(scenario())


def test_time_is_up_with_the_last_error() -> None:
    async def always_full(_: Request) -> bytes:
        return FULL

    async def scenario() -> None:
        async with ScriptedServer(always_full) as server:
            transport = Transport(server.url, retry=QUICK._replace(timeout_s=2.0))
            with pytest.raises(QueueFull):
                await transport.ask("POST", "/x", b"{}")
            assert server.requests
            await transport.close()

    run(scenario())


def test_a_pause_that_the_broker_asks_for_is_made() -> None:
    """Asked for an hour, it is not tried again within the time there is."""

    async def scenario() -> None:
        wait = answer(429, b'{"error":"queue_full","message":"x"}', retry_after="3600")
        async with ScriptedServer([wait, answer(200)]) as server:
            transport = Transport(server.url, retry=QUICK)
            with pytest.raises(QueueFull):
                await transport.ask("POST", "/x", b"{}")
            assert len(server.requests) == 1
            await transport.close()

    run(scenario())


@pytest.mark.parametrize("lost", [None, answer(200, b"hello")[:-3], UNKNOWN])
def test_a_lost_answer_is_asked_for_again_only_when_that_is_safe(lost: bytes | None) -> None:
    async def scenario(method: str) -> tuple[bytes, int]:
        async with ScriptedServer([lost, answer(200, b"second")]) as server:
            transport = Transport(server.url, retry=QUICK, answer_s=0.5)
            try:
                return (await transport.ask(method, "/x")).body, len(server.requests)
            finally:
                tries.append(len(server.requests))
                await transport.close()

    tries: list[int] = []
    assert run(scenario("GET")) == (b"second", 2)
    with pytest.raises(OutcomeUnknown):
        run(scenario("POST"))
    assert tries == [2, 1]


def test_an_answer_that_does_not_come_in_time_is_unknown() -> None:
    async def never(_: Request) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        async with ScriptedServer(never) as server:
            transport = Transport(server.url, answer_s=0.05)
            with pytest.raises(OutcomeUnknown, match=r"no answer in 0\.05 s"):
                await transport.ask("POST", "/x")
            assert transport.connections == 0 or await _none_left(transport)
            await transport.close()

    run(scenario())


async def _none_left(transport: Transport) -> bool:
    await until(lambda: transport.connections == 0, "the connection to end")
    return True


def test_no_broker_is_waited_for_and_then_told() -> None:
    async def scenario() -> None:
        async with ScriptedServer([]) as server:
            url = server.url
        transport = Transport(url, retry=QUICK._replace(timeout_s=0.05))
        with pytest.raises(BrokerUnreachable, match="start one with `mill serve`"):
            await transport.ask("POST", "/x")
        await transport.close()

    run(scenario())


def test_what_is_no_broker_is_told_at_once() -> None:
    async def scenario() -> None:
        async with ScriptedServer([answer(404, b"<html>")]) as server:
            transport = Transport(server.url, retry=QUICK)
            with pytest.raises(BrokerUnreachable, match="is no broker"):
                await transport.ask("GET", "/x")
            await transport.close()

    run(scenario())


def test_connections_are_bounded_and_calls_wait_in_line() -> None:
    held = 0
    most = 0

    async def scenario() -> None:
        gate = asyncio.Event()

        async def hold(_: Request) -> bytes:
            nonlocal held, most
            held += 1
            most = max(most, held)
            await gate.wait()
            held -= 1
            return answer(200)

        async with ScriptedServer(hold) as server:
            transport = Transport(server.url, connections_max=3)
            calls = [asyncio.ensure_future(transport.ask("GET", "/x")) for _ in range(10)]
            await until(lambda: held == 3, "three calls")
            # A long poll has a connection beside the limit.
            poll = asyncio.ensure_future(transport.ask("GET", "/poll", hold_s=5.0))
            await until(lambda: held == 4, "the long poll")
            calls[5].cancel()
            gate.set()
            await asyncio.gather(*calls, poll, return_exceptions=True)
            assert sum(call.cancelled() for call in calls) == 1
            assert most == 4
            await transport.close()

    run(scenario())


def test_a_call_that_is_cancelled_does_not_give_its_answer_to_the_next() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def slow_first(request: Request) -> bytes:
            if request.path == "/slow":
                await gate.wait()
            return answer(200, request.path.encode())

        async with ScriptedServer(slow_first) as server:
            transport = Transport(server.url, connections_max=1)
            slow = asyncio.ensure_future(transport.ask("GET", "/slow"))
            await until(lambda: server.requests, "the request")
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            quick = asyncio.ensure_future(transport.ask("GET", "/quick"))
            gate.set()
            assert (await quick).body == b"/quick"
            await transport.close()

    run(scenario())


def test_a_client_that_was_closed_says_so() -> None:
    async def scenario() -> None:
        transport = Transport("http://127.0.0.1:1")
        await transport.close()
        with pytest.raises(ClientClosed):
            await transport.ask("GET", "/x")

    run(scenario())


@pytest.mark.parametrize("server", ["127.0.0.1:8080", "ftp://x", "http://", "http://x:port", ""])
def test_a_server_that_is_no_url_is_refused(server: str) -> None:
    with pytest.raises(SettingInvalid):
        Transport(server)


def test_pauses_grow_and_are_never_in_step() -> None:
    low = RetryPolicy(pause_s=1.0, pause_s_max=4.0).pauses(lambda: 0.0)
    high = RetryPolicy(pause_s=1.0, pause_s_max=4.0).pauses(lambda: 1.0)
    assert [low.next_s() for _ in range(4)] == [0.5, 1.0, 2.0, 2.0]
    assert [high.next_s() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert low.next_s(retry_after_s=10.0) == 12.0
