"""A stream of orders: most are fine, some are urgent, some are for later, and some are broken."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import UTC, datetime

from millstream.client import Client

TOPIC = "orders"
ORDERS_PER_S = 60.0
URGENT, LATER, BROKEN = 0.06, 0.05, 0.02
CUSTOMERS = ("Ada", "Bob", "Chen", "Dora", "Eve", "Finn", "Grace", "Hugo", "Ines", "Mallory")
COUNTRIES = ("de", "fr", "it", "pl", "us")


def publish_orders(
    client: Client, chance: random.Random, stop: threading.Event, sent: Counter[str]
) -> None:
    """One after the other, until told to stop; `sent` counts those that are not like most."""
    with client.producer() as producer:
        number = 0
        while not stop.wait(chance.expovariate(ORDERS_PER_S)):
            number += 1
            order = new_order(number, chance)
            key = str(order.get("customer", ""))
            kind = chance.random()
            if kind < LATER:
                sent["later"] += 1
                client.publish(TOPIC, order, key=key, delay=f"{chance.randint(3, 8)}s")
            elif kind < LATER + URGENT:
                sent["urgent"] += 1
                producer.send(TOPIC, order, key=key, lane="critical")
            elif kind < LATER + URGENT + BROKEN:
                sent["broken"] += 1
                producer.send(TOPIC, broken(order, chance), key=key)
            else:
                producer.send(TOPIC, order, key=key)


def new_order(number: int, chance: random.Random) -> dict[str, object]:
    return {
        "order": number,
        "customer": chance.choice(CUSTOMERS),
        "country": chance.choice(COUNTRIES),
        "amount": round(chance.lognormvariate(3.5, 0.8), 2),
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def broken(order: dict[str, object], chance: random.Random) -> dict[str, object] | bytes:
    """As programs send them that were never tested."""
    what = chance.randrange(3)
    if what == 0:
        return {name: value for name, value in order.items() if name != "customer"}
    if what == 1:
        return order | {"amount": f"{order['amount']} EUR"}
    return f'{{"order": {order["order"]}, "cust'.encode()
