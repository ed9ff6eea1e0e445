"""What Prometheus scrapes: counters and latencies of the gateway, gauges of the scheduler."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

from longshore.deploy.gateway.plain_metrics import PlainCounter, PlainHistogram
from longshore.protocol.client import SchedulerStats

_FIRST_TOKEN_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
_TOKEN_GAP_BUCKETS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
)  # fmt: skip
_REQUEST_BUCKETS_S: Final = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip


class GatewayMetrics:
    """One registry per gateway, so that several live in one test process. Times in seconds."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(namespace="longshore_gateway", registry=registry)
        self.responses = Counter(
            "longshore_http_responses",
            "HTTP responses by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.finished = Counter(
            "longshore_requests_finished",
            "Requests to the engine by why they ended; `abort` is a client that went away",
            ["reason"],
            registry=registry,
        )
        self.live_requests = Gauge(
            "longshore_live_requests",
            "Requests sent to the engine and not ended",
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "longshore_prompt_tokens", "Tokens of prompts", registry=registry
        )
        self.cached_tokens = Counter(
            "longshore_cached_prompt_tokens",
            "Tokens of prompts found in the prefix cache",
            registry=registry,
        )
        self.generated_tokens = PlainCounter(
            "longshore_generated_tokens", "Tokens of answers", registry=registry
        )
        self.time_to_first_token_s = Histogram(
            "longshore_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency_s = PlainHistogram(
            "longshore_inter_token_latency_seconds",
            "Gap between two tokens of an answer",
            buckets=_TOKEN_GAP_BUCKETS_S,
            registry=registry,
        )
        self.request_s = Histogram(
            "longshore_request_seconds",
            "From the request's arrival to its end",
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._scheduler = _SchedulerMetrics(registry)

    def observe_scheduler(self, stats: SchedulerStats) -> None:
        """The scheduler's latest statistics replace the ones before."""
        self._scheduler.observe(stats)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _SchedulerMetrics:
    """Every field of SchedulerStats. Its counters are absolute, so the difference is added."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            field: Gauge(f"longshore_scheduler_{name}", text, registry=registry)
            for field, name, text in (
                ("num_running", "running_requests", "Requests that hold a row"),
                ("num_waiting", "waiting_requests", "Requests that wait for a row"),
                ("num_blocks", "blocks", "KV blocks, the null block included"),
                ("num_free_blocks", "free_blocks", "KV blocks that nobody holds"),
                ("kv_usage", "kv_usage_ratio", "Share of the usable KV blocks that is held"),
                ("steps_in_flight", "steps_in_flight", "Plans not yet answered, recent mean"),
                ("encoder_cache_usage", "encoder_cache_usage_ratio", "Share of it that is filled"),
                (
                    "num_quarantined_blocks",
                    "quarantined_blocks",
                    "Targets of loads that nobody waits for any more and that have not ended",
                ),
            )
        }
        self._counters = {
            field: Counter(f"longshore_scheduler_{name}", text, registry=registry)
            for field, name, text in (
                ("num_steps", "steps", "Steps planned"),
                ("num_preemptions", "preemptions", "Requests that lost their row"),
                ("num_prefix_queried_tokens", "prefix_queried_tokens", "Looked up in the cache"),
                ("num_prefix_hit_tokens", "prefix_hit_tokens", "Found in the prefix cache"),
                (
                    "num_preempted_queried_tokens",
                    "preempted_queried_tokens",
                    "Looked up by requests that had been preempted",
                ),
                (
                    "num_preempted_hit_tokens",
                    "preempted_hit_tokens",
                    "Found by requests that had been preempted",
                ),
                ("num_stale_tokens", "stale_tokens", "Sampled for a row that changed hands"),
                ("num_bad_messages", "bad_messages", "Messages dropped as malformed"),
                (
                    "num_external_queried_tokens",
                    "external_queried_tokens",
                    "The connector was asked for",
                ),
                ("num_external_hit_tokens", "external_hit_tokens", "The connector has"),
                ("num_draft_tokens", "draft_tokens", "Speculated"),
                ("num_accepted_tokens", "accepted_draft_tokens", "Speculated and right"),
                ("num_invalid_draft_tokens", "invalid_draft_tokens", "Refused by a grammar"),
                ("num_rewinds", "rewinds", "Requests sent back because KV proved wrong"),
            )
        }
        self._last: dict[str, int] = dict.fromkeys(self._counters, 0)

    def observe(self, stats: SchedulerStats) -> None:
        for field, gauge in self._gauges.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._counters.items():
            value = getattr(stats, field)
            # A smaller value is another engine's count, which began again.
            counter.inc(value - self._last[field] if value >= self._last[field] else value)
            self._last[field] = value
