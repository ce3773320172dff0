"""The client over TLS, for HTTP and WebSocket: whoever cannot be trusted gets nothing."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from client.scripted import answer, read_request, run
from millstream.client import AsyncClient
from millstream.errors import BrokerUnreachable, TopicUnknown

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
GONE = answer(404, b'{"error":"topic_unknown","message":"there is none"}')


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-out", str(paths[0]), "-keyout"]
    subprocess.run([*command.split(), *names, str(paths[1])], check=True, capture_output=True)
    return paths


def test_a_trusted_broker_is_talked_to_and_another_is_not(certificate: tuple[Path, Path]) -> None:
    served: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                served.append((await read_request(reader)).path)
                writer.write(GONE)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()

    async def scenario() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        async with AsyncClient(url, tls=trust) as client:
            for _ in range(2):
                with pytest.raises(TopicUnknown):
                    await client.topics.describe("t")
            with pytest.raises(TopicUnknown):
                async with client.stream("t"):
                    raise AssertionError
        assert len(served) == 3
        async with AsyncClient(url, retry_s=0.0) as client:
            for call in (client.topics.describe("t"), client.stream("t").__aenter__()):
                with pytest.raises(BrokerUnreachable) as caught:
                    await call
                said = caught.value.message
                assert said.startswith(f"the certificate of {url} is not trusted: self-signed")
                assert "name who signed it, with --ca or MILLSTREAM_CA" in said
                assert "tls=ssl.create_default_context(cafile=…)" in said
                assert "mill serve" not in said
        assert len(served) == 3
        server.close()

    run(scenario())
