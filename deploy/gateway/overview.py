"""The figures of `longshore top`, before they are drawn or printed as JSON."""

from typing import Final

import msgspec

from longshore.deploy.gateway.metric_samples import Window

TIMES: Final = (
    ("time to first token", "longshore_time_to_first_token_seconds"),
    ("between tokens", "longshore_inter_token_latency_seconds"),
    ("in the queue", "longshore_request_queue_seconds"),
    ("prefill", "longshore_request_prefill_seconds"),
    ("whole request", "longshore_request_seconds"),
)
_STEP: Final = "longshore_worker_step_seconds"
_TOKENS: Final = "longshore_worker_step_tokens"
_PREFIX_HITS: Final = "longshore_scheduler_prefix_hit_tokens_total"
_PREFIX_QUERIES: Final = "longshore_scheduler_prefix_queried_tokens_total"


class Latency(msgspec.Struct, frozen=True):
    """Quantiles of the window's observations, as upper bounds of histogram buckets; None without
    observations."""

    p50_s: float | None
    p99_s: float | None


class TierView(msgspec.Struct, frozen=True):
    """One tier of offloaded KV."""

    medium: str
    num_blocks: int
    capacity_blocks: int
    hit_tokens_per_s: float | None


class EngineView(msgspec.Struct, frozen=True):
    """One scheduler. Hit shares are of the tokens looked up in the window; None if none were.

    draft_acceptance: of the drafts that were verified in the window; None if none were.
    acceptance_by_position: how many of the requests with drafts accepted the first, the second, and
                      so on.
    """

    engine: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_pins: int
    num_pinned_blocks: int
    kv_usage: float
    steps_in_flight: float
    steps_per_s: float | None
    preemptions_per_s: float | None
    prefix_hit_share: float | None
    external_hit_share: float | None
    draft_acceptance: float | None
    acceptance_by_position: list[float]
    tiers: list[TierView] = []


class WorkerView(msgspec.Struct, frozen=True):
    """One rank. busy_share: fraction of the window spent in steps. Step times are None if the rank
    computed no step in the window."""

    engine: str
    worker: str
    steps_per_s: float | None
    tokens_per_s: float | None
    mean_step_s: float | None
    p99_step_s: float | None
    longest_step_s: float | None
    busy_share: float | None
    resident_bytes: int
    device_bytes: int


class Overview(msgspec.Struct, frozen=True):
    """One server. Rates are None in the first update.

    window_s: duration that rates, shares and latencies cover.
    prefix_hit_share: of all engines; see EngineView.
    """

    version: str
    is_ready: bool
    window_s: float | None
    num_live_requests: int
    requests_per_s: float | None
    refused_per_s: float | None
    prompt_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    prefix_hit_share: float | None
    latencies: dict[str, Latency]
    engines: list[EngineView]
    workers: list[WorkerView]

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def num_waiting(self) -> int:
        return sum(engine.num_waiting for engine in self.engines)

    @property
    def num_pins(self) -> int:
        return sum(engine.num_pins for engine in self.engines)

    @property
    def num_pinned_blocks(self) -> int:
        return sum(engine.num_pinned_blocks for engine in self.engines)

    @property
    def kv_usage(self) -> float:
        """Fraction of the usable KV blocks of all engines that is held."""
        num_usable = sum(engine.num_blocks - 1 for engine in self.engines)
        num_free = sum(engine.num_free_blocks for engine in self.engines)
        return 1 - num_free / num_usable if num_usable > 0 else 0.0


def overview(window: Window) -> Overview:
    now = window.now
    versions = [version for (version,) in now.label_values("longshore_build_info", "version")]
    engines = now.label_values("longshore_scheduler_steps_total", "engine")
    workers = now.label_values(f"{_STEP}_count", "engine", "worker")
    return Overview(
        version=", ".join(versions),
        is_ready=now.total("longshore_ready") > 0,
        window_s=window.elapsed_s,
        num_live_requests=int(now.total("longshore_live_requests")),
        requests_per_s=window.rate("longshore_requests_finished_total"),
        refused_per_s=window.rate("longshore_http_responses_total", {"status": "429"}),
        prompt_tokens_per_s=window.rate("longshore_scheduler_prompt_tokens_total"),
        cached_tokens_per_s=window.rate(_PREFIX_HITS),
        generated_tokens_per_s=window.rate("longshore_generated_tokens_total"),
        prefix_hit_share=window.share(_PREFIX_HITS, _PREFIX_QUERIES),
        latencies={
            name: Latency(window.quantile(metric, 0.5), window.quantile(metric, 0.99))
            for name, metric in TIMES
        },
        engines=[_engine(window, engine) for (engine,) in engines],
        workers=[
            _worker(window, engine, worker)
            for engine, worker in sorted(workers, key=lambda pair: (pair[0], pair[1].zfill(8)))
        ],
    )


def _tiers(window: Window, engine: str) -> list[TierView]:
    series = window.now.label_values("longshore_kv_tier_blocks", "engine", "medium")
    views = []
    for medium in (medium for of_engine, medium in series if of_engine == engine):
        labels = {"engine": engine, "medium": medium}
        views.append(
            TierView(
                medium=medium,
                num_blocks=int(window.now.total("longshore_kv_tier_blocks", labels)),
                capacity_blocks=int(window.now.total("longshore_kv_tier_capacity_blocks", labels)),
                hit_tokens_per_s=window.rate("longshore_kv_tier_hit_tokens_total", labels),
            )
        )
    return views


def _engine(window: Window, engine: str) -> EngineView:
    labels = {"engine": engine}

    def now(name: str) -> float:
        return window.now.total(f"longshore_scheduler_{name}", labels)

    def rate(name: str) -> float | None:
        return window.rate(f"longshore_scheduler_{name}_total", labels)

    def hit_share(kind: str) -> float | None:
        prefix = f"longshore_scheduler_{kind}"
        return window.share(f"{prefix}_hit_tokens_total", f"{prefix}_queried_tokens_total", labels)

    return EngineView(
        engine=engine,
        num_running=int(now("running_requests")),
        num_waiting=int(now("waiting_requests")),
        num_blocks=int(now("blocks")),
        num_free_blocks=int(now("free_blocks")),
        num_pins=int(now("pins")),
        num_pinned_blocks=int(now("pinned_blocks")),
        kv_usage=now("kv_usage_ratio"),
        steps_in_flight=now("steps_in_flight"),
        steps_per_s=rate("steps"),
        preemptions_per_s=rate("preemptions"),
        prefix_hit_share=hit_share("prefix"),
        external_hit_share=hit_share("external"),
        draft_acceptance=window.share(
            "longshore_scheduler_accepted_draft_tokens_total",
            "longshore_scheduler_draft_tokens_total",
            labels,
        ),
        acceptance_by_position=_by_position(window, engine),
        tiers=_tiers(window, engine),
    )


def _by_position(window: Window, engine: str) -> list[float]:
    """Empty without drafts in the window."""
    accepted, shares = "longshore_scheduler_accepted_by_position_total", []
    for of_engine, position in sorted(
        window.now.label_values(accepted, "engine", "position"), key=lambda pair: int(pair[1])
    ):
        labels = {"engine": engine, "position": position}
        if of_engine != engine or not window.added(accepted, labels):
            continue
        drafted = window.added("longshore_scheduler_drafted_rows_total", {"engine": engine})
        shares.append(min(1.0, window.added(accepted, labels) / max(drafted, 1.0)))
    return shares


def _worker(window: Window, engine: str, worker: str) -> WorkerView:
    labels = {"engine": engine, "worker": worker}
    num_steps, now = window.added(f"{_STEP}_count", labels), window.now
    busy_share = window.rate(f"{_STEP}_sum", labels)
    longest_step_s = now.total("longshore_worker_longest_step_seconds", labels)
    return WorkerView(
        engine=engine,
        worker=worker,
        steps_per_s=window.rate(f"{_STEP}_count", labels),
        tokens_per_s=window.rate(f"{_TOKENS}_sum", labels),
        mean_step_s=window.share(f"{_STEP}_sum", f"{_STEP}_count", labels),
        p99_step_s=window.quantile(_STEP, 0.99, labels),
        longest_step_s=longest_step_s if num_steps else None,
        # Workers report once a second, so the increase may cover slightly more than the window.
        busy_share=None if busy_share is None else min(busy_share, 1.0),
        resident_bytes=int(now.total("longshore_worker_resident_memory_bytes", labels)),
        device_bytes=int(now.total("longshore_worker_device_memory_bytes", labels)),
    )
