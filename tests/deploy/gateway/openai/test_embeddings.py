"""The embeddings endpoint with a scripted engine: what it requests, rejects and aborts."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.protocol.outputs import (
    EngineOutputs,
    FinishedRequest,
    FinishReason,
)
from longshore.protocol.requests import AddRequest, PoolingParams
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer

PATH = "/v1/embeddings"
MODEL = EmbeddingModel(size=4)


def pooled(engine: FakeEngine, request: AddRequest) -> None:
    """A vector with the number of tokens and the first token; two tokens are found in the cache."""
    vector = np.array([len(request.prompt_token_ids), request.prompt_token_ids[0]], np.float32)
    end = FinishedRequest(
        request.handle, FinishReason.STOPPED, 0, num_cached_tokens=2, pooled=vector
    )
    engine.send(EngineOutputs(finished=(end,)))


def error_of(answer: HttpAnswer) -> Any:
    return json.loads(answer.body)["error"]


async def metric(gateway: RunningGateway, name: str) -> float:
    text = await gateway.metrics()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_each_input_is_a_request_for_a_vector(start_gateway: StartGateway) -> None:
    async with start_gateway(pooled, embedding=MODEL) as gateway:
        body = {"input": [[5, 6, 7], [9]], "priority": 3, "cache_salt": "s", "dimensions": 2}
        answer = json.loads((await gateway.post(PATH, body)).body)
        assert answer == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [3.0, 5.0]},
                {"object": "embedding", "index": 1, "embedding": [1.0, 9.0]},
            ],
            "model": "tiny",
            "usage": {
                "prompt_tokens": 4,
                "total_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        }
        for request in gateway.engine.requests:
            assert request.options.pooling == PoolingParams("last", True, 2)
            assert (request.options.priority, request.options.cache_salt) == (3, "s")
            assert request.request_id.startswith("embd-")
        assert await metric(gateway, "longshore_prompt_tokens_total") == 4
        assert await metric(gateway, 'longshore_requests_finished_total{reason="stop"}') == 2
        assert await metric(gateway, "longshore_live_requests") == 0


async def test_base64_is_of_little_endian_float32s(start_gateway: StartGateway) -> None:
    async with start_gateway(pooled, embedding=MODEL) as gateway:
        body = {"input": [5, 6], "encoding_format": "base64"}
        (item,) = json.loads((await gateway.post(PATH, body)).body)["data"]
        assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == [2.0, 5.0]


@pytest.mark.parametrize(
    ("model", "body", "pooling"),
    [
        (EmbeddingModel(4, "mean", normalize=False), {}, PoolingParams("mean", False)),
        (EmbeddingModel(4, "mean", normalize=False), {"normalize": True}, PoolingParams("mean")),
        (EmbeddingModel(4, "cls"), {"normalize": False}, PoolingParams("cls", False)),
    ],
)
async def test_a_vector_is_made_as_the_folder_says_unless_the_request_does(
    model: EmbeddingModel, body: dict[str, Any], pooling: PoolingParams, start_gateway: StartGateway
) -> None:
    async with start_gateway(pooled, embedding=model) as gateway:
        assert (await gateway.post(PATH, {"input": "x", **body})).status == 200
        (request,) = gateway.engine.requests
        assert request.options.pooling == pooling


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required field"),
        ({"input": ""}, "input", "input[0] is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[1], []]}, "input", "input[1] is empty"),
        ({"input": ["a", [1]]}, "input", "mixes"),
        ({"input": [["a"]]}, "input", "int"),
        ({"input": [[1]] * 1000 + [[2]] * 1049}, "input", "at most 2048"),
        ({"input": [[320]]}, "input", "token id 320, outside the vocabulary (0 to 319)"),
        ({"input": [-1]}, "input", "token id -1"),
        (
            {"input": [5] * 65},
            "input",
            "input[0] has 65 tokens; this model's maximum",
        ),
        ({"input": "a", "dimensions": 5}, "dimensions", "between 1 and 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 4"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        (
            {"input": "a", "truncate_prompt_tokens": 65},
            "truncate_prompt_tokens",
            "between 1 and 64",
        ),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1"),
        ({"input": "a", "deadline_s": 0}, "deadline_s", "above 0"),
        (
            {"input": "a", "kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
            "not supported",
        ),
        ({"input": "a", "cache_salt": "s" * 1025}, "cache_salt", "length <= 1024"),
        ([], None, "Expected `object`, got `array`"),
        (b"{", None, "not JSON"),
    ],
)
async def test_what_cannot_be_embedded_is_rejected_by_name(
    body: Any, param: str | None, says: str, start_gateway: StartGateway
) -> None:
    async with start_gateway(pooled, embedding=MODEL, max_body_bytes=1 << 16) as gateway:
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await gateway.post(PATH, encoded)
        assert answer.status == 400
        error = error_of(answer)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]
        assert gateway.engine.requests == []


async def test_a_folder_whose_way_is_not_computed_is_rejected_with_what_it_has(
    start_gateway: StartGateway,
) -> None:
    model = EmbeddingModel(4, problem="modules.json has a module Dense that is not supported")
    async with start_gateway(pooled, embedding=model) as gateway:
        error = error_of(await gateway.post(PATH, {"input": "x"}))
        assert error["param"] == "model"
        assert error["message"] == model.problem


async def test_a_model_that_takes_no_text_gives_no_vectors(start_gateway: StartGateway) -> None:
    async with start_gateway(pooled, embedding=None) as gateway:
        error = error_of(await gateway.post(PATH, {"input": "x"}))
        assert "is a speech model and has no embeddings" in error["message"]


async def test_without_a_tokenizer_token_ids_are_embedded_and_texts_rejected(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(pooled, embedding=MODEL, tokenizer=False) as gateway:
        assert (await gateway.post(PATH, {"input": [5]})).status == 200
        cut = await gateway.post(PATH, {"input": [5, 6, 7], "truncate_prompt_tokens": 2})
        assert json.loads(cut.body)["data"][0]["embedding"] == [2.0, 5.0]
        body = {"input": [5, 6, 7], "truncate_prompt_tokens": 2, "truncation_side": "left"}
        cut = await gateway.post(PATH, body)
        assert json.loads(cut.body)["data"][0]["embedding"] == [2.0, 6.0]
        error = error_of(await gateway.post(PATH, {"input": "x"}))
        assert "input needs a tokenizer" in error["message"]


async def test_a_client_that_goes_takes_its_requests_along(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer, embedding=MODEL) as gateway:
        engine = gateway.engine
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        body = json.dumps({"input": [[5], [6], [7]]}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await engine.wait_for(lambda: len(engine.requests) == 3)
        writer.close()
        await engine.wait_for(lambda: len(engine.aborted) == 3)
        assert sorted(engine.aborted) == [request.handle for request in engine.requests]


async def test_vectors_that_come_too_late_are_given_up(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer, embedding=MODEL) as gateway:
        answer = await gateway.post(PATH, {"input": "x", "deadline_s": 0.05})
        assert answer.status == 504
        assert error_of(answer)["param"] == "deadline_s"
        await gateway.engine.wait_for(lambda: gateway.engine.aborted == [0])


async def test_as_many_inputs_are_under_way_as_there_is_room_for(
    start_gateway: StartGateway,
) -> None:
    waiting: list[AddRequest] = []

    def hold(engine: FakeEngine, request: AddRequest) -> None:
        waiting.append(request)

    async with start_gateway(hold, embedding=MODEL, max_live_requests=2) as gateway:
        engine = gateway.engine
        asking = asyncio.create_task(gateway.post(PATH, {"input": [[5], [6], [7], [8], [9]]}))
        for num_sent in (2, 3, 4, 5):
            await engine.wait_for(lambda n=num_sent: len(waiting) == n)
            assert len(waiting) - (num_sent - 2) == 2
            refused = await gateway.post(PATH, {"input": "x"})
            assert refused.status == 429
            assert len(waiting) == num_sent
            pooled(engine, waiting[num_sent - 2])
        pooled(engine, waiting[-1])
        data = json.loads((await asking).body)["data"]
        assert [item["embedding"][1] for item in data] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.IGNORED, 400)]
)
async def test_an_input_that_fails_is_the_answer_and_the_others_are_given_up(
    reason: FinishReason, status: int, start_gateway: StartGateway
) -> None:
    def fail_second(engine: FakeEngine, request: AddRequest) -> None:
        if request.prompt_token_ids[0] == 6:
            engine.finish(request, reason, message="why")

    async with start_gateway(fail_second, embedding=MODEL) as gateway:
        answer = await gateway.post(PATH, {"input": [[5], [6], [7]]})
        assert (answer.status, error_of(answer)["message"]) == (status, "why")
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 2)


async def test_a_dead_engine_is_unavailable(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer, embedding=MODEL) as gateway:
        asking = asyncio.create_task(gateway.post(PATH, {"input": "x"}))
        await gateway.engine.wait_for(lambda: bool(gateway.engine.requests))
        gateway.process._models[0].engines.shut_down("worker 0 was lost")
        assert (await asking).status == 503
        assert (await gateway.post(PATH, {"input": "x"})).status == 503
