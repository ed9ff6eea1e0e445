"""Stop strings over HTTP: what the client gets, and what the engine is sent."""

import asyncio
import json
from typing import Any

import pytest

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, StopFound
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, score_of, scored_echo
from tests.deploy.gateway.http.test_exchange import (
    chunks_of,
    error_of,
    ids_of,
    say,
)

TEXT = "one END two END"
NUM_KEPT = len(ids_of("one END"))


def endless(engine: FakeEngine, request: AddRequest) -> None:
    """Sends one token per message, far more than the answer keeps, and stops when notified."""
    token_ids = ids_of(TEXT)
    for token_id in token_ids:
        engine.send_tokens(request, [token_id])
    engine.finish(request, FinishReason.STOPPED, num_output_tokens=NUM_KEPT)


def in_one_message(engine: FakeEngine, request: AddRequest) -> None:
    token_ids = ids_of(TEXT)
    engine.send_tokens(request, token_ids)
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=len(token_ids))


def dies_behind_the_stop(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, ids_of(TEXT))
    engine.fail("worker 0 has ended")


@pytest.mark.parametrize("script", [endless, in_one_message, dies_behind_the_stop])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_ends_before_its_stop_and_counts_nothing_after_it(
    start_gateway: StartGateway, script: Any, is_stream: bool
) -> None:
    body = {
        "prompt": "p",
        "stop": "END",
        "stream": is_stream,
        "return_token_ids": True,
        **({"stream_options": {"include_usage": True}} if is_stream else {}),
    }
    async with start_gateway(script) as gateway:
        answer = await gateway.post("/v1/completions", body)
        chunks = chunks_of(answer) if is_stream else [json.loads(answer.body)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "one "
    assert [i for choice in choices for i in choice["token_ids"]] == ids_of("one END")
    assert choices[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_KEPT


async def test_the_engine_is_told_once_and_at_once(start_gateway: StartGateway) -> None:
    def waits_for_the_stop(engine: FakeEngine, request: AddRequest) -> None:
        engine.send_tokens(request, ids_of(TEXT))

    async with start_gateway(waits_for_the_stop) as gateway:
        engine = gateway.engine
        body = {"messages": [{"role": "user", "content": "?"}], "stop": ["two", "END"]}
        client = gateway.client.request(
            "POST", "/v1/chat/completions", json.dumps(body).encode(), timeout_s=PATIENCE_S
        )
        asked = asyncio.create_task(client)
        await engine.wait_for(lambda: bool(engine.stopped))
        (request,) = engine.requests
        assert not asked.done()  # the engine counts the computed tokens
        engine.finish(request, FinishReason.STOPPED, num_output_tokens=NUM_KEPT)
        (choice,) = json.loads((await asked).body)["choices"]
        assert choice["message"]["content"] == "one "
        assert choice["finish_reason"] == "stop"
        assert engine.stopped == [StopFound(request.handle, NUM_KEPT)]
        assert engine.aborted == []


async def test_the_stop_can_be_part_of_the_answer(start_gateway: StartGateway) -> None:
    async with start_gateway(endless) as gateway:
        body = {"prompt": "p", "stop": ["END", "never"], "include_stop_str_in_output": True}
        answer = await gateway.post("/v1/completions", body)
        assert json.loads(answer.body)["choices"][0]["text"] == "one END"


async def test_an_answer_without_its_stop_is_whole(start_gateway: StartGateway) -> None:
    async with start_gateway(say("the berth, the E")) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "p", "stop": ["END", "pier"]})
        (choice,) = json.loads(answer.body)["choices"]
        assert choice["text"] == "the berth, the E"  # `E` could be the beginning of a stop string
        assert gateway.engine.stopped == []


async def test_log_probabilities_end_with_the_answer(start_gateway: StartGateway) -> None:
    async with start_gateway(scored_echo) as gateway:
        body = {"prompt": TEXT, "max_tokens": 32, "stop": "END", "logprobs": 1}
        answer = await gateway.post("/v1/completions", body)
        logprobs = json.loads(answer.body)["choices"][0]["logprobs"]
        first = len(ids_of(TEXT))
        wanted = [score_of(first + index, 1)[0] for index in range(NUM_KEPT)]
        assert logprobs["token_logprobs"] == wanted


@pytest.mark.parametrize(
    ("stop", "problem"),
    [
        (["a", ""], "stop has a string of 0 characters"),
        ("x" * 257, "stop has a string of 257 characters"),
        (["x"] * 17, "stop has 17 strings; at most 16 are allowed"),
        ([3], "Expected `str`"),
    ],
)
async def test_a_stop_that_makes_no_sense_is_rejected(
    start_gateway: StartGateway, stop: Any, problem: str
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": "p", "stop": stop})
        assert answer.status == 400
        assert problem in error_of(answer)["message"]
        assert error_of(answer)["param"] == "stop"


async def test_a_stop_needs_a_tokenizer_and_no_beams(start_gateway: StartGateway) -> None:
    async with start_gateway(tokenizer=False) as gateway:
        answer = await gateway.post("/v1/completions", {"prompt": [5], "stop": "END"})
        assert error_of(answer)["param"] == "stop"
    async with start_gateway() as gateway:
        body = {"prompt": "p", "stop": "END", "use_beam_search": True, "temperature": 0}
        assert error_of(await gateway.post("/v1/completions", body))["param"] == "stop"
