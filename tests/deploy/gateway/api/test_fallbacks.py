"""The errors by which agents and clients fall back by themselves, in each dialect."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import IDENTITY
from tests.deploy.gateway.responses_api.test_responses import events_of

LONG: list[dict[str, Any]] = [{"role": "user", "content": "x" * 300}]
MESSAGES: dict[str, Any] = {"model": "tiny", "messages": LONG, "max_tokens": 9}


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    assert answer.status == 400
    error: dict[str, Any] = json.loads(answer.body)["error"]
    return error


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_that_is_too_long_has_each_dialects_own_code(
    start_gateway: StartGateway, tmp_path: Path, is_stream: bool
) -> None:
    stream = {"stream": is_stream}
    async with start_gateway(runtime_dir=str(tmp_path)) as gateway:
        for path, body in (
            ("/v1/completions", {"prompt": "x" * 300}),
            ("/v1/chat/completions", {"messages": LONG}),
        ):
            error = error_of(await gateway.post(path, body | stream))
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length" in error["message"]
        error = error_of(await gateway.post("/v1/messages", MESSAGES | stream))
        words = error["message"].split()
        assert " ".join(words[:4]) == "prompt is too long:"
        assert int(words[4]) > int(words[7]) == IDENTITY.max_model_len - 1
        answer = await gateway.post("/v1/responses", {"input": LONG} | stream)
        if not is_stream:
            assert error_of(answer)["code"] == "context_length_exceeded"
            return
    created, begun, error, failed = events_of(answer)
    assert answer.status == 200
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert (error["type"], error["code"]) == ("error", "context_length_exceeded")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert failed["response"]["id"] == created["response"]["id"]


async def test_a_thread_makes_anthropics_client_send_the_whole_conversation(
    start_gateway: StartGateway,
) -> None:
    body = {**MESSAGES, "messages": [{"role": "user", "content": "hi"}]}
    async with start_gateway() as gateway:
        for kind in ("create", "continue"):
            answer = await gateway.post("/v1/messages", {**body, "thread": {"type": kind}})
            details = error_of(answer)["details"]
            assert details == {"error_code": "thread_unsupported_request"}
        # What neither has nor needs a thread, and other errors, have no details.
        assert (await gateway.post("/v1/messages", {**body, "thread": None})).status == 200
        assert "details" not in error_of(await gateway.post("/v1/messages", {**body, "n": 2}))
