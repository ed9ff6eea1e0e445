"""Metrics that are updated per token. Those of prometheus_client take a lock on every update, which
costs several times the update itself. These may only be used, and rendered, on one thread."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


class LockFreeCounter:
    """A counter without labels. name: without `_total`."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._value = 0
        registry.register(self)

    def inc(self, amount: int) -> None:
        self._value += amount

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, self._value)


class LockFreeHistogram:
    """A histogram without labels. bounds: upper bounds of the buckets, ascending."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        buckets = bucket_samples(self._bounds, self._counts)
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


def bucket_samples(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound in Prometheus' format, cumulative count) per bucket; the last is +Inf."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
