"""Which requests are refused for their head, and which are taken for what they are."""

from __future__ import annotations

import json

import pytest

from listeners.http_scene import Scene, get, post, run

pytestmark = pytest.mark.usefixtures("short_linger")

START = b"POST /enqueue HTTP/1.1\r\n"
HOST = b"host: localhost\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        START + HOST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        START + HOST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        START + HOST + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        START + HOST + b"content-length: 5, 5\r\n\r\nhello",
        START + HOST + b"content-length: +5\r\n\r\nhello",
        START + HOST + b"content-length: 0x5\r\n\r\nhello",
        START + HOST + b"content-length: -5\r\n\r\nhello",
        START + HOST + b"content-length: 99999999999999999999\r\n\r\nhello",
        START + HOST + b"transfer-encoding: gzip\r\n\r\nhello",
        START + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        START + HOST + b"transfer-encoding: chunked\r\n\r\n5\nhello\n0\n\n",
        START + HOST + b"transfer-encoding: chunked\r\n\r\nxyz\r\nhello\r\n0\r\n\r\n",
        START + HOST + b"x: a\r\n folded\r\ncontent-length: 0\r\n\r\n",
        START + b"host: localhost\ncontent-length: 0\r\n\r\n",
        START + b"host: local\x00host\r\ncontent-length: 0\r\n\r\n",
        START + HOST + b"x\x00y: z\r\ncontent-length: 0\r\n\r\n",
        START + b"host : localhost\r\ncontent-length: 0\r\n\r\n",
        START + b"content-length: 0\r\n\r\n",
        START + HOST + HOST + b"content-length: 0\r\n\r\n",
        b"GET / HTTP/9.9\r\n" + HOST + b"\r\n",
        b"GET /\r\n\r\n",
        b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_clear_is_refused_whole(request_: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            # What follows a refused request is never taken for another one.
            await client.send(request_ + post("/enqueue", b"smuggled"))
            answer = await client.answer()
            assert answer.status == 400
            assert json.loads(answer.body)["error"] in ("bad_request", "bad_handshake")
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""
            assert scene.held("default") == []

    run(scenario())


def test_a_length_above_the_limit_is_refused_before_the_body_is_asked_for() -> None:
    async def scenario() -> None:
        async with Scene(message_bytes_max=1000) as scene:
            client = await scene.connect()
            head = START + HOST + b"expect: 100-continue\r\ncontent-length: 99999\r\n\r\n"
            answer = await client.ask(head)
            assert answer.status == 413
            assert await client.rest() == b""

    run(scenario())


def test_a_foreign_request_is_not_asked_for_its_body() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            for path in (b"/enqueue", b"/queues/a/clear"):
                client = await scene.connect()
                head = b"POST %b HTTP/1.1\r\n" % path + HOST + b"origin: http://evil.example\r\n"
                answer = await client.ask(
                    head + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n"
                )
                assert answer.status == 403
                client.close()

    run(scenario())


@pytest.mark.parametrize("path", ["/enqueue", "/queues/default"])
def test_who_expects_to_be_told_is_told_once(path: str) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            method = "POST" if path == "/enqueue" else "PUT"
            head = f"{method} {path} HTTP/1.1\r\nhost: a.localhost\r\n".replace("a.", "")
            rest = "expect: 100-continue\r\ncontent-length: 20\r\n\r\n"
            assert (await client.ask((head + rest).encode())).status == 100
            await client.send(b'{"capacity"', b":9}      ")
            assert (await client.answer()).status in (200, 202)
            assert scene.guard.requests == 1
            assert (await client.ask(get("/health"))).status == 200

    run(scenario())


def test_who_expects_to_be_told_is_told_when_its_turn_comes() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(get("/dequeue?timeout=30"))
            await client.send(START + HOST + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
            other = await scene.connect()
            assert (await other.ask(post("/enqueue", b"first"))).status == 202
            assert (await client.answer()).body == b"first"
            assert (await client.answer()).status == 100
            assert (await client.ask(b"hello")).status == 202
            assert scene.held("default") == [b"hello"]

    run(scenario())


@pytest.mark.parametrize("cut", range(0, 130, 7))
def test_a_client_that_would_rather_speak_http2_is_served_in_http1(cut: int) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            upgrade = (
                b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
                b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
            )
            plain = START + HOST + upgrade + b"content-length: 5\r\n\r\nhello"
            chunked = START + HOST + upgrade + b"transfer-encoding: chunked\r\n\r\n"
            whole = (
                plain
                + chunked
                + b"5\r\nworld\r\n0\r\n\r\n"
                + get("/dequeue", upgrade.decode()[:-2])
            )
            await client.send(whole[:cut] or whole[:1])
            await client.send(whole[cut or 1 :])
            answers = await client.answers(3)
            assert [answer.status for answer in answers] == [202, 202, 200]
            assert answers[2].body == b"hello"
            assert scene.held("default") == [b"world"]

    run(scenario())


def test_headers_after_a_body_change_nothing() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            head = (
                b"POST /queues/q/enqueue HTTP/1.1\r\n"
                + HOST
                + b"transfer-encoding: chunked\r\n\r\n"
            )
            body = b'd\r\n{"payload":1}\r\n0\r\n'
            trailers = (
                b"content-type: application/octet-stream\r\norigin: http://evil.example\r\n\r\n"
            )
            answer = await client.ask(head + body + trailers)
            assert answer.status == 200
            assert scene.held("q") == [b"1"]

    run(scenario())


def test_a_body_in_a_great_many_chunks_is_taken_whole() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            head = START + HOST + b"transfer-encoding: chunked\r\n\r\n"
            text = b"0123456789" * 2000
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
            assert (await client.ask(head + chunks + b"0\r\n\r\n")).status == 202
            assert scene.held("default") == [text]

    run(scenario())


@pytest.mark.parametrize("junk", [b"5;" + b"x" * 200_000, b"0\r\nx: " + b"y" * 200_000])
def test_what_stands_around_chunks_is_bounded(junk: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            head = START + HOST + b"transfer-encoding: chunked\r\n\r\n"
            await client.send(head, junk)
            assert (await client.answer()).status == 431

    run(scenario())


def test_old_and_odd_clients_are_served() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            old = await scene.connect()
            answer = await old.ask(b"POST /enqueue HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
            assert (answer.status, answer.headers["connection"]) == (202, "close")
            assert await old.rest() == b""
            odd = await scene.connect()
            answer = await odd.ask(
                b"\r\nGET http://localhost/queues/default/dequeue HTTP/1.1\r\n" + HOST + b"\r\n"
            )
            assert json.loads(answer.body)["payload"] == "aGk="
            assert (await odd.ask(get("/queues/%64efault/dequeue"))).status == 204
            assert (await odd.ask(b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n")).status == 404

    run(scenario())


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "PURGE"])
def test_other_methods_take_nothing(method: str) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.fill("default", [b"kept"])
            client = await scene.connect()
            await client.send(f"{method} /dequeue HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            await client.send(get("/queues"))
            if method == "HEAD":
                # Its length is that of a body which is not there.
                data = b""
                while b"HTTP/1.1 200" not in data:
                    data += await client._loop.sock_recv(client.socket, 65536)
                assert data.startswith(b"HTTP/1.1 405 ")
                assert data.partition(b"\r\n\r\n")[2].startswith(b"HTTP/1.1 200 ")
            else:
                assert [one.status for one in await client.answers(2)] == [405, 200]
            assert scene.held("default") == [b"kept"]

    run(scenario())


def test_every_answer_has_a_date() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            requests = [post("/enqueue", b"x")] * 3 + [get("/dequeue")] * 5
            requests += [get("/health"), get("/queues/none/dequeue"), b"nonsense\r\n\r\n"]
            for request in requests:
                assert (await client.ask(request)).headers["date"].endswith(" gmt")

    run(scenario())


@pytest.mark.parametrize(
    "query",
    [
        "timeout=1_0",
        "timeout=%201",
        "timeout=1%20",
        "timeout=%D9%A1",
        "timeout=nan",
        "timeout=inf",
        "timeout=1e1",
        "timeout=-0.0",
        "timeout=%2B1",
        "timeout=",
        "timeout=.5",
        "timeout=0x1",
        "timeout=30.1",
        "timeout=" + "1" * 5000,
        "max=1_0",
        "max=1.0",
        "max=%201",
        "max=%D9%A1",
        "max=0",
        "max=1001",
        "max=",
        "timeout=1&timeout=1",
        "max=1&max=2",
    ],
)
def test_a_parameter_that_is_no_plain_number_is_refused(query: str) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.fill("q", [b"kept"])
            client = await scene.connect()
            # Three times: a head that was seen before is as wrong as it was.
            for _ in range(3):
                answer = await client.ask(get(f"/queues/q/dequeue?{query}"))
                assert answer.status == 400
                assert json.loads(answer.body)["error"] == "parameter_invalid"
            assert scene.held("q") == [b"kept"]

    run(scenario())


@pytest.mark.parametrize("name", [".", "..", "%2E", "%2e%2E", "a%2Fb", "%00", "%FF", "é".encode()])
def test_names_that_no_client_can_spell_are_refused(name: str | bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            spelled = name if isinstance(name, str) else "".join(f"%{byte:02X}" for byte in name)
            body = b'{"payload":1}'
            for request in (
                post(f"/queues/{spelled}/enqueue", body),
                get(f"/queues/{spelled}/dequeue"),
            ):
                for _ in range(3):
                    answer = await client.ask(request)
                    assert answer.status == 400
                    assert json.loads(answer.body)["error"] == "queue_name_invalid"
            assert [queue.name for queue in scene.queues] == ["default"]

    run(scenario())
