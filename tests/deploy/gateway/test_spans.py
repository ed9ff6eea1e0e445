"""Spans of HTTP requests: what a gateway exports to a collector."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine
from tests.deploy.span_receiver import span_receiver

ERROR = 2
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_ID = "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE_ID}-{CLIENT_ID}-01", "tracestate": "vendor=1"}
BODY: dict[str, Any] = {"prompt": "p q", "max_tokens": 2}


async def test_a_request_and_its_exchange_belong_to_the_trace_of_the_client(
    start_gateway: StartGateway,
) -> None:
    """Engines and the client get the exchange's context."""
    with span_receiver() as collector:
        async with start_gateway(otlp_traces_endpoint=collector.url) as gateway:
            body = json.dumps(BODY).encode()
            answer = await gateway.client.request(
                "POST", "/v1/completions", body, timeout_s=PATIENCE_S, headers=CLIENT
            )
            sent = gateway.engine.requests[0].options.trace_headers
        (exchange,) = collector.named("POST /v1/completions")
        (request,) = collector.below(exchange)
    assert (exchange.trace_id, exchange.parent_id) == (TRACE_ID, CLIENT_ID)
    assert sent == {
        "traceparent": f"00-{TRACE_ID}-{exchange.span_id}-01",
        "tracestate": "vendor=1",
    }
    assert answer.headers["traceparent"] == sent["traceparent"]
    assert answer.headers["tracestate"] == "vendor=1"
    assert exchange.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
    }
    assert request.name == "llm_request"
    assert exchange.begin_s <= request.begin_s <= request.end_s <= exchange.end_s
    assert request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["gen_ai.usage.output_tokens"] == 2
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert exchange.resource["service.name"] == "longshore"


async def test_all_answers_of_an_exchange_are_in_its_trace(start_gateway: StartGateway) -> None:
    with span_receiver() as collector:
        async with start_gateway(otlp_traces_endpoint=collector.url) as gateway:
            answer = await gateway.post(
                "/v1/completions", BODY | {"prompt": ["a", "b"], "n": 2, "stream": True}
            )
            assert answer.status == 200
            await gateway.post("/v1/embeddings", {"input": ["a", "b", "c"]})
        (exchange,) = collector.named("POST /v1/completions")
        answers = collector.below(exchange)
        assert [span.name for span in answers] == ["llm_request"] * 4
        assert {span.attributes["gen_ai.request.choice.count"] for span in answers} == {2}
        assert len({span.attributes["gen_ai.request.id"] for span in answers}) == 4


async def test_the_program_can_have_another_name(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill-pool")
    with span_receiver() as collector:
        async with start_gateway(otlp_traces_endpoint=collector.url) as gateway:
            await gateway.post("/v1/completions", BODY)
        assert {span.resource["service.name"] for span in collector.spans} == {"prefill-pool"}


async def test_a_rejected_request_has_a_span_and_one_without_a_key_has_none(
    start_gateway: StartGateway,
) -> None:
    """So that clients without a key send nothing to the collector."""
    with span_receiver() as collector:
        async with start_gateway(
            otlp_traces_endpoint=collector.url, api_keys=plain_keys(["secret"], "key")
        ) as gateway:
            assert (await gateway.post("/v1/completions", BODY)).status == 401
            answer = await gateway.client.request(
                "POST",
                "/v1/completions",
                json.dumps(BODY | {"max_tokens": -1}).encode(),
                timeout_s=PATIENCE_S,
                headers={"authorization": "Bearer secret"},
            )
            assert answer.status == 400
            await gateway.get("/metrics")
        (span,) = collector.spans
        assert span.attributes["http.response.status_code"] == 400
        assert span.status != ERROR


def fail(engine: FakeEngine, request: AddRequest) -> None:
    engine.finish(request, FinishReason.ERROR, num_output_tokens=0, message="out of luck")


async def test_a_failed_request_has_an_error(start_gateway: StartGateway) -> None:
    with span_receiver() as collector:
        async with start_gateway(fail, otlp_traces_endpoint=collector.url) as gateway:
            assert (await gateway.post("/v1/completions", BODY)).status == 500
        (exchange,) = collector.named("POST /v1/completions")
        (request,) = collector.below(exchange)
        assert (exchange.status, request.status) == (ERROR, ERROR)
        assert exchange.attributes["http.response.status_code"] == 500


async def test_a_collector_that_does_not_answer_delays_nothing(
    start_gateway: StartGateway,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with start_gateway(otlp_traces_endpoint=url) as gateway:
            for _ in range(3):
                assert (await gateway.post("/v1/completions", BODY)).status == 200
            began_s = await asyncio.to_thread(time.monotonic)
        assert time.monotonic() - began_s < PATIENCE_S / 2  # at most CLOSE_TIMEOUT_S on a free CPU
