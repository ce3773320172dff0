"""Read the topic `orders` as a member of the group `mailers`, until nothing comes for a while."""

import os

from millstream.client import Client

SERVER = os.environ.get("MILLSTREAM_SERVER", "http://127.0.0.1:8080")

with (
    Client(SERVER) as client,
    client.consumer("orders", group="mailers", auto_offset_reset="earliest") as consumer,
):
    # What was taken is done, and may be committed, when the next ones are asked for.
    while records := consumer.take(100, timeout_s=2):
        for record in records:
            print("got", record.json()["to"])
