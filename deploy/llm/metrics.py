"""`LLM.get_metrics`: the engine's metrics as values, in the form of vLLM's metrics reader."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric as Family

from longshore.deploy.gateway.engines.engine_metrics import EngineMetrics
from longshore.protocol.statistics import SchedulerStats

ENGINE: Final = "0"


@dataclass(frozen=True)
class Metric:
    """name: as on /metrics, without the suffix `_total`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """buckets: number of observations up to each bound; the last bound is `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    """All metrics of an engine (docs/metrics.md)."""
    families = EngineMetrics()
    families.observe(ENGINE, stats)
    return [metric for family in families.collect() for metric in _values(family)]


def _values(family: Family) -> Iterable[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    kind = Counter if family.type == "counter" else Gauge
    for sample in family.samples:
        yield kind(family.name, sample.labels, sample.value)


def _histograms(family: Family) -> Iterable[Histogram]:
    buckets: dict[str, int] = {}
    for sample in family.samples:  # of each series: its buckets, its count, its sum
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        elif sample.name.endswith("_sum"):
            yield Histogram(family.name, sample.labels, count, sample.value, buckets)
            buckets = {}
