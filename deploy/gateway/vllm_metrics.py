"""Metrics under vLLM's names: those that load balancers and autoscalers read, and with a setting
all that dashboards made for vLLM use.

docs/metrics.md has the tables; a test compares.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

from longshore.deploy.gateway.lock_free_metrics import bucket_samples
from longshore.protocol.handshake import EngineReady
from longshore.protocol.statistics import STEP_TOKENS_BOUNDS

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
    "spec_decode_num_drafts": "longshore_scheduler_drafted_rows",
    "spec_decode_num_accepted_tokens_per_pos": "longshore_scheduler_accepted_by_position",
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
ALWAYS: Final = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Those that are there without the setting, because the Gateway API inference extension and recipes
for KEDA need them. For the extension, there are also those of COMPUTED."""
COMPUTED: Final = ("cache_config_info", "iteration_tokens_total", "lora_requests_info")
OF_ENGINES: Final = tuple(
    f"{PREFIX}{name}"
    for name in (
        *(name for name, ours in NAMES.items() if ours.startswith("longshore_scheduler_")),
        *COMPUTED,
    )
)
"""Those that are the same in every gateway."""

_REASON: Final = {"request_success": "finished_reason"}
"""Name of our label `reason` there. The other metrics are summed over it."""


class VllmNames:
    """A collector: the metrics of `registry` that vLLM has, too.

    all_names: not only those that are always there.
    """

    def __init__(self, registry: CollectorRegistry, *, all_names: bool) -> None:
        self._registry = registry
        self._names = {name: ours for name, ours in NAMES.items() if all_names or name in ALWAYS}
        self._engines: dict[str, EngineReady] = {}
        self._started_s = time.time()

    def engine_ready(self, engine: str, ready: EngineReady) -> None:
        """The engine has its KV cache."""
        self._engines[engine] = ready

    def remove_engine(self, engine: str) -> None:
        self._engines.pop(engine, None)

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._registry.collect()}
        for name, ours in self._names.items():
            yield self._renamed(families[ours], name)
        yield self._cache_config()
        yield self._iteration_tokens(families["longshore_worker_step_tokens"])
        yield self._lora_requests()

    def _cache_config(self) -> Metric:
        """The labels that say how many tokens the cache has; the value is 1."""
        family = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "The KV cache of an engine; the value is 1",
            labels=("engine", "block_size", "num_gpu_blocks", "cache_dtype"),
        )
        for engine, ready in self._engines.items():
            identity = ready.identity
            labels = (str(identity.block_size), str(ready.num_blocks), identity.kv_cache_dtype)
            family.add_metric((engine, *labels), 1)
        return family

    def _iteration_tokens(self, steps: Metric) -> Metric:
        """Of the first rank: all ranks of an engine compute the same steps. An engine that has
        computed none yet has series, too."""
        family = HistogramMetricFamily(
            f"{PREFIX}iteration_tokens_total",
            "Tokens that an engine computed in a step, prompt and output together",
            labels=("engine",),
        )
        for engine in self._engines:
            labels = {"engine": engine, "worker": "0"}
            found = [s for s in steps.samples if labels.items() <= s.labels.items()]
            buckets = [(s.labels["le"], s.value) for s in found if s.name.endswith("_bucket")]
            total = sum(s.value for s in found if s.name.endswith("_sum"))
            none = bucket_samples(STEP_TOKENS_BOUNDS, (0,) * (len(STEP_TOKENS_BOUNDS) + 1))
            family.add_metric((engine,), buckets or none, total)
        return family

    def _lora_requests(self) -> Metric:
        """There are no LoRA adapters. vLLM's value is the time of the latest change."""
        family = GaugeMetricFamily(
            f"{PREFIX}lora_requests_info",
            "LoRA adapters of requests, which are not supported",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        family.add_metric(("0", "", ""), self._started_s)
        return family

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
