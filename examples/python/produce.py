"""Put three messages into the queue `emails`."""

import os
import time

import requests

SERVER = os.environ.get("MILLSTREAM_SERVER", "http://127.0.0.1:8080")


def send(session: requests.Session, payload: dict[str, str]) -> None:
    """Enqueue; while the queue is full, wait as long as the broker says."""
    while True:
        url = f"{SERVER}/queues/emails/enqueue"
        answer = session.post(url, json={"payload": payload}, timeout=10)
        if answer.status_code != 429:
            answer.raise_for_status()
            return
        time.sleep(float(answer.headers["Retry-After"]))


with requests.Session() as session:
    for user in ("ada", "bob", "eve"):
        send(session, {"to": f"{user}@example.com"})
        print(f"sent {user}@example.com")
