"""Request ids, API keys and the limit of live requests, which are checked before anything else."""

import asyncio
import json

import pytest

from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
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
        assert one.options.trace_headers == {"traceparent": TRACE}


async def test_a_request_without_an_id_gets_one_that_its_response_names(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        answers = [await gateway.post("/v1/completions", BODY) for _ in range(2)]
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == 2
        assert all(a.headers["x-request-id"] in json.loads(a.body)["id"] for a in answers)
        assert (await gateway.get("/v1/models")).headers["x-request-id"] not in ids
        assert gateway.engine.requests[0].options.trace_headers is None


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


async def status_of(gateway: RunningGateway, method: str, path: str, **headers: str) -> int:
    """headers: with `_` for `-`; Host and Content-Type replace the client's own."""
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = {"Host": "localhost", "Connection": "close", "Content-Length": "0"} | lines
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def test_without_keys_a_request_must_name_this_server(start_gateway: StartGateway) -> None:
    hosts = [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("a.localhost:8000", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("llm.example.org", True),
        ("LLM.example.org:80", True),
        ("other.example.org", False),
        ("localhost.example.org", False),
        ("notlocalhost", False),
        ("127.0.0.1.example.org:8000", False),
        ("localhost:8000@example.org", False),
        ("llm.example.org:x", False),
    ]
    async with start_gateway(allowed_hosts=("llm.example.org",)) as gateway:
        for host, is_allowed in hosts:
            for path in ("/health", "/metrics", "/dashboard", "/v1/models"):
                for method in ("GET", "HEAD"):
                    status = await status_of(gateway, method, path, Host=host)
                    assert status == (200 if is_allowed else 403), (host, path)


async def test_any_name_is_allowed_with_keys_or_if_all_are(start_gateway: StartGateway) -> None:
    for settings in ({"api_keys": plain_keys(["first"], "key")}, {"allowed_hosts": ("*",)}):
        async with start_gateway(**settings) as gateway:
            assert await status_of(gateway, "GET", "/health", Host="evil.example") == 200


async def test_a_name_that_is_not_allowed_is_told_which_setting_allows_it(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        endpoint = HttpEndpoint(f"http://evil.example:{gateway.port}")
        endpoint._host = "127.0.0.1"
        for path in ("/v1/completions", "/v1/messages", "/v1/responses"):
            answer = await endpoint.request("POST", path, BODY, timeout_s=PATIENCE_S)
            assert answer.status == 403
            error = json.loads(answer.body)["error"]
            assert "--allowed-hosts NAME" in error["message"]
            assert error["type"] == "permission_error"


async def test_a_page_of_another_site_cannot_send_what_a_browser_sends_unasked(
    start_gateway: StartGateway,
) -> None:
    pages = [
        ("https://evil.example", "multipart/form-data", False),
        ("https://evil.example", "", False),
        ("null", "text/plain", False),
        ("http://localhost", "multipart/form-data", True),
        ("https://app.example", "multipart/form-data", True),
        ("https://evil.example", "application/json", True),  # the browser asks before
        ("", "multipart/form-data", True),
    ]
    async with start_gateway(cors_allow_origins=("https://app.example",)) as gateway:
        for origin, kind, is_allowed in pages:
            headers = {"Origin": origin, "Content_Type": kind}
            for path in ("/v1/audio/transcriptions", "/v1/responses/resp_1/cancel"):
                status = await status_of(gateway, "POST", path, **headers)
                assert (status != 403) == is_allowed, (origin, kind)
        assert await status_of(gateway, "GET", "/metrics", Origin="https://evil.example") == 200
