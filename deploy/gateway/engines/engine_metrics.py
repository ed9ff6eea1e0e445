"""Prometheus metrics of schedulers and workers: the latest statistics of each engine.

The counts are the engine's own. After a restart they begin at zero, which Prometheus handles as a
counter reset.
"""

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from longshore.deploy.gateway.lock_free_metrics import bucket_samples
from longshore.protocol.statistics import (
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    SchedulerStats,
    WorkerStats,
)

SCHEDULER_GAUGES: Final = (
    ("num_running", "running_requests", "Running requests"),
    ("num_waiting", "waiting_requests", "Requests that wait for a row, blocks or a transfer"),
    ("num_blocks", "blocks", "KV blocks of the pool, including the null block"),
    ("num_free_blocks", "free_blocks", "Free KV blocks, including cached ones"),
    ("kv_usage", "kv_usage_ratio", "Fraction of the usable KV blocks that is held, 0 to 1"),
    (
        "steps_in_flight",
        "steps_in_flight",
        "Plans that the workers have not answered, mean over the steps since the last report",
    ),
    (
        "encoder_cache_usage",
        "encoder_cache_usage_ratio",
        "Fraction of the encoder cache that holds outputs, 0 to 1",
    ),
    (
        "num_quarantined_blocks",
        "quarantined_blocks",
        "Target blocks of loads that timed out and have not ended",
    ),
)
"""Field of SchedulerStats, name, help."""
SCHEDULER_COUNTERS: Final = (
    ("num_steps", "steps", "Steps planned"),
    ("num_preemptions", "preemptions", "Preemptions of running requests"),
    (
        "num_prefix_queried_tokens",
        "prefix_queried_tokens",
        "Prompt tokens that new requests looked up in the prefix cache",
    ),
    (
        "num_prefix_hit_tokens",
        "prefix_hit_tokens",
        "Prompt tokens that new requests found in the prefix cache",
    ),
    (
        "num_preempted_queried_tokens",
        "preempted_queried_tokens",
        "Tokens that preempted requests looked up in the prefix cache",
    ),
    (
        "num_preempted_hit_tokens",
        "preempted_hit_tokens",
        "Tokens that preempted requests found in the prefix cache",
    ),
    (
        "num_stale_tokens",
        "stale_tokens",
        "Tokens sampled for a request that was no longer in its row, and dropped",
    ),
    (
        "num_bad_messages",
        "bad_messages",
        "Messages dropped because they were malformed or from an unknown sender",
    ),
    (
        "num_external_queried_tokens",
        "external_queried_tokens",
        "Tokens looked up in the connector",
    ),
    ("num_external_hit_tokens", "external_hit_tokens", "Tokens found by the connector"),
    ("num_draft_tokens", "draft_tokens", "Draft tokens proposed"),
    ("num_accepted_tokens", "accepted_draft_tokens", "Draft tokens accepted"),
    (
        "num_invalid_draft_tokens",
        "invalid_draft_tokens",
        "Draft tokens rejected by a grammar",
    ),
    ("num_rewinds", "rewinds", "Requests rewound because KV that they depend on was invalid"),
)
WORKER_GAUGES: Final = (
    (
        "longest_step_s",
        "longest_step_seconds",
        "Longest step in the last second with steps of the worker",
    ),
    ("resident_bytes", "resident_memory_bytes", "Host memory of the worker process"),
    ("device_bytes", "device_memory_bytes", "GPU memory that the worker holds; 0 on a CPU"),
)
"""Field of WorkerStats, name, help."""

ENGINE_LABELS: Final = ("engine",)
WORKER_LABELS: Final = ("engine", "worker")


class EngineMetrics:
    """A collector for a registry. Series have the label `engine`, those of workers also `worker`,
    which is the rank."""

    def __init__(self) -> None:
        self._latest: dict[str, SchedulerStats] = {}

    def observe(self, engine: str, stats: SchedulerStats) -> None:
        """Replace an engine's statistics by its latest ones."""
        self._latest[engine] = stats

    def collect(self) -> Iterable[Metric]:
        for field, name, text in SCHEDULER_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_scheduler_{name}", text, labels=ENGINE_LABELS)
            yield self._of_engines(gauge, field)
        for field, name, text in SCHEDULER_COUNTERS:
            counter = CounterMetricFamily(f"longshore_scheduler_{name}", text, labels=ENGINE_LABELS)
            yield self._of_engines(counter, field)
        for field, name, text in WORKER_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_worker_{name}", text, labels=WORKER_LABELS)
            for labels, stats in self._workers():
                gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        yield self._histogram(
            "longshore_worker_step_seconds",
            "Time a step took on the worker's device",
            lambda stats: bucket_samples(STEP_SECONDS_BOUNDS, stats.steps_by_seconds),
            lambda stats: stats.compute_s,
        )
        yield self._histogram(
            "longshore_worker_step_tokens",
            "Tokens that the worker computed in a step, prompt and output together",
            lambda stats: bucket_samples(STEP_TOKENS_BOUNDS, stats.steps_by_tokens),
            lambda stats: stats.num_tokens,
        )

    def _of_engines(
        self, family: GaugeMetricFamily | CounterMetricFamily, field: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for engine, stats in self._latest.items():
            family.add_metric((engine,), getattr(stats, field))
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Callable[[WorkerStats], list[tuple[str, float]]],
        total: Callable[[WorkerStats], float],
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=WORKER_LABELS)
        for labels, stats in self._workers():
            family.add_metric(labels, buckets(stats), total(stats))
        return family

    def _workers(self) -> Iterable[tuple[tuple[str, str], WorkerStats]]:
        for engine, stats in self._latest.items():
            for worker in stats.workers:
                yield (engine, str(worker.rank)), worker
