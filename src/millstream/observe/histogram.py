"""How long things take: counts in a plain list, one for each bound.

One in SAMPLE_EVERY is measured and counts for all of them: two looks at the clock and a search
cost a third of a microsecond, and a request in the fast lane has ten. Quantiles are those of the
sample; the count lags behind by less than SAMPLE_EVERY and is never ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

from millstream.observe.metrics import PREFIX

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BOUNDS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
SAMPLE_EVERY = 16


class Histogram:
    __slots__ = ("counts", "sum_s", "turn")

    def __init__(self) -> None:
        # The last one is for what is above every bound.
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        # Counted by whoever decides what is measured.
        self.turn = 0

    def observe(self, seconds: float) -> None:
        """A measured one, for itself and for those before it that were not."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += SAMPLE_EVERY
        self.sum_s += seconds * SAMPLE_EVERY

    def metric(self, name: str, text: str) -> Metric:
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=self.sum_s)
