"""Requests for text that prefill and decode engines share, over HTTP."""

import asyncio
import json
from typing import Any, Final

from longshore.deploy.gateway.settings import SplitSettings
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.fake_engine import IDENTITY, FakeEngine, never_answer

NUM_AT_A_TIME: Final = IDENTITY.max_num_seqs
"""Requests for which the decode engine has capacity."""


def offer(engine: FakeEngine, request: AddRequest) -> None:
    """Answer as a prefill engine."""
    engine.send_tokens(request, [5])
    params = {"do_remote_prefill": True, "transfer_id": request.request_id}
    end = FinishedRequest(request.handle, FinishReason.LENGTH_CAPPED, 1, kv_transfer_params=params)
    engine.send(EngineOutputs(finished=(end,)))


def complete(engine: FakeEngine, request: AddRequest) -> None:
    """Answer as a decode engine, after the first token."""
    assert request.output_token_ids.tolist() == [5]
    engine.send_tokens(request, [6, 7])
    engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=3)


async def test_what_may_not_wait_for_a_decode_engine_is_told_to_come_back(
    start_gateway: StartGateway,
) -> None:
    split: dict[str, Any] = {
        "roles": ("prefill", "decode"),
        "split": SplitSettings(disaggregation_min_tokens=1, disaggregation_max_waiting=1),
    }
    asked = {"max_tokens": 3, "return_token_ids": True}
    async with start_gateway(never_answer, **split) as gateway:
        prefill, decode = gateway.engines
        many = {"prompt": [[3, 4]] * (NUM_AT_A_TIME + 1), **asked}
        accepted = asyncio.create_task(gateway.post("/v1/completions", many))
        await prefill.wait_for(lambda: len(prefill.requests) == NUM_AT_A_TIME)
        for is_stream in (False, True):
            one = {"prompt": [3, 4], "stream": is_stream, **asked}
            refused = await gateway.post("/v1/completions", one)
            assert refused.status == 429
            assert refused.headers["retry-after"] == "1"
            error = json.loads(refused.body)["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert "1 requests wait for a decode engine, and the limit is 1" in error["message"]
        assert len(prefill.requests) == NUM_AT_A_TIME

        prefill.script, decode.script = offer, complete
        for request in list(prefill.requests):
            offer(prefill, request)
        answer = await accepted
        assert answer.status == 200
        choices = json.loads(answer.body)["choices"]
        assert [each["token_ids"] for each in choices] == [[5, 6, 7]] * (NUM_AT_A_TIME + 1)
        assert len(prefill.requests) == len(decode.requests) == NUM_AT_A_TIME + 1
        assert not prefill.aborted
        # There is capacity again.
        assert (await gateway.post("/v1/completions", one)).status == 200
