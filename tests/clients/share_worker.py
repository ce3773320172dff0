"""A member of a share group that is to be killed at work: `share_worker.py SERVER GROUP TOPIC
COUNT`.

It takes COUNT records, accepts the first, writes a line with what it has, and then does nothing.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import AcknowledgeType, Message, ShareConsumer


def main(server: str, group: str, topic: str, count: str) -> None:
    consumer = ShareConsumer(
        {
            "bootstrap.servers": server,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
        }
    )
    consumer.subscribe([topic])
    messages: list[Message] = []
    while len(messages) < int(count):
        messages += consumer.poll(0.2)
    consumer.acknowledge(messages[0], AcknowledgeType.ACCEPT)
    consumer.commit_sync(timeout=60)
    values = [(one.value() or b"").decode() for one in messages]
    print(*values, flush=True)
    while True:
        # Its library goes on to say that it is there.
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
