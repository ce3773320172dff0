"""A consumer that reads until it is killed."""

from __future__ import annotations

import json
import sys

from confluent_kafka import Consumer

consumer = Consumer(json.loads(sys.argv[1]))
consumer.subscribe([sys.argv[2]])
while True:
    consumer.poll(0.05)
