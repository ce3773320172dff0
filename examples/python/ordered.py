"""Read the topic `orders` in order over one connection, and acknowledge each record.

Give the consumer's id, as printed before, to go on at the first record that was not acknowledged.
"""

import asyncio
import os
import sys

from millstream.client import AsyncClient

SERVER = os.environ.get("MILLSTREAM_SERVER", "http://127.0.0.1:8080")


async def main(consumer_id: str | None) -> None:
    async with AsyncClient(SERVER) as client, client.stream("orders") as stream:
        print("consumer", await stream.open(consumer_id))
        try:
            async with asyncio.timeout(2):
                async for record in stream:
                    print("got", record.json()["to"])
                    await stream.ack(record)
        except TimeoutError:
            print("nothing more for now")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
