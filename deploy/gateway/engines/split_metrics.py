"""Prometheus metrics of split requests."""

from collections.abc import Iterable
from typing import Final, get_args

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longshore.deploy.gateway.engines.split_requests import Outcome, Skip, SplitRequests

_GAP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class SplitMetrics:
    """A collector for a registry."""

    def __init__(self, split: SplitRequests) -> None:
        self._split = split
        self._gaps = Histogram(
            "longshore_remote_prefill_gap_seconds",
            "From a request's token of a prefill engine to its next one, of a decode engine",
            buckets=_GAP_BOUNDS_S,
            registry=None,
        )
        split.on_gap = self._gaps.observe

    def collect(self) -> Iterable[Metric]:
        prefills = CounterMetricFamily(
            "longshore_remote_prefills",
            "Requests whose prompt was computed by a prefill engine, by outcome",
            labels=("outcome",),
        )
        for outcome in get_args(Outcome):
            prefills.add_metric((outcome,), self._split.outcomes[outcome])
        yield prefills
        skips = CounterMetricFamily(
            "longshore_remote_prefill_skips",
            "Requests whose prompt was computed by their decode engine, by reason",
            labels=("reason",),
        )
        for reason in get_args(Skip):
            skips.add_metric((reason,), self._split.skips[reason])
        yield skips
        waiting = GaugeMetricFamily(
            "longshore_split_waiting_requests",
            "Requests that wait at this gateway for capacity at an engine of this role",
            labels=("role",),
        )
        for role, count in self._split.num_waiting.items():
            waiting.add_metric((role,), count)
        yield waiting
        yield from self._gaps.collect()
