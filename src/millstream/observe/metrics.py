"""Metrics, read when somebody looks.

Counters are plain integers on the objects that own them, so that counting costs one addition.
A part registers a function that yields metric families; it is called at each scrape. Every name
starts with `millstream_`; a counter's ends with `_total`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "millstream_"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source: TypeAlias = Callable[[], Iterable[Metric]]
# Label values, in the order of the family's labels, with the number that belongs to them.
Samples: TypeAlias = Mapping[tuple[str, ...], float]


def counter(name: str, text: str, value: float) -> Metric:
    """A number that only grows. The text format adds `_total` to its name."""
    return CounterMetricFamily(PREFIX + name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    """A number that goes up and down."""
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def counters(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """One counter for each combination of label values."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples.items():
        family.add_metric(values, number)
    return family


def gauges(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """One gauge for each combination of label values."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples.items():
        family.add_metric(values, number)
    return family


class Row(Protocol):
    """One number of a part that knows nothing of Prometheus, such as the engine."""

    @property
    def name(self) -> str:
        """In full, with the prefix; without the `_total` of a counter."""
        ...

    @property
    def kind(self) -> str:
        """`counter` or `gauge`."""
        ...

    @property
    def help(self) -> str: ...

    @property
    def value(self) -> float: ...

    @property
    def labels(self) -> tuple[tuple[str, str], ...]: ...


def families(rows: Iterable[Row]) -> Iterator[Metric]:
    """Rows as the page wants them: those of one name together, whatever their order."""
    found: dict[str, Metric] = {}
    for row in rows:
        assert row.name.startswith(PREFIX), row.name
        family = found.get(row.name)
        if family is None:
            family = found[row.name] = Metric(row.name, row.help, row.kind)
        suffix = "_total" if row.kind == "counter" else ""
        family.add_sample(row.name + suffix, dict(row.labels), row.value)
    yield from found.values()


class _Sources(Collector):
    """What the registry asks at a scrape."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def collect(self) -> Iterator[Metric]:
        for source in self.sources:
            yield from source()


class Metrics:
    """The registry of one broker."""

    def __init__(self) -> None:
        self._sources = _Sources()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._sources)
        # Memory, processor time and open files of the process; empty where there is no /proc.
        ProcessCollector(namespace="millstream", registry=self._registry)

    def register(self, source: Source) -> None:
        """Have a part's metrics on the page from now on."""
        self._sources.sources.append(source)

    def text(self) -> bytes:
        """The page as Prometheus reads it."""
        return generate_latest(self._registry)

    def values(self) -> dict[str, object]:
        """The same for JSON: a number a name, or a list of labelled numbers."""
        page: dict[str, object] = {}
        for family in self._registry.collect():
            for sample in family.samples:
                if not sample.labels:
                    page[sample.name] = sample.value
                    continue
                labelled = page.setdefault(sample.name, [])
                assert isinstance(labelled, list), f"{sample.name} has labels only sometimes"
                labelled.append({"labels": sample.labels, "value": sample.value})
        return page
