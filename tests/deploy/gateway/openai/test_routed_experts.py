"""The experts of tokens in JSON, in whole answers and streams of both endpoints."""

import base64
import io
import json
from typing import Any, Final

import numpy as np
import pytest

from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AddRequest
from longshore.protocol.routed_experts import RoutedExperts, RoutedExpertsShape
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine

SHAPE: Final = RoutedExpertsShape(num_layers=48, top_k=8, num_experts=300)
EXPERTS: Final = np.arange(100 * 48 * 8, dtype="<i2").reshape(100, 48, 8) % 300
"""They are sent in a frame of their own."""


def answer_with_experts(engine: FakeEngine, request: AddRequest) -> None:
    engine.send_tokens(request, [5, 6])
    experts = RoutedExperts(SHAPE, EXPERTS.view(np.uint8).ravel())
    end = FinishedRequest(request.handle, FinishReason.LENGTH_CAPPED, 2, routed_experts=experts)
    engine.send(EngineOutputs(finished=(end,)))


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_an_answer_has_its_experts_as_a_file_of_numpy_in_base64(
    path: str, prompt: dict[str, Any], is_stream: bool, start_gateway: StartGateway
) -> None:
    body = {**prompt, "max_tokens": 2, "stream": is_stream, "routed_experts_prompt_start": 1}
    async with start_gateway(answer_with_experts) as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 200, answer.body
        if is_stream:
            chunks = [json.loads(data) for _, data in answer.events if data != b"[DONE]"]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
        else:
            choices = json.loads(answer.body)["choices"]
        (request,) = gateway.engine.requests
        assert request.sampling.routed_experts_prompt_start == 1
    *others, last = choices
    assert last["finish_reason"] == "length"
    assert not any("routed_experts" in choice for choice in others)
    experts = np.load(io.BytesIO(base64.b64decode(last["routed_experts"])))
    assert experts.dtype == np.int16
    np.testing.assert_array_equal(experts, EXPERTS)


async def test_a_negative_start_is_rejected(start_gateway: StartGateway) -> None:
    body = {"prompt": [1, 2, 3], "routed_experts_prompt_start": -1}
    async with start_gateway(answer_with_experts) as gateway:
        answer = await gateway.post("/v1/completions", body)
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] == "routed_experts_prompt_start"
