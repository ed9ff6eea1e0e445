"""Tools and reasoning in OpenAI's Responses API."""

from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.api.unknown_fields import begin_request
from longshore.deploy.gateway.responses_api.tools import chat_tool_choice, chat_tools
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.outputs import FinishReason
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.gateway.responses_api.test_responses import create, events_of, get
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

LOOKUP = {
    "type": "function",
    "name": "lookup",
    "description": "Where",
    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "lookup", "arguments": {"id": 5}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.description }};{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{{ (m.tool_call_id or '')[:4] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.id }}</tool_call>"
    "{% endfor %};{% endfor %}"
)
ANSWER = f"<think>Hm.</think>Wait.\n{CALL}\n{CALL}"
TEXT = {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
CALLED = {
    "type": "function_call",
    "status": "completed",
    "name": "lookup",
    "arguments": '{"id": 5}',
}
OUTPUT = [
    {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {"type": "message", "status": "completed", "role": "assistant", "content": [TEXT]},
    CALLED,
    CALLED,
]


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    file = tmp_path / "with_tools.jinja"
    file.write_text(TEMPLATE)
    return {
        "chat_template": str(file),
        "reasoning_parser": "think",
        "runtime_dir": str(tmp_path),
    }


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


async def test_reasoning_text_and_calls_are_items(
    start_gateway: StartGateway, settings: Any
) -> None:
    async with start_gateway(say(ANSWER), **settings) as gateway:
        response = await create(gateway, tools=[LOOKUP])
        assert await get(gateway, response["id"]) == response
    assert without_ids(response["output"]) == OUTPUT
    ids = [item["id"] for item in response["output"]]
    assert [item_id.split("_")[0] for item_id in ids] == ["rs", "msg", "fc", "fc"]
    assert response["tools"] == [LOOKUP]
    assert (response["tool_choice"], response["parallel_tool_calls"]) == ("auto", True)


async def test_a_stream_has_the_events_of_every_item(
    start_gateway: StartGateway, settings: Any
) -> None:
    body = {"input": "hi", "tools": [LOOKUP], "stream": True}
    async with start_gateway(say(ANSWER), **settings) as gateway:
        events = events_of(await gateway.post("/v1/responses", body))
    names: list[str] = []
    for event in events:
        if not names or event["type"] != names[-1]:
            names.append(event["type"].removeprefix("response."))
    names = [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    item = ["output_item.added", "...", "output_item.done"]
    expected = ["created", "in_progress"]
    for middle in (
        [p.format("reasoning_text") for p in part],
        [p.format("output_text") for p in part],
        call,
        call,
    ):
        expected += [item[0], *middle, item[2]]
    assert names == [*expected, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert all(event["item"]["status"] == "in_progress" for event in added)
    assert [event["item"]["id"] for event in done] == [event["item"]["id"] for event in added]
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    assert without_ids(events[-1]["response"]["output"]) == OUTPUT
    begun = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert [part["text"] for part in begun] == ["", ""]


async def test_a_conversation_with_calls_is_continued(
    start_gateway: StartGateway, settings: Any
) -> None:
    text = f"<think>B</think>C{CALL}"
    async with start_gateway(say(text), **settings) as gateway:
        first = await create(gateway, input="A", tools=[LOOKUP])
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "D"}
        await create(gateway, input=[result], previous_response_id=first["id"], tools=[LOOKUP])
        history = [{"role": "user", "content": "A"}, *first["output"], result]
        second = await create(gateway, input=history, tools=[LOOKUP])
        items = await get(gateway, f"{second['id']}/input_items?order=asc")
        _, continued, sent = (
            byte_level_tokenizer().decode(asked.prompt_token_ids.tolist())
            for asked in gateway.engine.requests
        )
    expected = "Where;uA;aCB<tool_call>5</tool_call>;tDcall;"
    assert continued.endswith(expected)
    assert sent.endswith(expected)
    kinds = [item["type"] for item in items["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]


async def test_a_call_that_is_cut_off_is_incomplete(
    start_gateway: StartGateway, settings: Any
) -> None:
    cut = '<tool_call>{"name": "lookup", "arguments": {"text": "' + "x" * 1500
    async with start_gateway(say(cut, FinishReason.LENGTH_CAPPED), **settings) as gateway:
        response = await create(gateway, tools=[LOOKUP])
    (call,) = response["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    assert call["arguments"].startswith('{"text": "xxx')
    assert response["status"] == "incomplete"


async def test_a_forced_call_and_a_format_constrain_the_answer(
    start_gateway: StartGateway, settings: Any
) -> None:
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    async with start_gateway(say('{"id": 5}'), **settings) as gateway:
        choice = {"type": "function", "name": "lookup"}
        forced = await create(gateway, tools=[LOOKUP], tool_choice=choice)
        formed = await create(gateway, text={"format": form})
        assert all(asked.options.structured_output is not None for asked in gateway.engine.requests)
    assert forced["output"][0]["arguments"] == '{"id": 5}'
    assert forced["tool_choice"] == choice
    assert formed["output"][0]["content"][0]["text"] == '{"id": 5}'
    assert formed["text"]["format"]["schema"] == schema


def test_unknown_fields_of_tools_and_choices_are_ignored_and_named() -> None:
    choice = {"type": "function", "name": "lookup"}

    def read(*, is_strict: bool, **spare: object) -> Any:
        fields = begin_request(is_strict=is_strict)
        tools = chat_tools([LOOKUP, {**LOOKUP, "name": "other", **spare}])
        return tools, chat_tool_choice({**choice, **spare}), fields.names

    plain = copy_context().run(read, is_strict=False)
    with_spare = copy_context().run(read, is_strict=False, defer_loading=True)
    assert with_spare[:2] == plain[:2]
    assert (plain[2], with_spare[2]) == (
        [],
        ["tools[1].defer_loading", "tool_choice.defer_loading"],
    )
    with pytest.raises(RequestError, match=r"tools\[1\]\.defer_loading"):
        copy_context().run(read, is_strict=True, defer_loading=True)
