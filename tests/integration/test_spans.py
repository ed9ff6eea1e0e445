"""Spans of the requests of a deployment, of `LLM` and of `AsyncLLM`, at a collector."""

import json
import time
import urllib.request
from typing import Any

from longshore import LLM, AsyncLLM, SamplingParams
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.deploy.span_receiver import span_receiver
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S

SETTINGS: dict[str, Any] = {"num_blocks": 600, "threads": 1}
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=5, ignore_eos=True)
LONGER = SamplingParams(n=2, temperature=1.0, max_tokens=100, ignore_eos=True)
"""Its tokens do not all arrive at once, as those of a few steps do on a busy machine."""
NUM_TOKENS = 200
TRACE_ID, CLIENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_served_request_has_spans_in_the_trace_of_its_client(
    start_deployment: StartDeployment,
) -> None:
    with span_receiver() as collector:
        own = start_deployment("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        own.wait_until_ready()
        # So many that a busy gateway does not get them all at once.
        body = {"prompt": "a b c", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        request = urllib.request.Request(
            f"{own.url}/v1/completions",
            json.dumps(body).encode(),
            {
                "content-type": "application/json",
                "traceparent": f"00-{TRACE_ID}-{CLIENT_ID}-01",
            },
        )
        began_s = time.time()
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer, returned = json.load(response), response.headers["traceparent"]
        assert own.stop() == 0, own.output  # the last spans are exported before the end
        ended_s = time.time()  # the span ends after the client has the last byte
    (exchange,) = collector.named("POST /v1/completions")
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert exchange.parent_id == CLIENT_ID
    assert returned == f"00-{TRACE_ID}-{exchange.span_id}-01"
    (llm_request,) = collector.below(exchange)
    phases = collector.below(llm_request)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    times = [
        *(began_s - 1e-3, exchange.begin_s, llm_request.begin_s),
        *(at_s for phase in phases for at_s in (phase.begin_s, phase.end_s)),
        *(llm_request.end_s, exchange.end_s, ended_s + 1e-3),
    ]
    assert times == sorted(times)
    assert {phase.attributes["longshore.engine"] for phase in phases} == {0}
    assert llm_request.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert llm_request.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert llm_request.attributes["gen_ai.request.id"].startswith(answer["id"])


def test_answers_of_llm_have_spans() -> None:
    with span_receiver() as collector:
        with LLM(
            DEMO_MODEL_DIR, in_process=True, otlp_traces_endpoint=collector.url, **SETTINGS
        ) as llm:
            llm.generate(["a", "b"], PARAMS, use_tqdm=False)
        requests = collector.named("llm_request")
    assert len(requests) == 4
    for request in requests:
        assert request.parent_id == ""
        assert request.attributes["gen_ai.request.choice.count"] == 2
        assert request.attributes["gen_ai.usage.output_tokens"] == 5
        assert 0 < request.attributes["gen_ai.latency.time_to_first_token"] < 60
        names = [phase.name for phase in collector.below(request)]
        assert names == ["queue", "prefill", "decode"]


async def test_streams_of_async_llm_belong_to_the_trace_that_they_are_given() -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CLIENT_ID}-01"}
    with span_receiver() as collector:
        async with AsyncLLM(
            DEMO_MODEL_DIR, otlp_traces_endpoint=collector.url, **SETTINGS
        ) as engine:
            async for _ in engine.generate("a", LONGER, "whole", trace_headers=headers):
                pass
            stream = engine.generate("b", PARAMS, "closed early")
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        first, second, closed = sorted(
            collector.named("llm_request"),
            key=lambda span: (span.parent_id == "", span.begin_s),
        )[:3]
    for request in (first, second):
        assert (request.trace_id, request.parent_id) == (TRACE_ID, CLIENT_ID)
        names = [phase.name for phase in collector.below(request)]
        assert names == ["queue", "prefill", "decode"]
    assert closed.parent_id == ""
