"""OpenTelemetry spans of requests to the engines, made when a request ends, from what its engines
report at its end there and what its client has seen.

An engine reports durations since the request has reached it. They are placed after the time at
which the client sent the request, so the times of an engine are too early by as long as the message
took, and the clocks of two hosts are never compared. All times are monotonic. When the request has
ended, they become Unix times, all by the same difference.

Needs the extra `otel`: import it only if `tracing.check_endpoint` allows it.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import longshore
from longshore.deploy.requests.live_requests import AT_NO_ENGINE, Leg, LiveRequest
from longshore.protocol.outputs import FinishReason, RequestEvent

CLOSE_TIMEOUT_S: Final = 2.0
"""How long a program waits for its last spans to be exported."""

_LATENCIES: Final = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}
"""Attributes for the time in a phase."""

_W3C: Final = TraceContextTextMapPropagator()


class Phase(NamedTuple):
    """A part of a request's life, or with begin_s == end_s an event; by `time.monotonic`."""

    name: str
    begin_s: float
    end_s: float
    engine: int


class ServerSpan:
    """The span of an exchange with a client. headers: W3C trace context of what belongs to it."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers: dict[str, str] = {}
        _W3C.inject(self.headers, set_span_in_context(span))

    def end(self, attributes: Mapping[str, Any], problem: str | None) -> None:
        """problem: what has failed on the server's side."""
        self._span.set_attributes(attributes)
        if problem is not None:
            self._span.set_status(Status(StatusCode.ERROR, problem))
        self._span.end()


class RequestSpans:
    """Makes the spans of one client's requests. model_name: of the model in the API."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("longshore", longshore.__version__)
        self._model_name = model_name

    def of_model(self, model_name: str) -> "RequestSpans":
        """Those of the requests to another model, which are exported with these."""
        return RequestSpans(self._provider, model_name)

    def begin_exchange(
        self, name: str, attributes: Mapping[str, Any], headers: Mapping[str, str]
    ) -> ServerSpan:
        """headers: W3C trace context of the client."""
        span = self._tracer.start_span(
            name, _W3C.extract(headers), kind=SpanKind.SERVER, attributes=attributes
        )
        return ServerSpan(span)

    def request_ended(
        self,
        live: LiveRequest,
        reason: FinishReason,
        *,
        arrived_s: float,
        first_token_s: float | None,
        num_output_tokens: int,
        num_choices: int = 1,
    ) -> None:
        """The span `llm_request` of a request, with a span for each of its phases. Its parent is in
        the request's `trace_headers`; without these, it is the current span, if any.

        arrived_s, first_token_s: at its client, by `time.monotonic`.
        num_choices: answers to its prompt, of which this is one.
        """
        now_s = time.monotonic()
        ended_s = live.legs[-1].ended_s or now_s
        unix_offset_s = time.time() - now_s

        def unix_ns(at_s: float) -> int:
            return int((at_s + unix_offset_s) * 1e9)

        headers = live.message.options.trace_headers
        span = self._tracer.start_span(
            "llm_request",
            None if headers is None else _W3C.extract(headers),
            start_time=unix_ns(arrived_s),
        )
        if span.is_recording():
            phases = list(phases_of(live, first_token_s, ended_s))
            span.set_attributes(self._request_attributes(live, num_choices))
            span.set_attributes(_answer_attributes(live, reason, num_output_tokens))
            span.set_attributes(_latencies(phases, arrived_s, first_token_s, ended_s))
            for event in events_of(live):
                span.add_event(event.name, _of_engine(event), unix_ns(event.begin_s))
            context = set_span_in_context(span)
            for phase in phases:
                self._tracer.start_span(
                    phase.name,
                    context,
                    attributes=_of_engine(phase),
                    start_time=unix_ns(phase.begin_s),
                ).end(unix_ns(phase.end_s))
            if (problem := _problem_of(live)) is not None:
                span.set_status(Status(StatusCode.ERROR, problem))
        span.end(unix_ns(ended_s))

    def _request_attributes(self, live: LiveRequest, num_choices: int) -> dict[str, Any]:
        """The semantic conventions for generative AI have no id of a request: it has vLLM's
        name."""
        options, sampling = live.message.options, live.message.sampling
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion" if options.pooling is None else "embeddings",
            "gen_ai.provider.name": "longshore",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": live.request_id,
            "gen_ai.usage.input_tokens": len(live.prompt_token_ids),
        }
        if options.pooling is None:
            attributes["gen_ai.request.choice.count"] = num_choices
            attributes["gen_ai.request.temperature"] = sampling.temperature
            attributes["gen_ai.request.top_p"] = sampling.top_p
            if sampling.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = sampling.max_tokens - live.num_primed
        return attributes

    def close(self) -> None:
        """Export the spans so far, if the collector takes them in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def export_spans(endpoint: str, model_name: str) -> RequestSpans:
    """Spans that a thread sends to an OpenTelemetry collector, as OTLP over HTTP; if they are too
    many, some are dropped. The SDK reads OpenTelemetry's environment variables."""
    own = Resource.create({"service.name": "longshore", "service.version": longshore.__version__})
    resource = own.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return RequestSpans(provider, model_name)


def phases_of(live: LiveRequest, first_token_s: float | None, ended_s: float) -> Iterator[Phase]:
    """The phases of a request at each engine that had it, as far as they are known: an engine
    reports them when the request ends there, not if it is aborted or the engine is lost."""
    until = [*(leg.sent_s for leg in live.legs[1:]), ended_s]
    for leg, until_s in zip(live.legs, until, strict=True):
        if leg.engine == AT_NO_ENGINE:
            yield Phase("queue", leg.sent_s, until_s, AT_NO_ENGINE)
        elif leg.end is not None:
            yield from _phases_at_engine(leg, first_token_s)
        elif first_token_s is not None and leg.sent_s < first_token_s < until_s:
            yield Phase("decode", first_token_s, until_s, leg.engine)


def _phases_at_engine(leg: Leg, first_token_s: float | None) -> Iterator[Phase]:
    """Of a request that has ended there."""
    assert leg.end is not None
    assert leg.ended_s is not None
    scheduled_s = load_begun_s = None
    for event, after_s in leg.end.events:
        at_s = leg.sent_s + after_s
        if event is RequestEvent.SCHEDULED and scheduled_s is None:
            scheduled_s = at_s
        elif event is RequestEvent.LOAD_BEGUN:
            load_begun_s = at_s
        elif event is RequestEvent.LOAD_ENDED and load_begun_s is not None:
            yield Phase("transfer", load_begun_s, at_s, leg.engine)
    if scheduled_s is None:
        yield Phase("queue", leg.sent_s, leg.ended_s, leg.engine)
        return
    yield Phase("queue", leg.sent_s, scheduled_s, leg.engine)
    prefilled_s = leg.ended_s
    if first_token_s is not None:  # perhaps of an earlier engine
        prefilled_s = min(max(first_token_s, scheduled_s), leg.ended_s)
    if prefilled_s > scheduled_s:
        yield Phase("prefill", scheduled_s, prefilled_s, leg.engine)
    if leg.ended_s > prefilled_s:
        yield Phase("decode", prefilled_s, leg.ended_s, leg.engine)


def events_of(live: LiveRequest) -> Iterator[Phase]:
    """The preemptions of a request, and engines that it was sent to again: because another one was
    lost, or was not ready."""
    for number, leg in enumerate(live.legs):
        before = live.legs[number - 1] if number else None
        if before is not None and before.end is None and before.engine != AT_NO_ENGINE:
            yield Phase("resubmitted", leg.sent_s, leg.sent_s, leg.engine)
        is_preempted = False
        for event, after_s in () if leg.end is None else leg.end.events:
            at_s = leg.sent_s + after_s
            if event is RequestEvent.PREEMPTED:
                is_preempted = True
                yield Phase("preempted", at_s, at_s, leg.engine)
            elif event is RequestEvent.SCHEDULED and is_preempted:
                yield Phase("resumed", at_s, at_s, leg.engine)


def _of_engine(phase: Phase) -> dict[str, int]:
    return {} if phase.engine == AT_NO_ENGINE else {"longshore.engine": phase.engine}


def _answer_attributes(
    live: LiveRequest, reason: FinishReason, num_output_tokens: int
) -> dict[str, Any]:
    has_failed = live.failure is not None and not live.is_stopped
    name = (FinishReason.ERROR if has_failed else reason).api_name
    attributes: dict[str, Any] = {
        "gen_ai.response.finish_reasons": (name,),
        "gen_ai.usage.output_tokens": num_output_tokens,
    }
    if live.finished is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = live.finished.num_cached_tokens
    return attributes


def _latencies(
    phases: list[Phase], arrived_s: float, first_token_s: float | None, ended_s: float
) -> dict[str, float]:
    """In seconds, with vLLM's names; those of phases are sums, as far as they are known."""
    attributes = {"gen_ai.latency.e2e": ended_s - arrived_s}
    if first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first_token_s - arrived_s
    for name, attribute in _LATENCIES.items():
        durations = [phase.end_s - phase.begin_s for phase in phases if phase.name == name]
        if durations:
            attributes[attribute] = sum(durations)
    return attributes


def _problem_of(live: LiveRequest) -> str | None:
    if live.failure is not None:
        return None if live.is_stopped else str(live.failure)
    return None if live.finished is None else live.finished.message
