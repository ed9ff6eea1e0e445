"""Prometheus metrics of schedulers and workers: the latest statistics of each engine.

The counts are the engine's own. After a restart they begin at zero, which Prometheus handles as a
counter reset.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from longshore.deploy.gateway.lock_free_metrics import bucket_samples
from longshore.protocol.statistics import (
    OPERATION_BYTES_BOUNDS,
    STEP_GAP_BOUNDS,
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    PullStats,
    SchedulerStats,
    TierStats,
    TransferStats,
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
    ("num_pins", "pins", "Turns of jobs whose KV is kept for the next turn (policy continuum)"),
    ("num_pinned_blocks", "pinned_blocks", "KV blocks of pins that no request holds"),
    ("num_kept_states", "kept_states", "Recurrent states in the prefix cache"),
    (
        "num_kept_state_blocks",
        "kept_state_blocks",
        "Blocks of recurrent states in the prefix cache",
    ),
)
"""Field of SchedulerStats, name, help."""
SCHEDULER_COUNTERS: Final = (
    ("num_steps", "steps", "Steps planned"),
    ("num_preemptions", "preemptions", "Preemptions of running requests"),
    ("num_swapped_out", "swapped_out_requests", "Preempted requests whose KV was swapped out"),
    ("num_swapped_in", "swapped_in_requests", "Swapped requests whose KV was loaded again"),
    ("num_swapped_out_blocks", "swapped_out_blocks", "KV blocks of requests swapped out"),
    ("num_swapped_in_blocks", "swapped_in_blocks", "KV blocks loaded for swapped requests"),
    (
        "num_swaps_refused",
        "refused_swaps",
        "Requests not swapped out because host memory was full",
    ),
    (
        "num_swaps_too_slow",
        "slow_swaps",
        "Requests not swapped out because recomputing takes less time",
    ),
    (
        "num_prompt_tokens",
        "prompt_tokens",
        "Prompt tokens of requests, counted together with their hits when they are admitted",
    ),
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
    (
        "num_drafted_rows",
        "drafted_rows",
        "Requests with draft tokens in a step, added up over the steps",
    ),
    ("num_draft_tokens", "draft_tokens", "Draft tokens verified"),
    ("num_accepted_tokens", "accepted_draft_tokens", "Draft tokens accepted"),
    (
        "num_invalid_draft_tokens",
        "invalid_draft_tokens",
        "Draft tokens rejected by a grammar",
    ),
    ("num_encoded_items", "encoded_items", "Items that the encoder has encoded"),
    (
        "num_loaded_encoder_outputs",
        "loaded_encoder_outputs",
        "Items whose encoder output was loaded by the encoder connector",
    ),
    (
        "num_missed_encoder_outputs",
        "missed_encoder_outputs",
        "Items whose encoder output no other engine gave to the encoder connector",
    ),
    ("num_rewinds", "rewinds", "Requests rewound because KV that they depend on was invalid"),
    ("num_pin_hits", "pin_hits", "Turns admitted while the KV of their job's last turn was pinned"),
    ("num_pins_expired", "pins_expired", "Pins that ended with their time to live"),
    ("num_pins_yielded", "pins_yielded", "Pins that ended because other requests needed blocks"),
    ("num_states_kept", "states_kept", "Recurrent states that were kept in the prefix cache"),
    (
        "num_states_found",
        "states_found",
        "Requests that began with a recurrent state of the prefix cache",
    ),
    (
        "num_states_evicted",
        "states_evicted",
        "Recurrent states evicted from the prefix cache because blocks were needed",
    ),
    ("num_failed_lookups", "failed_lookups", "Lookups that failed in the connector; misses"),
    ("num_failed_loads", "failed_loads", "Loads that did not fill all of their blocks"),
    (
        "num_late_loads",
        "late_loads",
        "Lookups and loads of the connector that took longer than computing; not waited for",
    ),
)
TRANSFER_COUNTERS: Final = (
    ("num_bytes", "bytes", "Bytes moved between two media, of all ranks"),
    ("seconds", "seconds", "Time that transfers took, added up over ranks"),
    ("num_blocks", "blocks", "Blocks moved; every rank counts its share as one"),
    ("num_failed_blocks", "failed_blocks", "Blocks that could not be read or written"),
    ("num_corrupt_blocks", "corrupt_blocks", "Blocks that did not match their checksums"),
)
"""Field of TransferStats, name, help."""
TIER_GAUGES: Final = (
    ("num_blocks", "blocks", "Offloaded blocks that a tier has"),
    ("capacity_blocks", "capacity_blocks", "Offloaded blocks for which a tier has capacity"),
    ("num_open_breakers", "open_breakers", "Circuit breakers that are open, of reads and writes"),
)
"""Field of TierStats, name, help."""
TIER_COUNTERS: Final = (
    ("num_hit_tokens", "hit_tokens", "Tokens that requests loaded from a tier"),
    (
        "num_dropped_blocks",
        "dropped_blocks",
        "Blocks not stored in a tier because it was full of blocks in use, or too slow",
    ),
    ("num_failed_operations", "failed_operations", "Operations on a remote store that failed"),
    (
        "num_rejected_operations",
        "rejected_operations",
        "Operations on a remote store not begun because a circuit breaker was open",
    ),
    ("num_breaker_openings", "breaker_openings", "How often circuit breakers have opened"),
)
PULL_GAUGES: Final = (
    ("num_leases", "leases", "Ended requests whose KV is kept for another engine"),
    ("num_leased_blocks", "leased_blocks", "KV blocks kept for other engines"),
)
"""Field of PullStats, name, help."""
PULL_COUNTERS: Final = (
    (
        "num_refused_leases",
        "refused_leases",
        "Requests whose KV was not kept for another engine, because too much was kept",
    ),
    ("num_expired_leases", "expired_leases", "Leases that no other engine renewed in time"),
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

KEY_GAUGES: Final = (
    ("num_running", "running_requests", "Running requests of an API key"),
    ("num_waiting", "waiting_requests", "Waiting requests of an API key"),
)
"""Field of TenantStats, name, help."""

ENGINE_LABELS: Final = ("engine",)
KEY_LABELS: Final = ("engine", "key")
WORKER_LABELS: Final = ("engine", "worker")
TRANSFER_LABELS: Final = ("engine", "transfer_type")
TIER_LABELS: Final = ("engine", "medium")
OUTCOME_LABELS: Final = ("engine", "outcome")
POSITION_LABELS: Final = ("engine", "position")


class EngineMetrics:
    """A collector for a registry. Series have the label `engine`, those of workers also `worker`,
    which is the rank, those of tiers `medium`, and those of transfers `transfer_type`, for example
    `CPU_to_GPU`."""

    def __init__(self) -> None:
        self._latest: dict[str, SchedulerStats] = {}
        self._keys: set[str] = set()  # with a request so far; a gauge returns to zero

    def observe(self, engine: str, stats: SchedulerStats) -> None:
        """Replace an engine's statistics by its latest ones."""
        self._latest[engine] = stats
        self._keys.update(tenant.name for tenant in stats.tenants)

    def engine_lost(self, engine: str) -> None:
        """It may come back: its requests and its KV are gone, but its counts stay."""
        stats = self._latest.get(engine)
        if stats is None:
            return
        pulls = stats.pulls
        if pulls is not None:
            pulls = msgspec.structs.replace(pulls, num_leases=0, num_leased_blocks=0)
        self._latest[engine] = msgspec.structs.replace(
            stats,
            num_running=0,
            num_waiting=0,
            num_free_blocks=max(stats.num_blocks - 1, 0),
            kv_usage=0.0,
            steps_in_flight=0.0,
            encoder_cache_usage=0.0,
            num_quarantined_blocks=0,
            num_pins=0,
            num_pinned_blocks=0,
            num_kept_states=0,
            num_kept_state_blocks=0,
            tenants=(),
            pulls=pulls,
        )

    def remove_engine(self, engine: str) -> None:
        """The engine is gone."""
        self._latest.pop(engine, None)

    def collect(self) -> Iterable[Metric]:
        for field, name, text in SCHEDULER_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_scheduler_{name}", text, labels=ENGINE_LABELS)
            yield self._of_engines(gauge, field)
        for field, name, text in SCHEDULER_COUNTERS:
            counter = CounterMetricFamily(f"longshore_scheduler_{name}", text, labels=ENGINE_LABELS)
            yield self._of_engines(counter, field)
        yield self._accepted_by_position()
        yield from self._of_keys()
        yield from self._of_tiers()
        yield from self._of_transfers()
        yield from self._of_pulls()
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
        yield self._histogram(
            "longshore_worker_step_gap_seconds",
            "Time for which the worker's device was idle before a step, of steps that were planned "
            "before the step before them had ended",
            lambda stats: bucket_samples(STEP_GAP_BOUNDS, stats.steps_by_gap),
            lambda stats: stats.gap_s,
        )

    def _of_engines(
        self, family: GaugeMetricFamily | CounterMetricFamily, field: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for engine, stats in self._latest.items():
            family.add_metric((engine,), getattr(stats, field))
        return family

    def _accepted_by_position(self) -> Metric:
        counter = CounterMetricFamily(
            "longshore_scheduler_accepted_by_position",
            "Draft tokens accepted, by their position among a request's drafts in a step",
            labels=POSITION_LABELS,
        )
        for engine, stats in self._latest.items():
            for position, count in enumerate(stats.accepted_by_position):
                counter.add_metric((engine, str(position)), count)
        return counter

    def _of_keys(self) -> Iterable[Metric]:
        for field, name, text in KEY_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_scheduler_key_{name}", text, labels=KEY_LABELS)
            for engine, stats in self._latest.items():
                counts = {tenant.name: getattr(tenant, field) for tenant in stats.tenants}
                for key in sorted(self._keys):
                    gauge.add_metric((engine, key), counts.get(key, 0))
            yield gauge

    def _of_tiers(self) -> Iterable[Metric]:
        for field, name, text in TIER_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_kv_tier_{name}", text, labels=TIER_LABELS)
            yield self._with_each(gauge, field, self._tiers())
        for field, name, text in TIER_COUNTERS:
            counter = CounterMetricFamily(f"longshore_kv_tier_{name}", text, labels=TIER_LABELS)
            yield self._with_each(counter, field, self._tiers())

    def _of_transfers(self) -> Iterable[Metric]:
        for field, name, text in TRANSFER_COUNTERS:
            full = f"longshore_kv_offload_{name}"
            counter = CounterMetricFamily(full, text, labels=TRANSFER_LABELS)
            yield self._with_each(counter, field, self._transfers())
        yield self._with_each(
            GaugeMetricFamily(
                "longshore_kv_offload_queued_blocks",
                "Offloaded blocks whose transfer is planned and has not ended",
                labels=TRANSFER_LABELS,
            ),
            "num_queued_blocks",
            self._transfers(),
        )
        sizes = HistogramMetricFamily(
            "longshore_kv_offload_size_bytes",
            "Bytes that a rank moves in one operation",
            labels=TRANSFER_LABELS,
        )
        for labels, stats in self._transfers():
            buckets = bucket_samples(OPERATION_BYTES_BOUNDS, stats.operations_by_bytes)
            sizes.add_metric(labels, buckets, stats.num_bytes)
        yield sizes

    def _of_pulls(self) -> Iterable[Metric]:
        found = [
            ((engine,), stats.pulls)
            for engine, stats in self._latest.items()
            if stats.pulls is not None
        ]
        for field, name, text in PULL_GAUGES:
            gauge = GaugeMetricFamily(f"longshore_kv_pull_{name}", text, labels=ENGINE_LABELS)
            yield self._with_each(gauge, field, found)
        for field, name, text in PULL_COUNTERS:
            counter = CounterMetricFamily(f"longshore_kv_pull_{name}", text, labels=ENGINE_LABELS)
            yield self._with_each(counter, field, found)
        pulls = CounterMetricFamily(
            "longshore_kv_pulls",
            "Pulls of KV from another engine that have ended, by outcome",
            labels=OUTCOME_LABELS,
        )
        for labels, stats in found:
            for outcome, number in stats.pulls_by_outcome.items():
                pulls.add_metric((*labels, outcome), number)
        yield pulls

    @staticmethod
    def _with_each(
        family: GaugeMetricFamily | CounterMetricFamily,
        field: str,
        stats: Iterable[tuple[tuple[str, ...], TierStats | TransferStats | PullStats]],
    ) -> Metric:
        for labels, each in stats:
            family.add_metric(labels, getattr(each, field))
        return family

    def _tiers(self) -> Iterable[tuple[tuple[str, str], TierStats]]:
        for engine, stats in self._latest.items():
            for tier in stats.tiers:
                yield (engine, tier.medium), tier

    def _transfers(self) -> Iterable[tuple[tuple[str, str], TransferStats]]:
        for engine, stats in self._latest.items():
            for each in stats.transfers:
                yield (engine, f"{each.source}_to_{each.destination}"), each

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
