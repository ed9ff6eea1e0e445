"""Responses that are held in memory are bounded: by their prompts, and while they grow."""

import json

import msgspec
import pytest

from longshore.deploy.gateway.api.answer_size import (
    MAX_ANSWER_BYTES,
    SCORE_BYTES,
    TOKEN_BYTES,
    TOKEN_ID_BYTES,
    check_output_size,
    check_prompt_size,
)
from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.generation_spec import GenerationSpec
from longshore.protocol.sampling import SamplingParams
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import scored_echo
from tests.deploy.gateway.http.test_exchange import error_of

MAX_SCORES = MAX_ANSWER_BYTES // SCORE_BYTES
PLAIN = GenerationSpec("r", [[1] * 1000] * 64, SamplingParams(), False, 0.0)


def test_scores_and_echoes_of_prompts_are_bounded() -> None:
    most = MAX_SCORES // 64_000 - 1
    for number, is_allowed in ((most, True), (most + 1, False)):
        spec = msgspec.structs.replace(PLAIN, sampling=SamplingParams(prompt_logprobs=number))
        if is_allowed:
            check_prompt_size(spec)
            continue
        with pytest.raises(RequestError) as caught:
            check_prompt_size(spec)
        assert (status_of(caught.value), caught.value.param) == (400, "prompt_logprobs")
    echoed = msgspec.structs.replace(PLAIN, num_echoed_characters=1 << 20, num_samples=64)
    check_prompt_size(echoed)
    with pytest.raises(RequestError, match="64 MiB"):
        check_prompt_size(msgspec.structs.replace(echoed, num_samples=65))


def test_returned_token_ids_of_prompts_are_bounded() -> None:
    most = MAX_ANSWER_BYTES // TOKEN_ID_BYTES
    check_prompt_size(msgspec.structs.replace(PLAIN, num_returned_prompt_ids=most))
    with pytest.raises(RequestError, match="64 MiB") as caught:
        check_prompt_size(msgspec.structs.replace(PLAIN, num_returned_prompt_ids=most + 1))
    assert caught.value.param == "return_token_ids"


def test_generated_tokens_are_bounded() -> None:
    check_output_size(PLAIN, MAX_ANSWER_BYTES // TOKEN_BYTES)
    with pytest.raises(RequestError, match="stream=true"):
        check_output_size(PLAIN, MAX_ANSWER_BYTES // TOKEN_BYTES + 1)


async def test_an_answer_that_grows_too_large_is_aborted(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.deploy.gateway.api.answer_size.MAX_ANSWER_BYTES", 5_000)
    body = {"prompt": "a" * 30, "max_tokens": 30, "logprobs": 5}
    async with start_gateway(scored_echo) as gateway:
        answer = await gateway.post("/v1/completions", body)
        assert (answer.status, error_of(answer)["code"]) == (400, "response_too_large")
        streamed = await gateway.post("/v1/completions", body | {"stream": True})
        assert streamed.status == 200
        small = await gateway.post("/v1/completions", body | {"logprobs": None})
        assert json.loads(small.body)["usage"]["completion_tokens"] == 30
