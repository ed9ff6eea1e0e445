"""Spans of requests, made from what engines report and clients see, with the SDK's exporter in
memory."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from longshore.deploy.requests.live_requests import AT_NO_ENGINE, Leg, LiveRequest, LiveRequests
from longshore.deploy.requests.spans import RequestSpans
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import FinishedRequest, FinishReason, RequestEvent
from longshore.protocol.requests import PoolingParams, RequestOptions
from longshore.protocol.sampling import SamplingParams

QUEUED, SCHEDULED, PREEMPTED, LOAD_BEGUN, LOAD_ENDED = RequestEvent
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
EPSILON_S = 1e-5  # Unix time in nanoseconds as a float, of two readings of the clocks


class Traced:
    """A `RequestSpans`, and its spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = RequestSpans(self.provider, "tiny")
        self.now_s = time.monotonic() - 100.0
        """When the request arrives."""

    def at_s(self, after_s: float) -> float:
        return self.now_s + after_s

    def live(self, *legs: Leg, **options: Any) -> LiveRequest:
        """A request at these engines, whose times are given after its arrival."""
        sampling = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7)
        live, _ = LiveRequests().open(
            "cmpl-1", [5, 6, 7], sampling, RequestOptions(**options), on_change=lambda: None
        )
        live.legs = list(legs)
        live.finished = legs[-1].end
        return live

    def leg(
        self,
        sent_s: float,
        ended_s: float | None = None,
        *events: tuple[RequestEvent, float],
        engine: int = 0,
        **end: Any,
    ) -> Leg:
        leg = Leg(engine, self.at_s(sent_s))
        if ended_s is not None:
            fields = {"reason": FinishReason.STOPPED, "num_output_tokens": 4} | end
            leg.end = FinishedRequest(0, events=((QUEUED, 0.0), *events), **fields)
            leg.ended_s = self.at_s(ended_s)
        return leg

    def end(
        self,
        live: LiveRequest,
        first_token_s: float | None = None,
        reason: FinishReason = FinishReason.STOPPED,
    ) -> ReadableSpan:
        """The span `llm_request`."""
        self.spans.request_ended(
            live,
            reason,
            arrived_s=self.now_s,
            first_token_s=None if first_token_s is None else self.at_s(first_token_s),
            num_output_tokens=4,
        )
        return self.exporter.get_finished_spans()[-1]

    def phases(self) -> list[tuple[str, float, float, Any]]:
        """Name, begin, end and engine of each span below `llm_request`; seconds after its start."""
        *children, parent = self.exporter.get_finished_spans()
        assert parent.start_time is not None
        assert parent.context is not None
        for child in children:
            assert child.parent is not None
            assert child.context is not None
            assert child.parent.span_id == parent.context.span_id
            assert child.context.trace_id == parent.context.trace_id
        return [
            (
                child.name,
                _seconds(child.start_time, parent.start_time),
                _seconds(child.end_time, parent.start_time),
                _attributes(child).get("longshore.engine"),
            )
            for child in children
        ]


def _seconds(at_ns: int | None, since_ns: int | None) -> float:
    assert at_ns is not None
    assert since_ns is not None
    return pytest.approx((at_ns - since_ns) / 1e9, abs=EPSILON_S)  # type: ignore[no-any-return]


def _attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


def _events(span: ReadableSpan) -> Sequence[tuple[str, float, Any]]:
    return [
        (event.name, _seconds(event.timestamp, span.start_time), (event.attributes or {}))
        for event in span.events
    ]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_a_request_has_spans_of_its_phases_that_follow_each_other(traced: Traced) -> None:
    live = traced.live(traced.leg(1.0, 9.0, (SCHEDULED, 2.0)))
    span = traced.end(live, first_token_s=5.0)
    assert span.name == "llm_request"
    assert traced.phases() == [
        ("queue", 1.0, 3.0, 0),
        ("prefill", 3.0, 5.0, 0),
        ("decode", 5.0, 9.0, 0),
    ]
    assert span.status.status_code is StatusCode.UNSET


def test_times_are_those_of_the_wall_clock_when_the_request_ends(traced: Traced) -> None:
    span = traced.end(traced.live(traced.leg(1.0, 9.0, (SCHEDULED, 2.0))), first_token_s=5.0)
    assert span.start_time is not None
    ago_s = time.time() - span.start_time / 1e9
    assert ago_s == pytest.approx(time.monotonic() - traced.now_s, abs=1.0)
    assert _seconds(span.end_time, span.start_time) == 9.0


def test_attributes_have_the_names_of_the_conventions_and_of_vllm(traced: Traced) -> None:
    leg = traced.leg(1.0, 9.0, (SCHEDULED, 2.0), num_cached_tokens=2)
    assert _attributes(traced.end(traced.live(leg), first_token_s=5.0)) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "longshore",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.latency.e2e": pytest.approx(9.0),
        "gen_ai.latency.time_to_first_token": pytest.approx(5.0),
        "gen_ai.latency.time_in_queue": pytest.approx(2.0),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(2.0),
        "gen_ai.latency.time_in_model_decode": pytest.approx(4.0),
    }


def test_the_limit_of_tokens_is_the_client_s_without_those_that_primed_the_answer(
    traced: Traced,
) -> None:
    live = traced.live(traced.leg(1.0, 9.0))
    live.num_primed = 2  # so that the engine's limit is higher
    assert _attributes(traced.end(live))["gen_ai.request.max_tokens"] == 5


def test_a_request_is_a_child_of_its_trace_headers(traced: Traced) -> None:
    live = traced.live(traced.leg(0.0, 1.0), trace_headers=TRACEPARENT)
    span = traced.end(live)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    traced.phases()


def test_without_trace_headers_the_parent_is_the_span_of_the_program(traced: Traced) -> None:
    tracer = traced.provider.get_tracer("program")
    with tracer.start_as_current_span("program") as program:
        span = traced.end(traced.live(traced.leg(0.0, 1.0)))
    assert span.parent == program.get_span_context()
    assert traced.end(traced.live(traced.leg(0.0, 1.0))).parent is None


def test_what_the_client_does_not_sample_is_not_exported(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    traced.spans.request_ended(
        traced.live(traced.leg(0.0, 1.0), trace_headers=headers),
        FinishReason.STOPPED,
        arrived_s=traced.now_s,
        first_token_s=None,
        num_output_tokens=0,
    )
    assert not traced.exporter.get_finished_spans()


def test_a_prefill_and_a_decode_engine_have_spans_in_one_trace(traced: Traced) -> None:
    """Also the times before: no engine had capacity; and of the pull."""
    live = traced.live(
        traced.leg(1.0, engine=AT_NO_ENGINE),
        traced.leg(2.0, 5.0, (SCHEDULED, 1.0), engine=1),
        traced.leg(6.0, 20.0, (LOAD_BEGUN, 1.0), (LOAD_ENDED, 3.0), (SCHEDULED, 4.0), engine=2),
        trace_headers=TRACEPARENT,
    )
    span = traced.end(live, first_token_s=5.001)
    assert traced.phases() == [
        ("queue", 1.0, 2.0, None),
        ("queue", 2.0, 3.0, 1),
        ("prefill", 3.0, 5.0, 1),
        ("transfer", 7.0, 9.0, 2),
        ("queue", 6.0, 10.0, 2),
        ("decode", 10.0, 20.0, 2),
    ]
    assert not span.events
    assert _attributes(span)["gen_ai.latency.time_in_queue"] == pytest.approx(6.0)


def test_a_preemption_is_an_event(traced: Traced) -> None:
    leg = traced.leg(1.0, 9.0, (SCHEDULED, 1.0), (PREEMPTED, 4.0), (SCHEDULED, 6.0))
    span = traced.end(traced.live(leg), first_token_s=3.0)
    at_engine = {"longshore.engine": 0}
    assert _events(span) == [("preempted", 5.0, at_engine), ("resumed", 7.0, at_engine)]
    assert [name for name, *_ in traced.phases()] == ["queue", "prefill", "decode"]


def test_the_engine_that_continues_for_a_lost_one_is_an_event(traced: Traced) -> None:
    """What the lost one did is not known, except that it gave the first token."""
    live = traced.live(traced.leg(1.0), traced.leg(4.0, 9.0, (SCHEDULED, 1.0), engine=1))
    span = traced.end(live, first_token_s=2.0)
    assert _events(span) == [("resubmitted", 4.0, {"longshore.engine": 1})]
    assert traced.phases() == [
        ("decode", 2.0, 4.0, 0),
        ("queue", 4.0, 5.0, 1),
        ("decode", 5.0, 9.0, 1),
    ]


def test_of_an_aborted_request_only_what_its_client_saw_is_known(traced: Traced) -> None:
    span = traced.end(traced.live(traced.leg(1.0)), reason=FinishReason.ABORTED)
    assert _attributes(span)["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.status.status_code is StatusCode.UNSET
    assert traced.phases() == []


def test_a_request_that_never_ran_was_in_the_queue(traced: Traced) -> None:
    traced.end(traced.live(traced.leg(1.0, 4.0, reason=FinishReason.ERROR)))
    assert traced.phases() == [("queue", 1.0, 4.0, 0)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_that_fails_has_an_error(traced: Traced, is_lost: bool) -> None:
    if is_lost:
        live = traced.live(traced.leg(1.0))
        live.failure = EngineDead("it broke")
    else:
        live = traced.live(traced.leg(1.0, 2.0, reason=FinishReason.ERROR, message="it broke"))
    span = traced.end(live, reason=FinishReason.ABORTED if is_lost else FinishReason.ERROR)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "it broke")
    assert _attributes(span)["gen_ai.response.finish_reasons"] == ("error",)


def test_an_answer_whose_stop_string_was_found_has_not_failed_with_its_engine(
    traced: Traced,
) -> None:
    live = traced.live(traced.leg(1.0))
    live.is_stopped, live.failure = True, EngineDead("it broke")
    span = traced.end(live, first_token_s=2.0)
    assert span.status.status_code is StatusCode.UNSET
    assert _attributes(span)["gen_ai.response.finish_reasons"] == ("stop",)


def test_a_request_for_a_vector_has_no_decode_and_no_sampling(traced: Traced) -> None:
    leg = traced.leg(1.0, 9.0, (SCHEDULED, 2.0))
    span = traced.end(traced.live(leg, pooling=PoolingParams()))
    assert traced.phases() == [("queue", 1.0, 3.0, 0), ("prefill", 3.0, 9.0, 0)]
    assert _attributes(span)["gen_ai.operation.name"] == "embeddings"
    assert not any("temperature" in name for name in _attributes(span))


def test_the_span_of_an_exchange_passes_its_context_on(traced: Traced) -> None:
    exchange = traced.spans.begin_exchange("POST /x", {"a": 1}, TRACEPARENT)
    exchange.end({"b": 2}, "internal")
    (span,) = traced.exporter.get_finished_spans()
    assert span.context is not None
    assert exchange.headers["traceparent"] == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert (span.name, span.kind, dict(_attributes(span))) == (
        "POST /x",
        SpanKind.SERVER,
        {"a": 1, "b": 2},
    )
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.status.status_code is StatusCode.ERROR


def test_both_clocks_that_clients_read_are_the_same_one() -> None:
    clocks = {time.get_clock_info(name).implementation for name in ("monotonic", "perf_counter")}
    assert len(clocks) == 1
