"""`kv_transfer_params` of HTTP requests: who may send them, and what comes back."""

import json
from typing import Any, Final

import pytest

from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.gateway.api.transfer_params import TransferAccess, check_transfer_params
from longshore.deploy.gateway.api_keys import digest_of
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine

ASKS: Final = {"do_remote_decode": True}
PULLS: Final = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
ACCESS: Final = TransferAccess(digest_of(b"the key"), ("10.0.0.1",))
RIGHT: Final = [(b"x-other", b"a"), (b"x-longshore-router-key", b"the key")]


def check(
    params: dict[str, Any],
    access: TransferAccess = ACCESS,
    headers: Any = RIGHT,
    *,
    num_answers: int = 1,
    is_stream: bool = False,
) -> None:
    check_transfer_params(
        params, access, {"headers": headers}, num_answers=num_answers, is_stream=is_stream
    )


def test_a_router_with_the_key_may_transfer() -> None:
    check(ASKS)
    # As vLLM's routers send them.
    check({**ASKS, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None})
    check(PULLS)
    check(PULLS, is_stream=True)
    check_transfer_params(None, TransferAccess(), {"headers": []}, num_answers=9, is_stream=True)


@pytest.mark.parametrize(
    ("params", "settings", "reason"),
    [
        (ASKS, {"access": TransferAccess("digest")}, "needs engines that pull KV"),
        (ASKS, {"access": TransferAccess(hosts=("a",))}, "there is none (--router-key-file)"),
        (ASKS, {"headers": []}, "accepted from a router only"),
        (ASKS, {"headers": [(b"x-longshore-router-key", b"the kez")]}, "from a router only"),
        ({}, {}, "either do_remote_decode=true or do_remote_prefill=true"),
        ({**PULLS, **ASKS}, {}, "either do_remote_decode=true or do_remote_prefill=true"),
        ({"do_remote_decode": "yes"}, {}, "must be true or false"),
        ({"do_remote_prefill": True}, {}, "has remote_host=None, which is none of the hosts"),
        ({**PULLS, "remote_host": ["10.0.0.1"]}, {}, "which is none of the hosts"),
        ({**PULLS, "remote_host": "10.0.0.2"}, {}, "which is none of the hosts"),
        (ASKS, {"num_answers": 2}, "is for one answer, and the request asks for 2"),
        (ASKS, {"is_stream": True}, "remove stream=true"),
    ],
)
def test_others_and_other_values_are_rejected(
    params: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError) as raised:
        check(params, **settings)
    assert status_of(raised.value) == 400
    assert reason in str(raised.value)
    assert raised.value.param == "kv_transfer_params"


@pytest.mark.parametrize("is_chat", [False, True])
async def test_the_params_reach_the_engine_and_its_answer_returns(
    start_gateway: StartGateway, is_chat: bool
) -> None:
    offer = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}

    def script(engine: FakeEngine, request: AddRequest) -> None:
        engine.send_tokens(request, [5])
        end = FinishedRequest(
            request.handle, FinishReason.LENGTH_CAPPED, 1, kv_transfer_params=offer
        )
        engine.send(EngineOutputs(finished=(end,)))

    prompt: dict[str, Any] = {"prompt": [1, 2, 3]}
    if is_chat:
        prompt = {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({**prompt, "max_tokens": 1, "kv_transfer_params": ASKS}).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    async with start_gateway(script, transfers=ACCESS) as gateway:
        refused = await gateway.client.request("POST", path, body, timeout_s=PATIENCE_S)
        assert refused.status == 400
        headers = {"X-Longshore-Router-Key": "the key"}
        answer = await gateway.client.request(
            "POST", path, body, timeout_s=PATIENCE_S, headers=headers
        )
        assert json.loads(answer.body)["kv_transfer_params"] == offer
        (request,) = gateway.engine.requests
        assert request.options.kv_transfer_params == ASKS
