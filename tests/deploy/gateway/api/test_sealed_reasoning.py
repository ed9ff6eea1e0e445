"""Reasoning that clients keep sealed: a tool loop without a store keeps it, and its prompts."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.gateway.responses_api.test_responses import events_of
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

HEADER = "x-longshore-ignored-fields"
KEY = "5e" * 32
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content or '' }}|{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %};{% endfor %}"
)
ANSWER = '<think>Hm.</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
RESPONSES: dict[str, Any] = {
    "input": "hi",
    "tools": [{"type": "function", "name": "f"}],
    "store": False,
    "include": ["reasoning.encrypted_content"],
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "f", "input_schema": {}}],
}


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    file = tmp_path / "reasoning.jinja"
    file.write_text(TEMPLATE + "{# tools #}{{ '' if tools else '' }}")
    return {
        "chat_template": str(file),
        "reasoning_parser": "think",
        "tool_call_parser": "hermes",
        "runtime_dir": str(tmp_path),
        "reasoning_key": KEY,
    }


async def post(gateway: RunningGateway, path: str, body: dict[str, Any]) -> Any:
    answer = await gateway.post(path, body)
    assert answer.status == 200, answer.body
    return json.loads(answer.body), answer.headers.get(HEADER)


def prompt_of(gateway: RunningGateway) -> str:
    return byte_level_tokenizer().decode(gateway.engine.requests[-1].prompt_token_ids.tolist())


@given(reasoning=st.text(), other=st.text(max_size=40), place=st.integers(0))
def test_what_is_sealed_is_read_only_by_its_deployment(
    reasoning: str, other: str, place: int
) -> None:
    seal = ReasoningSeal(b"k" * 32)
    sealed = seal.seal(reasoning)
    assert seal.seal(reasoning) != sealed
    assert ReasoningSeal(b"k" * 32).open(sealed) == reasoning
    assert ReasoningSeal(b"o" * 32).open(sealed) is None
    assert ReasoningSeal().open(sealed) is None
    assert seal.open(other) is None
    data = bytearray(base64.b64decode(sealed))
    data[place % len(data)] ^= 1
    assert seal.open(base64.b64encode(data).decode()) is None


async def test_encrypted_content_of_a_response_is_taken_back(
    start_gateway: StartGateway, settings: Any
) -> None:
    async with start_gateway(say(ANSWER), **settings) as gateway:
        first, _ = await post(gateway, "/v1/responses", RESPONSES)
        reasoning, call = first["output"]
        assert ReasoningSeal(bytes.fromhex(KEY)).open(reasoning["encrypted_content"]) == "Hm."
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        user = {"role": "user", "content": "hi"}
        # As Codex sends it back, and as other clients do.
        for kept in (
            {**reasoning, "content": None, "summary": []},
            {"type": "reasoning", "encrypted_content": reasoning["encrypted_content"]},
            reasoning,
        ):
            second = {**RESPONSES, "input": [user, kept, call, result]}
            _, named = await post(gateway, "/v1/responses", second)
            assert (prompt_of(gateway), named) == ("u|hi;aHm.|[f];t|x;", None)


async def test_reasoning_is_sealed_only_if_that_is_asked_for(
    start_gateway: StartGateway, settings: Any
) -> None:
    body = {**RESPONSES, "include": ["web_search_call.results"]}
    async with start_gateway(say(ANSWER), **settings) as gateway:
        plain, named = await post(gateway, "/v1/responses", body)
        streamed = events_of(await gateway.post("/v1/responses", {**RESPONSES, "stream": True}))
    assert "encrypted_content" not in plain["output"][0]
    assert named == "include.web_search_call.results"
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    added = [event["item"] for event in streamed if event["type"] == "response.output_item.added"]
    assert done == streamed[-1]["response"]["output"]
    assert done[0]["encrypted_content"]
    assert "encrypted_content" not in added[0]


async def test_reasoning_of_another_server_is_left_out_and_named(
    start_gateway: StartGateway, settings: Any
) -> None:
    user = {"role": "user", "content": "hi"}
    foreign = ReasoningSeal().seal("secret")
    item = {"type": "reasoning", "summary": [], "encrypted_content": foreign}
    shown = {**item, "summary": [{"type": "summary_text", "text": "So."}]}
    blocks = [
        {"type": "thinking", "thinking": "", "signature": foreign},
        {"type": "redacted_thinking", "data": foreign},
        {"type": "text", "text": "ok"},
    ]
    async with start_gateway(say("x"), **settings) as gateway:
        body = {**RESPONSES, "input": [user, item, user]}
        assert (await post(gateway, "/v1/responses", body))[1] == "input[1].encrypted_content"
        assert prompt_of(gateway) == "u|hi;u|hi;"
        body = {**RESPONSES, "input": [user, shown, user]}
        assert (await post(gateway, "/v1/responses", body))[1] == "input[1].encrypted_content"
        assert prompt_of(gateway) == "u|hi;aSo.|;u|hi;"
        body = {**MESSAGES, "messages": [user, {"role": "assistant", "content": blocks}, user]}
        _, named = await post(gateway, "/v1/messages", body)
        assert named == "messages[1].content[0].signature, messages[1].content[1].data"
        assert prompt_of(gateway) == "u|hi;a|ok;u|hi;"


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
async def test_a_signature_of_anthropics_api_holds_the_reasoning(
    start_gateway: StartGateway, settings: Any, display: str | None
) -> None:
    body = {**MESSAGES, "thinking": {"type": "adaptive", "display": display}}
    async with start_gateway(say(ANSWER), **settings) as gateway:
        whole, _ = await post(gateway, "/v1/messages", body)
        answer = await gateway.post("/v1/messages", {**body, "stream": True})
        block, call = whole["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "x"}
        for thinking in (block, {**block, "thinking": ""}):
            turns = [
                *MESSAGES["messages"],
                {"role": "assistant", "content": [thinking, call]},
                {"role": "user", "content": [result]},
            ]
            await post(gateway, "/v1/messages", {**body, "messages": turns})
            assert prompt_of(gateway) == "u|hi;aHm.|[f];t|x;"
    events = [json.loads(event.rpartition(b"data: ")[2]) for _, event in answer.events]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert block["thinking"] == ("" if display == "omitted" else "Hm.")
    assert "".join(delta.get("thinking", "") for delta in deltas) == block["thinking"]
    (signed,) = [event for event in events if "signature" in event.get("delta", {})]
    assert events[events.index(signed) + 1] == {"type": "content_block_stop", "index": 0}
    assert ReasoningSeal(bytes.fromhex(KEY)).open(signed["delta"]["signature"]) == "Hm."
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
