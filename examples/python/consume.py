"""Take messages from the queue `emails` until none comes for two seconds."""

import os

import requests

SERVER = os.environ.get("MILLSTREAM_SERVER", "http://127.0.0.1:8080")

with requests.Session() as session:
    while True:
        answer = session.get(f"{SERVER}/queues/emails/dequeue?timeout=2", timeout=10)
        answer.raise_for_status()
        if answer.status_code == 204:
            break
        print("got", answer.json()["payload"]["to"])
