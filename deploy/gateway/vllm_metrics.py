"""Metrics under the names that dashboards made for vLLM use.

docs/metrics.md has the table; a test compares.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

PREFIX: Final = "vllm:"
NAMES: Final[Mapping[str, str]] = {
    "num_requests_running": "longshore_scheduler_running_requests",
    "num_requests_waiting": "longshore_scheduler_waiting_requests",
    "kv_cache_usage_perc": "longshore_scheduler_kv_usage_ratio",
    "gpu_cache_usage_perc": "longshore_scheduler_kv_usage_ratio",  # its former name
    "num_preemptions": "longshore_scheduler_preemptions",
    "prefix_cache_queries": "longshore_scheduler_prefix_queried_tokens",
    "prefix_cache_hits": "longshore_scheduler_prefix_hit_tokens",
    "external_prefix_cache_queries": "longshore_scheduler_external_queried_tokens",
    "external_prefix_cache_hits": "longshore_scheduler_external_hit_tokens",
    "spec_decode_num_draft_tokens": "longshore_scheduler_draft_tokens",
    "spec_decode_num_accepted_tokens": "longshore_scheduler_accepted_draft_tokens",
    "prompt_tokens": "longshore_scheduler_prompt_tokens",
    "generation_tokens": "longshore_generated_tokens",
    "request_success": "longshore_requests_finished",
    "request_prompt_tokens": "longshore_request_prompt_tokens",
    "request_generation_tokens": "longshore_request_generated_tokens",
    "time_to_first_token_seconds": "longshore_time_to_first_token_seconds",
    "inter_token_latency_seconds": "longshore_inter_token_latency_seconds",
    "time_per_output_token_seconds": "longshore_inter_token_latency_seconds",  # its former name
    "e2e_request_latency_seconds": "longshore_request_seconds",
    "request_queue_time_seconds": "longshore_request_queue_seconds",
    "request_prefill_time_seconds": "longshore_request_prefill_seconds",
    "request_decode_time_seconds": "longshore_request_decode_seconds",
}
"""vLLM's name without its prefix, and ours; both without `_total`."""
OF_ENGINES: Final = tuple(
    f"{PREFIX}{name}" for name, ours in NAMES.items() if ours.startswith("longshore_scheduler_")
)
"""Those that are the same in every gateway."""

_REASON: Final = {"request_success": "finished_reason"}
"""Name of our label `reason` there. The other metrics are summed over it."""


class VllmNames:
    """A collector: the metrics of `registry` that vLLM has, too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._registry.collect()}
        for name, ours in NAMES.items():
            yield self._renamed(families[ours], name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            if suffix == "_created":
                continue
            labels = dict(sample.labels)
            reason = labels.pop("reason", None)
            if reason is not None and name in _REASON:
                labels[_REASON[name]] = reason
            series = (f"{PREFIX}{name}{suffix}", tuple(labels.items()))
            sums[series] = sums.get(series, 0.0) + sample.value
        renamed = Metric(f"{PREFIX}{name}", family.documentation, family.type)
        renamed.samples = [
            Sample(full, dict(labels), value) for (full, labels), value in sums.items()
        ]
        return renamed
