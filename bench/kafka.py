"""`mill bench kafka`: the Kafka listener, against Apache Kafka with the same clients.

The load comes from librdkafka, in a process of its own, with the same settings for both. Every line
says how often the log is synced: Apache Kafka with `every` syncs after each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bench.harness import Bench, Goal, Line, Measurement, Peer, Unit, alternate, make_line
from bench.kafka_load import Load, Outcome, run
from bench.kafka_peer import kafka_or_why
from bench.servers import Broker, broker, free_port

RECORDS_PER_SECOND = Unit("records/s")
MILLISECONDS = Unit("ms", is_higher_better=False)
SECONDS_PER_MILLION = Unit("CPU s per million", is_higher_better=False)
MEBIBYTES = Unit("MiB", is_higher_better=False)
PEER = "Apache Kafka"
# No rate is to be lower than the peer's, and no wait longer.
PEER_RATIO = 1.0

# Records a second that a run is long enough for.
RATES = {100: 600_000, 1024: 200_000}
GOALS = {("produce", 100): 650_000, ("produce", 1024): 250_000}
GOALS |= {("consume", 100): 1_200_000, ("consume", 1024): 500_000}
# What remains with a sync for every batch.
EVERY_SHARE = 0.8
LATENCY_RATE = 10_000
PARTITIONS = (1, 6)
MODES = ("none", "every")


def throughput(size: int, mode: str, partitions: int) -> Callable[[Bench], Iterator[Line]]:
    """In and out, in turn with the peer; every run has a topic of its own."""

    def measure(bench: Bench) -> Iterator[Line]:
        count = max(10_000, round(RATES[size] * bench.scale.seconds))
        with ExitStack() as stack:
            ours, server = _ours(bench, stack, mode, partitions)
            peer, why = kafka_or_why(bench, stack, mode=mode, partitions=partitions)
            sides: dict[str, Callable[[], float]] = {}
            cpu: dict[str, list[float]] = {"produce": [], "consume": []}
            numbers = iter(range(1_000_000))

            def load(where: str, what: str, topic: str) -> float:
                asked = Load(where, what, topic, partitions, count, size)
                before_s = ours.cpu_s()
                rate = run(asked).rate
                if where == server:
                    cpu[what].append((ours.cpu_s() - before_s) * 1e6 / count)
                return rate

            for name, where in (("ours", server), ("peer", peer)):
                if not where:
                    continue
                topics: list[str] = []

                def produced(where: str = where, topics: list[str] = topics) -> float:
                    topics.append(f"bench-{next(numbers)}")
                    return load(where, "produce", topics[-1])

                def consumed(where: str = where, topics: list[str] = topics) -> float:
                    return load(where, "consume", topics[-1])

                sides[f"{name}-produce"] = produced
                sides[f"{name}-consume"] = consumed
            # A topic is filled before it is read.
            values = _in_turn(sides, bench.scale.runs)
        for what in ("produce", "consume"):
            yield _line(what, size, mode, partitions, values, why)
        if size == 1024 and partitions == 1:
            for what in ("produce", "consume"):
                yield make_line(
                    f"cpu.{what}-1KiB-{mode}",
                    mode=mode,
                    unit=SECONDS_PER_MILLION,
                    values=cpu[what],
                    taken="median",
                    note="of the broker, all its threads",
                )

    return measure


def _in_turn(sides: dict[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """As `alternate`, but producing before consuming on either side."""
    pairs = {
        name.removesuffix("-produce"): (name, name.replace("produce", "consume"))
        for name in sides
        if name.endswith("-produce")
    }
    values: dict[str, list[float]] = {name: [] for name in sides}

    def both(name: str) -> Callable[[], float]:
        def do() -> float:
            for one in pairs[name]:
                values[one].append(sides[one]())
            return 0.0

        return do

    alternate({name: both(name) for name in pairs}, runs)
    return values


def _line(  # noqa: PLR0917  what a line is named by, in its order
    what: str,
    size: int,
    mode: str,
    partitions: int,
    values: dict[str, list[float]],
    why: str,
) -> Line:
    goal = GOALS[what, size] * (EVERY_SHARE if what == "produce" and mode == "every" else 1)
    return make_line(
        _name(what, size, mode, partitions),
        mode=mode,
        unit=RECORDS_PER_SECOND,
        values=values[f"ours-{what}"],
        peer=Peer(PEER, values.get(f"peer-{what}", ()), why or None),
        goal=Goal("value at least", goal, ratio=PEER_RATIO),
        note=f"{partitions} partition{'s' if partitions > 1 else ''}; the goal is also {PEER}'s",
    )


def _name(what: str, size: int, mode: str, partitions: int) -> str:
    return f"{what}.{'100B' if size == 100 else '1KiB'}-{mode}-{partitions}"


def latency(bench: Bench) -> Iterator[Line]:
    """From when a record was due until it was consumed, one client that does both."""
    count = max(2000, round(LATENCY_RATE * bench.scale.seconds))
    outcomes: dict[str, list[Outcome]] = {"ours": [], "peer": []}
    with ExitStack() as stack:
        _, server = _ours(bench, stack, "every", 1)
        peer, why = kafka_or_why(bench, stack, mode="every", partitions=1)
        for _ in range(bench.scale.runs):
            for name, where in (("ours", server), ("peer", peer)):
                if where:
                    asked = Load(where, "latency", "late", 1, count, 1024, LATENCY_RATE)
                    outcomes[name].append(run(asked))
    late_ms = min(one.late_p99_ms for one in outcomes["ours"])
    for share, goal_ms in (("p50", 1.5), ("p99", 5.0)):
        yield make_line(
            f"latency.{share}",
            mode="every",
            unit=MILLISECONDS,
            values=[getattr(one, f"{share}_ms") for one in outcomes["ours"]],
            peer=Peer(PEER, [getattr(one, f"{share}_ms") for one in outcomes["peer"]], why or None),
            goal=Goal("value at most", goal_ms, ratio=PEER_RATIO),
            taken="median",
            note=f"{LATENCY_RATE} records/s of 1 KiB; the load itself came {late_ms:.1f} ms late; "
            f"the goal is also {PEER}'s",
        )


def memory(bench: Bench) -> Iterator[Line]:
    """What a broker grows by, from one load to many."""
    count = max(10_000, round(RATES[1024] * bench.scale.seconds))
    with ExitStack() as stack:
        ours, server = _ours(bench, stack, "none", 6, "--retention-bytes", "64M")
        sizes = []
        for number in range(2 + bench.scale.runs):
            topic = f"load-{number % 2}"
            run(Load(server, "produce", topic, 6, count, 1024))
            run(Load(server, "consume", topic, 6, count // 10, 1024))
            sizes.append(ours.resident_mib())
    yield make_line(
        "memory.growth",
        mode="none",
        unit=MEBIBYTES,
        values=[sizes[-1] - sizes[1]],
        goal=Goal("value at most", 64),
        note=f"from the second load of {count} records to number {len(sizes)}",
    )


def _ours(
    bench: Bench, stack: ExitStack, mode: str, partitions: int, *flags: str
) -> tuple[Broker, str]:
    server = f"127.0.0.1:{free_port()}"
    settings = ("--kafka", server, "--fsync", mode, "--topic-partitions", str(partitions))
    return stack.enter_context(broker(bench.scratch, *settings, *flags)), server


def _measurements() -> Iterator[Measurement]:
    for size in (100, 1024):
        for mode in MODES:
            for partitions in PARTITIONS:
                names = [_name(what, size, mode, partitions) for what in ("produce", "consume")]
                if size == 1024 and partitions == 1:
                    names += [f"cpu.{what}-1KiB-{mode}" for what in ("produce", "consume")]
                yield Measurement(tuple(names), throughput(size, mode, partitions))
    yield Measurement(("latency.p50", "latency.p99"), latency)
    yield Measurement(("memory.growth",), memory)


MEASUREMENTS = tuple(_measurements())
