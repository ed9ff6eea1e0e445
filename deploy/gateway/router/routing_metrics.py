"""Prometheus metrics of a gateway's routing."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.router import Router


class RoutingMetrics:
    """A collector for a registry. index, followers: of the policy `prefix_aware`, by engine; else
    None and empty."""

    def __init__(
        self, router: Router, index: BlockIndex | None, followers: Mapping[int, EventFollower]
    ) -> None:
        self._router = router
        self._index = index
        self._followers = followers

    def collect(self) -> Iterable[Metric]:
        decisions = CounterMetricFamily(
            "longshore_routing_decisions",
            "Prompts sent to an engine, by engine and the reason why it was chosen",
            labels=("engine", "reason"),
        )
        for (engine, reason), count in self._router.counts.items():
            decisions.add_metric((str(engine), reason), count)
        yield decisions
        if self._index is None:
            return
        yield GaugeMetricFamily(
            "longshore_routing_index_blocks",
            "KV blocks that this gateway knows of",
            value=len(self._index),
        )
        yield CounterMetricFamily(
            "longshore_routing_evicted_blocks",
            "KV blocks that this gateway knows of no more because its index was full",
            value=self._index.num_evicted,
        )
        known = GaugeMetricFamily(
            "longshore_routing_engine_known",
            "1 if this gateway knows which KV blocks the engine has, else 0",
            labels=("engine",),
        )
        gaps = CounterMetricFamily(
            "longshore_routing_event_gaps",
            "Gaps in the KV events of an engine",
            labels=("engine",),
        )
        snapshots = CounterMetricFamily(
            "longshore_routing_event_snapshots",
            "Snapshots of an engine's KV blocks that were applied",
            labels=("engine",),
        )
        for engine, follower in self._followers.items():
            known.add_metric((str(engine),), self._index.is_known[engine])
            gaps.add_metric((str(engine),), follower.num_gaps)
            snapshots.add_metric((str(engine),), follower.num_snapshots)
        yield from (known, gaps, snapshots)
