"""Publish three records to the topic `orders`, and say where each was stored."""

import asyncio
import os

from millstream.client import AsyncClient

SERVER = os.environ.get("MILLSTREAM_SERVER", "http://127.0.0.1:8080")


async def main() -> None:
    async with AsyncClient(SERVER) as client, client.producer() as producer:
        sent = [
            await producer.send("orders", {"to": f"{user}@example.com"}, key=user)
            for user in ("ada", "bob", "eve")
        ]
        for delivery in sent:
            place = await delivery
            print(f"stored in partition {place.partition} at offset {place.offset}")


asyncio.run(main())
