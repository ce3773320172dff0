"""Millstream at work, from nothing: `make demo`.

    a broker                   started here, with its data in a new folder
    a stream of orders         some urgent, some for later, some broken          orders.py
    workers                    lease them, sometimes fail, and one is killed     workers.py
    Spark                      rolls orders up, archives them, and reports       spark_side.py
                               what failed
    a screen                   shows all of it as it happens                     screen.py

It ends by itself, and says where the Parquet files and the report are. Ctrl-C ends it early; either
way nothing is left running.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from orders import TOPIC, publish_orders
from processes import Child, free_port, wait_until_ready
from screen import Facts, Screen, screen_for
from spark_side import TOTALS

from millstream.client import Client

# Ctrl-C, an order from elsewhere, and the end of the terminal.
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HERE = Path(__file__).parent
WORKERS = 2
# Of the whole time, orders come for so much; the rest is for what Spark does at the end.
ORDERS_SHARE = 0.65
# When, in the time of the orders, a worker is killed.
KILL_SHARE = 0.5
LOOK_S = 0.5
# Workers finish what there is; what a broken bank refuses for ever does not keep them.
DRAIN_S_MAX = 15.0
# Starting Spark on a busy machine takes long.
SPARK_S_MAX = 240.0


def main() -> int:
    asked = arguments()
    folder = Path(asked.dir or tempfile.mkdtemp(prefix="millstream-demo-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for number in ENDINGS:
        signal.signal(number, interrupt)
    facts = Facts(seconds=asked.seconds, folder=folder)
    try:
        with screen_for(facts, is_plain=asked.plain) as screen, ExitStack() as stack:
            try:
                run(asked.seconds, asked.seed, facts, screen, stack)
            finally:
                # From here on all is ended, which nobody shall disturb.
                for number in ENDINGS:
                    signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        print(f"stopped; nothing is left running, and {folder} has what there was")
        return 130
    except RuntimeError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(facts.summary())
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=110, help="about how long it takes")
    parser.add_argument("--dir", help="where data and results go; by default a new folder")
    parser.add_argument("--plain", action="store_true", help="lines, also on a terminal")
    parser.add_argument("--seed", type=int, default=1, help="which orders come, and which fail")
    return parser.parse_args()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run(seconds: float, seed: int, facts: Facts, screen: Screen, stack: ExitStack) -> None:
    folder, orders_s = facts.folder, seconds * ORDERS_SHARE
    server, kafka = f"http://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    serve = ["-m", "millstream", "serve", "--data", str(folder / "data"), "--kafka", kafka]
    broker = Child("broker", [*serve, "--http", server.removeprefix("http://"), "--metrics", "off"])
    broker.start(folder, stack)
    wait_until_ready(broker, server)
    client = stack.enter_context(Client(server))
    # A failed order comes again soon, and is a dead letter after the third time.
    settings = {"deliveries_max": 3, "retry_delay_ms": 500, "retry_delay_max_ms": 2000}
    client.topics.create(TOPIC, partitions=3, settings=settings)
    client.topics.create(TOTALS, partitions=1)
    facts.note(f"a broker runs at {server}, its data are in {folder / 'data'}")

    spark = Child("spark", [str(HERE / "spark_side.py"), server, str(folder)], facts.heard)
    spark.start(folder, stack)
    workers = [
        Child(f"worker-{number}", [str(HERE / "workers.py"), server, str(seed + number)])
        for number in range(WORKERS + 1)
    ]
    for worker in workers[:WORKERS]:
        worker.start(folder, stack)
    facts.note(f"{WORKERS} workers lease orders; Spark starts")

    stop = threading.Event()
    chance = random.Random(seed)  # noqa: S311  no secret
    source = threading.Thread(
        target=publish_orders, args=(client, chance, stop, facts.sent), daemon=True
    )
    source.start()
    stack.callback(source.join)
    stack.callback(stop.set)
    is_killed = False
    while facts.elapsed_s < orders_s:
        if not is_killed and facts.elapsed_s > orders_s * KILL_SHARE:
            is_killed = True
            workers[0].kill()
            workers[WORKERS].start(folder, stack)
            facts.note("a worker was killed; what it had leased comes back to the others")
        look(client, facts, screen, [broker, spark])
    stop.set()
    source.join()
    facts.note("no more orders; the workers finish, then Spark")
    finish(client, facts, screen, [broker, spark])


def finish(client: Client, facts: Facts, screen: Screen, children: list[Child]) -> None:
    """Let the workers empty the topic and Spark catch up, and wait for its report."""
    _, spark = children
    deadline = time.monotonic() + DRAIN_S_MAX
    while facts.is_work_left and time.monotonic() < deadline:
        look(client, facts, screen, children)
    spark.tell("finish")
    deadline = time.monotonic() + SPARK_S_MAX
    while not facts.report:
        look(client, facts, screen, children)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"Spark was not done after {SPARK_S_MAX:.0f} s: {spark.last_words()}"
            )
    look(client, facts, screen, [])


def look(client: Client, facts: Facts, screen: Screen, children: list[Child]) -> None:
    """Ask the broker how things are, show it, and pause; a child that died ends the demo."""
    for child in children:
        if not child.is_alive() and not (child.name == "spark" and facts.report):
            raise RuntimeError(f"the {child.name} ended by itself: {child.last_words()}")
    facts.take(client)
    screen.show(facts)
    time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
