"""A counter and a histogram for what happens at every token: without labels, locks or other
processes to share with, a quarter of the cost of the client library's. For one thread."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class PlainCounter(Collector):
    """name: without `_total`."""

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._count = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        self._count += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, self._count)


class PlainHistogram(Collector):
    """buckets: upper bounds, rising; one for all that is larger comes on top."""

    def __init__(
        self, name: str, text: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text = name, text
        self._bounds = [*map(float, buckets), float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(str, self._bounds[:-1]), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)
