"""Prometheus metrics: counters and latencies of the gateway, and the statistics of its engines.

docs/metrics.md lists them all; a test compares. Times are in seconds.
"""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import longshore
from longshore.deploy.gateway.engines.engine_metrics import EngineMetrics
from longshore.deploy.gateway.lock_free_metrics import LockFreeCounter, LockFreeHistogram
from longshore.deploy.gateway.metric_samples import Sample, sample_of
from longshore.deploy.gateway.sample_label import (
    families_of,
    joined,
    label_samples,
    sample_label,
)
from longshore.deploy.gateway.vllm_metrics import PREFIX, VllmNames
from longshore.deploy.supervisor.restart_history import RestartRecord
from longshore.protocol.handshake import PROTOCOL_VERSION, EngineReady
from longshore.protocol.outputs import (
    FinishedRequest,
    FinishReason,
    RequestEvent,
)
from longshore.protocol.statistics import SchedulerStats

_PHASE_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300,
)  # fmt: skip
_TOKEN_GAP_BOUNDS_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
_REQUEST_BOUNDS_S: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
_LENGTH_BOUNDS: Final = (
    1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072,
)  # fmt: skip
_OWN: Final = (b"longshore_", PREFIX.encode())
"""Prefixes of metrics that are not of the process."""
_REASONS: Final = frozenset(reason.api_name for reason in FinishReason)


KEY_LIMITS: Final = ("key_live_requests", "key_tokens_per_minute")
"""Codes of the errors for the limits of an API key."""


class KeyCounts(NamedTuple):
    """The metrics of one API key; `rejected` by the code of the error."""

    live_requests: Gauge
    tokens: Counter
    rejected: Mapping[str, Counter]


class _RestartMetrics:
    """A collector for a registry."""

    def __init__(self, read: Callable[[], RestartRecord]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        counter = CounterMetricFamily(
            "longshore_process_restarts",
            "Restarts of a process because one of its engine, or the gateway, died or hung, or "
            "because an operator wanted it",
            labels=("process", "reason"),
        )
        for process, counts in self._read().counts.items():
            for reason, count in counts.items():
                counter.add_metric((process, reason), count)
        yield counter


class KeyMetrics:
    """The metrics of API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._live_requests = Gauge(
            "longshore_key_live_requests",
            "Requests sent to the engine and not finished, by API key",
            ["key"],
            registry=registry,
        )
        self._tokens = Counter(
            "longshore_key_tokens",
            "Prompt tokens and generated tokens, by API key",
            ["key"],
            registry=registry,
        )
        self._rejected = Counter(
            "longshore_key_rejected_requests",
            "HTTP requests rejected because of a limit of their API key; `reason` is the code of "
            "the error",
            ["key", "reason"],
            registry=registry,
        )

    def counts(self, name: str) -> KeyCounts:
        """The counts of one API key. To be called only for keys that exist: each has its series."""
        return KeyCounts(
            self._live_requests.labels(name),
            self._tokens.labels(name),
            {reason: self._rejected.labels(name, reason) for reason in KEY_LIMITS},
        )


class GatewayMetrics:
    """One registry per gateway, so that one test process can have several.

    model_name: the label `model_name` of all metrics; None: they have none.
    vllm_names: return all metrics that vLLM has under its names, too, not only a few.
    of_process: have those of the process, too.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        vllm_names: bool = False,
        of_process: bool = True,
    ) -> None:
        self._further: list[GatewayMetrics] = []
        self._has_vllm_names = vllm_names
        registry = self._registry = CollectorRegistry()
        self._model = None if model_name is None else sample_label("model_name", model_name)
        self._vllm_names = VllmNames(registry, all_names=vllm_names)
        self._vllm_registry = CollectorRegistry(auto_describe=False)
        self._vllm_registry.register(self._vllm_names)
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        length = partial(Histogram, buckets=_LENGTH_BOUNDS, registry=registry)
        phase = partial(Histogram, buckets=_PHASE_BOUNDS_S, registry=registry)
        if of_process:
            ProcessCollector(registry=registry)
            _show_build(registry)
        self._ready = gauge("longshore_ready", "1 if the gateway accepts requests, else 0")
        self.responses = counter(
            "longshore_http_responses",
            "HTTP responses by path and status; `other` is any other path, including "
            "`/v1/models/NAME`; status `gone` is a client that disconnected before the response",
            ["endpoint", "status"],
        )
        self.live_requests = gauge(
            "longshore_live_requests", "Requests sent to the engine and not finished"
        )
        self.prompt_tokens = counter("longshore_prompt_tokens", "Prompt tokens")
        self.generated_tokens = LockFreeCounter(
            "longshore_generated_tokens", "Generated tokens", registry
        )
        self.prompt_lengths = length(
            "longshore_request_prompt_tokens", "Prompt tokens of a request"
        )
        self.answer_lengths = length(
            "longshore_request_generated_tokens", "Generated tokens of an answer"
        )
        self.time_to_first_token_s = phase(
            "longshore_time_to_first_token_seconds",
            "From the request's arrival to its first token",
        )
        self.inter_token_latency_s = LockFreeHistogram(
            "longshore_inter_token_latency_seconds",
            "Time between two tokens of an answer",
            _TOKEN_GAP_BOUNDS_S,
            registry,
        )
        self.queue_s = phase(
            "longshore_request_queue_seconds",
            "From a request's arrival at the engine to its first step",
        )
        self.prefill_s = phase(
            "longshore_request_prefill_seconds",
            "From a request's first step to its first token",
        )
        self.decode_s = phase(
            "longshore_request_decode_seconds",
            "From a request's first token to its end",
        )
        self.keys = KeyMetrics(registry)
        finished = counter(
            "longshore_requests_finished",
            "Finished requests to the engine by reason; `abort` is a client that disconnected",
            ["reason"],
        )
        durations = Histogram(
            "longshore_request_seconds",
            "From the request's arrival to its end, by finish reason",
            ["reason"],
            buckets=_REQUEST_BOUNDS_S,
            registry=registry,
        )
        # Create all series at the start: a rate needs the zero before the first increment.
        self._finished = {reason: finished.labels(reason) for reason in _REASONS}
        self._durations = {reason: durations.labels(reason) for reason in _REASONS}
        self._engines = EngineMetrics()
        registry.register(self._engines)

    def of_model(self, model_name: str) -> "GatewayMetrics":
        """The metrics of a further model, which `sample` and `render` add to these. Those of HTTP
        and of API keys are counted here, for all models."""
        further = GatewayMetrics(model_name, vllm_names=self._has_vllm_names, of_process=False)
        self._further.append(further)
        return further

    def watch(self, collector: Collector) -> None:
        """Add the metrics of a collector, which is called at every scrape."""
        self._registry.register(collector)

    def watch_restarts(self, read: Callable[[], RestartRecord]) -> None:
        """Set the function that returns the restarts so far at every scrape."""
        self._registry.register(_RestartMetrics(read))

    def watch_readiness(self, not_ready_reason: Callable[[], str | None]) -> None:
        """Set the function that `longshore_ready` calls at every scrape."""
        self._ready.set_function(lambda: not_ready_reason() is None)

    def prompts_received(self, prompts: Sequence[Sequence[int]]) -> int:
        """Count the prompts of an HTTP request; returns the number of their tokens."""
        num_tokens = sum(map(len, prompts))
        self.prompt_tokens.inc(num_tokens)
        for prompt in prompts:
            self.prompt_lengths.observe(len(prompt))
        return num_tokens

    def request_ended(self, reason: FinishReason, duration_s: float) -> None:
        """Count a request to the engine that ended `duration_s` after its arrival here."""
        self._finished[reason.api_name].inc()
        self._durations[reason.api_name].observe(duration_s)

    def phases_known(
        self, end: FinishedRequest, first_token_s: float | None, ended_s: float
    ) -> None:
        """Count what the engine reports at the end of a request.

        first_token_s: time from the request's submission to its first token; None without one.
        ended_s:       time from its submission to now.
        """
        if first_token_s is not None:
            self.decode_s.observe(ended_s - first_token_s)
        for event, queue_s in end.events:
            if event is RequestEvent.SCHEDULED:
                self.queue_s.observe(queue_s)
                if first_token_s is not None:
                    self.prefill_s.observe(max(0.0, first_token_s - queue_s))
                return

    def observe_scheduler(self, engine: str, stats: SchedulerStats) -> None:
        """Replace an engine's statistics by its latest ones.

        engine: the value of the label `engine`.
        """
        self._engines.observe(engine, stats)

    def engine_ready(self, engine: str, ready: EngineReady) -> None:
        """The engine has its KV cache."""
        self._vllm_names.engine_ready(engine, ready)

    def engine_lost(self, engine: str) -> None:
        """What an engine that is not ready holds is nothing."""
        self._engines.engine_lost(engine)

    def remove_engine(self, engine: str) -> None:
        """The engine is gone: its series end."""
        self._engines.remove_engine(engine)
        self._vllm_names.remove_engine(engine)

    def sample(self, taken_s: float) -> Sample:
        """All metrics now, to compare with a later sample."""
        every = (self, *self._further)
        return sample_of(chain.from_iterable(each._registry.collect() for each in every), taken_s)

    def render(self) -> bytes:
        """The Prometheus text format."""
        if not self._further:
            return self._own_text()
        texts = (each._own_text() for each in (self, *self._further))
        return joined(chain.from_iterable(map(families_of, texts)))

    def _own_text(self) -> bytes:
        text = generate_latest(self._registry) + generate_latest(self._vllm_registry)
        return text if self._model is None else label_samples(text, self._model, _OWN)


def _show_build(registry: CollectorRegistry) -> None:
    Info("longshore_build", "Version of this gateway; the value is 1", registry=registry).info(
        {
            "version": longshore.__version__,
            "protocol_version": str(PROTOCOL_VERSION),
            "python_version": platform.python_version(),
        }
    )
