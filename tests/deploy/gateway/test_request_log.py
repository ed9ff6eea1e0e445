"""What the gateway logs about HTTP requests, and what it never logs."""

import asyncio
import json
import logging
from typing import Any

import pytest

from longshore.deploy.gateway.api_keys import plain_keys
from longshore.protocol.logs.limits import MAX_PER_SECOND
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer

NAME = "longshore.deploy.gateway.request_log"
BODY = {"prompt": "a secret", "max_tokens": 3}


def fail(engine: FakeEngine, request: AddRequest) -> None:
    engine.finish(request, FinishReason.ERROR, message="the device is on fire")


def about(record: logging.LogRecord) -> dict[str, Any]:
    return dict(vars(record)["fields"])


async def ask(gateway: RunningGateway, request_id: str, path: str = "/v1/completions") -> int:
    answer = await gateway.client.request(
        "POST",
        path,
        json.dumps(BODY).encode(),
        timeout_s=PATIENCE_S,
        headers={"x-request-id": request_id, "authorization": "Bearer secret-key"},
    )
    return answer.status


async def test_debug_tells_arrival_answer_and_exchange_with_the_client_s_id(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    async with start_gateway(api_keys=plain_keys(["secret-key"], "key")) as gateway:
        assert await ask(gateway, "order-66") == 200
    arrived, ended, answered = (record for record in caplog.records if record.name == NAME)
    assert all("order-66" in about(each)["request_id"] for each in (arrived, ended, answered))
    assert about(arrived)["prompt_tokens"] == about(answered)["prompt_tokens"] > 0
    assert about(arrived)["max_tokens"] == 3
    assert about(arrived)["client"].startswith("127.0.0.1:")
    assert about(ended)["finish_reason"] == "LENGTH_CAPPED"
    assert about(ended)["output_tokens"] == about(answered)["output_tokens"] == 3
    assert 0 < about(ended)["ttft_ms"] <= about(ended)["total_ms"]
    assert about(answered)["duration_ms"] > 0
    assert (about(answered)["method"], about(answered)["path"]) == ("POST", "/v1/completions")
    assert (about(answered)["status"], about(answered)["request_id"]) == (200, "order-66")
    assert "secret" not in caplog.text


async def test_a_request_that_the_engine_fails_is_a_warning_with_id_and_reason(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway(fail) as gateway:
        assert await ask(gateway, "order-67") == 500
    (warning,) = (record for record in caplog.records if record.name == NAME)
    assert warning.levelname == "WARNING"
    assert warning.getMessage() == "request failed: the device is on fire"
    assert about(warning) == {
        "request_id": "order-67",
        "method": "POST",
        "path": "/v1/completions",
        "status": 500,
    }


async def test_what_the_client_did_wrong_is_no_warning_and_at_debug_one_line(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    async with start_gateway() as gateway:
        assert (await gateway.post("/v1/completions", b"{")).status == 400
        assert await ask(gateway, "order-68", "/v1/nothing") == 404
    bad, unknown = (record for record in caplog.records if record.name == NAME)
    assert (bad.levelname, unknown.levelname) == ("DEBUG", "DEBUG")
    assert (about(bad)["status"], about(bad)["error"]) == (400, "invalid_request_error")
    assert (about(unknown)["status"], about(unknown)["path"]) == (404, "/v1/nothing")


async def test_a_bug_is_one_warning_with_its_traceback(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_gateway() as gateway:
        monkeypatch.setattr(gateway.process._models[0].engines, "submit", None)
        assert await ask(gateway, "order-69") == 500
    (warning,) = (record for record in caplog.records if record.name == NAME)
    assert about(warning)["request_id"] == "order-69"
    assert warning.exc_info is not None
    assert warning.exc_info[0] is TypeError


async def test_a_client_that_goes_is_told_at_debug_with_what_it_got(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    async with start_gateway(never_answer) as gateway:
        asking = asyncio.create_task(ask(gateway, "order-70"))
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        asking.cancel()
        await gateway.engine.wait_for(lambda: bool(gateway.engine.aborted))
    said = {record.getMessage(): about(record) for record in caplog.records if record.name == NAME}
    assert said["finished"]["finish_reason"] == "ABORTED"
    assert said["finished"]["output_tokens"] == 0
    assert said["client disconnected"]["request_id"] == "order-70"


async def test_a_flood_of_failures_is_cut(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway(fail) as gateway:
        for _ in range(4):
            await asyncio.gather(*(ask(gateway, "order-71") for _ in range(20)))
    at_s = [record.created for record in caplog.records if record.name == NAME]
    within_a_second = [sum(start <= other < start + 1 for other in at_s) for start in at_s]
    assert max(within_a_second) <= 2 * MAX_PER_SECOND + 2  # the end of one second, and the next


async def test_with_the_access_log_each_request_is_one_line_at_info(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    keys = plain_keys(["secret-key"], "key")
    async with start_gateway(api_keys=keys, access_log=True) as gateway:
        assert await ask(gateway, "order-72") == 200
        assert await ask(gateway, "order-73", "/v1/nothing") == 404
    answered, unknown = (record for record in caplog.records if record.name == NAME)
    assert (answered.levelname, answered.getMessage()) == ("INFO", "answered")
    shown = about(answered)
    assert 0 < shown.pop("ttft_ms") <= shown.pop("duration_ms")
    assert shown.pop("client").startswith("127.0.0.1:")
    assert shown == {
        "request_id": "order-72",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": 8,
        "output_tokens": 3,
        "key": "key-1",
    }
    assert (about(unknown)["status"], about(unknown)["key"]) == (404, "key-1")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("has_probes", [False, True])
async def test_the_access_log_has_probes_only_if_it_is_told_to(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture, has_probes: bool
) -> None:
    caplog.set_level(logging.INFO, NAME)
    probes = ["/health", "/ready", "/ping", "/metrics", "/load"]
    async with start_gateway(access_log=True, access_log_probes=has_probes) as gateway:
        for path in (*probes, "/version"):
            await gateway.get(path)
    paths = [about(record)["path"] for record in caplog.records if record.name == NAME]
    assert set(probes) & set(paths) == (set(probes) if has_probes else set())
    assert "/version" in paths


async def test_without_the_access_log_a_served_request_leaves_no_line(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    async with start_gateway() as gateway:
        assert await ask(gateway, "order-74") == 200
    assert not [record for record in caplog.records if record.name == NAME]


async def test_rejected_requests_are_counted_in_the_log_when_the_gateway_ends(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_gateway(never_answer, max_live_requests=1) as gateway:
        first = asyncio.create_task(ask(gateway, "order-75"))
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        for _ in range(4):
            assert await ask(gateway, "order-76") == 429
        assert (await gateway.post("/v1/completions", b" " * 5000)).status == 413
        first.cancel()
        await gateway.engine.wait_for(lambda: bool(gateway.engine.aborted))
    full, large, more = (record for record in caplog.records if record.name == NAME)
    assert full.getMessage().startswith("request rejected: 1 requests are running or waiting")
    assert (about(full)["request_id"], about(full)["code"]) == ("order-76", "queue_full")
    assert about(large)["status"] == 413
    assert more.getMessage() == "rejected 3 more requests for this reason within 10 s"
