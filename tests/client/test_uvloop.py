"""The client on uvloop, which many programs run on."""

from __future__ import annotations

import asyncio

import uvloop

from broker_process import BrokerProcess
from millstream.client import AsyncClient

PATIENCE_S = 30.0


def test_the_client_works_on_uvloop(broker: BrokerProcess) -> None:
    async def publish_and_read() -> list[object]:
        async with AsyncClient(broker.url("")) as client:
            await client.publish("orders", {"total": 1})
            async with client.stream("orders") as stream:
                await stream.open(start="earliest")
                streamed = await anext(stream)
            read = [record.json() async for record in client.read("orders")]
            return [streamed.json(), *read]

    found = uvloop.run(asyncio.wait_for(publish_and_read(), PATIENCE_S))
    assert found == [{"total": 1}, {"total": 1}]
