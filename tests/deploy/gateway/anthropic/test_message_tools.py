"""Tools and reasoning in Anthropic's Messages API."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.protocol.outputs import FinishReason
from tests.deploy.gateway.anthropic.test_messages import BODY, error_of, events_of
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

LOOKUP = {
    "name": "lookup",
    "description": "Where",
    "input_schema": {"type": "object", "properties": {"id": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "lookup", "arguments": {"id": 5}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.description }};"
    "{% endfor %}{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
    "{{ m.reasoning_content or '' }}{{ m.tool_call_id or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.id }}{{ call.function.arguments.id }}"
    "</tool_call>{% endfor %};{% endfor %}"
)
ANSWER = f"<think>Hm.</think>Wait.\n{CALL}\n{CALL}"


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    file = tmp_path / "with_tools.jinja"
    file.write_text(TEMPLATE)
    return {"chat_template": str(file), "reasoning_parser": "think"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_reasoning_text_and_calls_are_blocks_in_order(
    start_gateway: StartGateway, settings: Any, is_stream: bool
) -> None:
    body = {**BODY, "max_tokens": 500, "tools": [LOOKUP], "stream": is_stream}
    async with start_gateway(say(ANSWER), **settings) as gateway:
        answer = await gateway.post("/v1/messages", body)
    assert answer.status == 200, answer.body
    if is_stream:
        content, stop_reason = assembled(events_of(answer))
    else:
        message = json.loads(answer.body)
        content, stop_reason = message["content"], message["stop_reason"]
    ids = [block.pop("id") for block in content if block["type"] == "tool_use"]
    assert content[0].pop("signature")
    assert content == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "name": "lookup", "input": {"id": 5}},
        {"type": "tool_use", "name": "lookup", "input": {"id": 5}},
    ]
    assert len(set(ids)) == 2
    assert stop_reason == "tool_use"


def assembled(events: list[tuple[str, dict[str, Any]]]) -> tuple[list[Any], str]:
    """The content and the stop reason of a stream, as clients put them together."""
    content: list[Any] = []
    arguments = ""
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(content)
            content.append(data["content_block"])
            arguments = ""
        elif name == "content_block_delta":
            assert data["index"] == len(content) - 1
            match data["delta"]:
                case {"type": "text_delta", "text": text}:
                    content[-1]["text"] += text
                case {"type": "thinking_delta", "thinking": text}:
                    content[-1]["thinking"] += text
                case {"type": "signature_delta", "signature": text}:
                    content[-1]["signature"] = text
                case {"type": "input_json_delta", "partial_json": text}:
                    arguments += text
        elif name == "content_block_stop" and arguments:
            content[-1]["input"] = json.loads(arguments)
    (stop_reason,) = [d["delta"]["stop_reason"] for name, d in events if name == "message_delta"]
    return content, stop_reason


async def test_one_call_and_no_reasoning_if_the_client_asks_for_that(
    start_gateway: StartGateway, settings: Any
) -> None:
    body = {
        **BODY,
        "max_tokens": 500,
        "tools": [LOOKUP],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
    }
    async with start_gateway(say(ANSWER), **settings) as gateway:
        answer = await gateway.post("/v1/messages", body)
    kinds = [block["type"] for block in json.loads(answer.body)["content"]]
    assert kinds == ["text", "tool_use"]


async def test_a_call_that_max_tokens_cuts_off_has_its_complete_arguments(
    start_gateway: StartGateway, settings: Any
) -> None:
    cut = '<tool_call>{"name": "lookup", "arguments": {"id": "C4, {", "tags": ["a"], "text": "b, c'
    async with start_gateway(say(cut, FinishReason.LENGTH_CAPPED), **settings) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "max_tokens": 3000, "tools": [LOOKUP]})
    message = json.loads(answer.body)
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "lookup")
    assert block["input"] == {"id": "C4, {", "tags": ["a"]}
    assert message["stop_reason"] != "tool_use"


async def test_a_call_that_is_broken_off_stays_text(
    start_gateway: StartGateway, settings: Any
) -> None:
    cut = '<tool_call>{"name": "lookup", "arguments": {"text": "' + "x" * 1500
    async with start_gateway(say(cut), **settings) as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "max_tokens": 3000, "tools": [LOOKUP]})
    message = json.loads(answer.body)
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "end_turn"


async def test_the_history_of_calls_reaches_the_template(
    start_gateway: StartGateway, settings: Any
) -> None:
    messages = [
        {"role": "user", "content": "A"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "B", "signature": ""},
                {"type": "text", "text": "C"},
                {"type": "tool_use", "id": "t1", "name": "lookup", "input": {"id": 7}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "D"}],
                    "is_error": False,
                },
                {"type": "text", "text": "E"},
            ],
        },
    ]
    body = {**BODY, "tools": [LOOKUP], "messages": messages}
    async with start_gateway(say("x"), **settings) as gateway:
        answer = await gateway.post("/v1/messages", body)
        assert answer.status == 200, answer.body
        prompt = byte_level_tokenizer().decode(gateway.engine.requests[0].prompt_token_ids.tolist())
        count = {key: value for key, value in body.items() if key != "max_tokens"}
        counted = await gateway.post("/v1/messages/count_tokens", count)
        num_tokens = len(gateway.engine.requests[0].prompt_token_ids)
    assert prompt.endswith("Where;uA;aCB<tool_call>t17</tool_call>;tDt1;uE;")
    assert json.loads(counted.body) == {"input_tokens": num_tokens}


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, '[{"name": "lookup", "parameters": {"id": 5}}]'),
        ({"type": "tool", "name": "lookup"}, '{"id": 5}'),
    ],
)
async def test_a_forced_call_is_a_block(
    start_gateway: StartGateway, settings: Any, choice: Any, text: str
) -> None:
    body = {**BODY, "max_tokens": 100, "tools": [LOOKUP], "tool_choice": choice}
    async with start_gateway(say(text), **settings) as gateway:
        answer = await gateway.post("/v1/messages", body)
        assert answer.status == 200, answer.body
        (asked,) = gateway.engine.requests
    message = json.loads(answer.body)
    assert asked.options.structured_output is not None
    (block,) = message["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"id": 5})
    assert message["stop_reason"] == "tool_use"


async def test_a_schema_of_the_output_constrains_the_answer(start_gateway: StartGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**BODY, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    async with start_gateway(say("{}")) as gateway:
        answer = await gateway.post("/v1/messages", body)
        assert answer.status == 200, answer.body
        assert gateway.engine.requests[0].options.structured_output is not None


async def test_a_template_without_tools_rejects_them(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post("/v1/messages", {**BODY, "tools": [LOOKUP]})
    assert answer.status == 400
    assert "tools" in error_of(answer)["message"]
