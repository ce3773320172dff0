"""A worker: takes orders by lease, and handles eight at a time. Banks being what they are, some of
them fail: then the order comes again, and after the third time it is a dead letter."""

from __future__ import annotations

import asyncio
import random
import sys

from orders import TOPIC
from processes import end_with_parent

from millstream.client import AsyncClient, Leased, Reject

GROUP = "billing"
CONCURRENCY = 8
# A worker that is killed keeps its orders for so long.
VISIBILITY_S = 4.0
# How often a bank is out of order, and one customer's bank is most of the time.
FAILURES, FAILURES_OF_MALLORY = 0.04, 0.8


async def main(server: str, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  no secret
    async with AsyncClient(server) as client:

        @client.worker(TOPIC, group=GROUP, concurrency=CONCURRENCY, visibility_s=VISIBILITY_S)
        async def bill(message: Leased) -> None:
            try:
                order = message.json()
            except ValueError as error:
                raise Reject(f"no JSON: {error}") from error
            if "customer" not in order:
                raise Reject(f"order {order['order']} has no customer")
            if not isinstance(order["amount"], float):
                raise Reject(f"the amount {order['amount']!r} is no number")
            await asyncio.sleep(chance.uniform(0.01, 0.1))
            limit = FAILURES_OF_MALLORY if order["customer"] == "Mallory" else FAILURES
            if chance.random() < limit:
                waited_ms = chance.randint(80, 120)
                raise TimeoutError(
                    f"the bank of {order['customer']!r} did not answer within {waited_ms} ms"
                )

        await client.run_workers()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
