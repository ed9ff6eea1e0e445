"""Request ids, API keys and the limit of live requests, which are checked before anything else."""

import asyncio
import json

import pytest

from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer
from tests.deploy.gateway.http.test_exchange import error_of

BODY = json.dumps({"prompt": "p", "max_tokens": 1}).encode()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_id_and_a_trace_reach_the_engine_and_come_back(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        headers = {"x-request-id": "order-66", "traceparent": TRACE}
        for _ in range(2):
            answer = await gateway.client.request(
                "POST", "/v1/completions", BODY, timeout_s=PATIENCE_S, headers=headers
            )
            assert answer.headers["x-request-id"] == "order-66"
            assert answer.headers["traceparent"] == TRACE
            assert json.loads(answer.body)["id"].startswith("cmpl-order-66-")
        one, other = gateway.engine.requests
        assert one.request_id.startswith("cmpl-order-66-")
        assert one.request_id != other.request_id  # the engine can still distinguish them
        assert one.trace_headers == {"traceparent": TRACE}


async def test_a_request_without_an_id_gets_one_that_its_response_names(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        answers = [await gateway.post("/v1/completions", BODY) for _ in range(2)]
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == 2
        assert all(a.headers["x-request-id"] in json.loads(a.body)["id"] for a in answers)
        assert (await gateway.get("/v1/models")).headers["x-request-id"] not in ids
        assert gateway.engine.requests[0].trace_headers is None


@pytest.mark.parametrize("given", ["x" * 129, "two words", "é"])
async def test_an_id_that_no_log_should_hold_is_rejected(
    start_gateway: StartGateway, given: str
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.client.request(
            "POST", "/v1/completions", BODY, timeout_s=PATIENCE_S, headers={"x-request-id": given}
        )
        assert answer.status == 400
        assert "x-request-id" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic second", 401),
        ("Bearer ", 401),
        ("Bearer first", 200),
        ("bearer second", 200),
    ],
)
async def test_only_those_with_a_key_are_served(
    start_gateway: StartGateway, authorization: str | None, status: int
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    async with start_gateway(api_keys=plain_keys(["first", "second"], "key")) as gateway:
        for method, path, body in (
            ("POST", "/v1/completions", BODY),
            ("GET", "/v1/models", b""),
            ("GET", "/engine/report", b""),
        ):
            answer = await gateway.client.request(
                method, path, body, timeout_s=PATIENCE_S, headers=headers
            )
            assert answer.status == status
            if status == 401:
                assert error_of(answer)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "first" not in answer.body.decode()
        for path in ("/health", "/ready", "/metrics"):  # probes send no key
            assert (await gateway.get(path)).status == 200


async def test_what_does_not_fit_beside_the_live_answers_is_told_to_come_back(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(never_answer, max_live_requests=3) as gateway:
        engine = gateway.engine
        two = {"prompt": ["a", "b"], "max_tokens": 1}
        waiting = asyncio.create_task(gateway.post("/v1/completions", two))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        refused = await gateway.post("/v1/completions", two)
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        assert error_of(refused)["code"] == "queue_full"
        assert len(engine.requests) == 2
        for request in list(engine.requests):
            _end(engine, request)
        assert (await waiting).status == 200
        engine.script = _end
        assert (await gateway.post("/v1/completions", two)).status == 200
        # A request that could never fit is accepted if it is alone: waiting would not help.
        four = {"prompt": ["a"] * 4, "max_tokens": 1}
        assert (await gateway.post("/v1/completions", four)).status == 200


def _end(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, [5])
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=1)
