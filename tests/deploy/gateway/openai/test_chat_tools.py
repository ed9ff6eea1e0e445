"""Tools in chat completions: requests, prompts, answers and streams, with a scripted engine."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.gateway.api.requests import ChatRequest, parse_request
from longshore.deploy.gateway.openai.chat_deltas import ChatDeltas
from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.forced import ForcedCalls
from longshore.deploy.parsers.hermes import HermesTools
from longshore.deploy.parsers.mistral import MistralTools
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Events,
    Source,
    ToolParser,
    show_until,
)
from longshore.deploy.requests.chat_messages import template_input
from longshore.deploy.requests.chat_parsing import ChatParsing, ShownAnswer
from longshore.deploy.requests.chat_tools import tool_use
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.forced_calls import forced_schema
from longshore.protocol.outputs import FinishReason
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import chunks_of, error_of, ids_of, say
from tests.deploy.parsers.answers import joined

CHAT = [{"role": "user", "content": "?"}]
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/Place"}},
            "$defs": {"Place": {"type": "string"}},
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>{"name": "lookup", "arguments": {"id": 5}}</tool_call>'
TEMPLATE = (
    "{{ tools | length if tools else 0 }}"
    "{% for m in messages %}{{ m.role }}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.id }}</tool_call>"
    "{% endfor %}{% endfor %}"
)


def request(**parameters: Any) -> ChatRequest:
    return parse_request(ChatRequest, json.dumps({"messages": CHAT, **parameters}).encode())


def choice_of(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "with_tools.jinja"
    file.write_text(TEMPLATE)
    return str(file)


async def test_calls_and_reasoning_are_separate_from_the_text(
    start_gateway: StartGateway, template: str
) -> None:
    text = f"<think>Hm.</think>Wait.\n{CALL}\n{CALL}"
    settings: Any = {"chat_template": template, "reasoning_parser": "think"}
    async with start_gateway(say(text), **settings) as gateway:
        body: dict[str, Any] = {"messages": CHAT, "tools": [LOOKUP], "max_tokens": 500}
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        (choice,) = json.loads(answer.body)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] == "Wait."
        assert message["reasoning"] == message["reasoning_content"] == "Hm."
        one, other = message["tool_calls"]
        assert one["id"] != other["id"]
        assert one["type"] == "function"
        assert one["function"] == {"name": "lookup", "arguments": '{"id": 5}'}

        single = {**body, "parallel_tool_calls": False, "include_reasoning": False}
        (choice,) = json.loads((await gateway.post("/v1/chat/completions", single)).body)["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert "reasoning" not in choice["message"]

        for plain in ({**body, "tool_choice": "none"}, {**body, "tools": None}):
            answer = await gateway.post("/v1/chat/completions", plain)
            (choice,) = json.loads(answer.body)["choices"]
            assert choice["message"]["content"] == f"Wait.\n{CALL}\n{CALL}"
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "stop"


async def test_stream_has_the_deltas_of_the_whole_answer(
    start_gateway: StartGateway, template: str
) -> None:
    long = json.dumps({"id": 5, "text": "x" * 1500})
    called = CALL.replace('{"id": 5}', long)
    text = f"<think>Hm.</think>Wait.\n{CALL}{called}"
    settings: Any = {"chat_template": template, "reasoning_parser": "think"}
    async with start_gateway(say(text), **settings) as gateway:
        body = {"messages": CHAT, "tools": [LOOKUP], "max_tokens": 5000, "stream": True}
        answer = await gateway.post("/v1/chat/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks_of(answer)]
        deltas = [choice["delta"] for choice in choices]
        reasons = [choice["finish_reason"] for choice in choices]
        assert [reason for reason in reasons if reason] == ["tool_calls"]
        assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        firsts = [call for call in calls if "id" in call]
        assert [(c["index"], c["type"], c["function"]["name"]) for c in firsts] == [
            (0, "function", "lookup"),
            (1, "function", "lookup"),
        ]
        arguments = ["", ""]
        for call in calls:
            arguments[call["index"]] += call["function"]["arguments"]
        assert arguments == ['{"id": 5}', long]


def test_deltas_of_a_call_have_its_name_once_and_more_arguments() -> None:
    long = json.dumps({"text": "x" * 1500})
    text = CALL + CALL.replace('{"id": 5}', long)
    answer = ShownAnswer(ChatParsing(AnswerParsers(tools=HermesTools())))
    deltas = ChatDeltas(answer, names_call=False)
    calls: list[Any] = []
    for start in range(0, len(text), 100):
        delta = deltas.feed(text[start : start + 100])
        calls += (delta and delta.tool_calls) or ()
    assert deltas.feed("", "stop") is None
    assert [call.index for call in calls[:2]] == [0, 1]
    assert [call.function.name for call in calls[:2]] == ["lookup", "lookup"]
    assert all(call.id.startswith("call_") for call in calls[:2])
    assert len(calls) > 4
    for call in calls[2:]:
        assert (call.index, call.id, call.function.name) == (1, msgspec.UNSET, msgspec.UNSET)
    assert "".join(call.function.arguments for call in calls[1:]) == long
    assert deltas.finish_reason("stop") == "tool_calls"


class FailingTools(ToolParser):
    """Raises where calls would begin."""

    def parse(self, source: Source, context: AnswerContext) -> Events:
        yield from show_until(source, "<tool_call>")
        raise RuntimeError("no")


async def test_stream_goes_on_as_text_when_the_parser_raises(
    start_gateway: StartGateway, template: str
) -> None:
    settings: Any = {"chat_template": template, "tool_call_parser": f"{__name__}:FailingTools"}
    text = f"Wait. {CALL} More."
    async with start_gateway(say(text), **settings) as gateway:
        body = {"messages": CHAT, "tools": [LOOKUP], "max_tokens": 500, "stream": True}
        answer = await gateway.post("/v1/chat/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks_of(answer)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"


async def test_token_ids_and_echo_go_with_calls(start_gateway: StartGateway, template: str) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Wait. "}]
    body: dict[str, Any] = {"messages": messages, "tools": [LOOKUP], "max_tokens": 500}
    body |= {"echo": True, "return_token_ids": True}
    async with start_gateway(say(CALL), chat_template=template) as gateway:
        whole = json.loads((await gateway.post("/v1/chat/completions", body)).body)
        sent = gateway.engine.requests[0].prompt_token_ids.tolist()
        chunks = chunks_of(await gateway.post("/v1/chat/completions", body | {"stream": True}))
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait. "
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "lookup"
    assert choice["token_ids"][:-1] == ids_of(CALL)
    assert whole["prompt_token_ids"] == sent
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [i for each in choices for i in each.get("token_ids", [])] == choice["token_ids"]
    assert "".join(each["delta"].get("content", "") for each in choices) == "Wait. "
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_call_that_max_tokens_cuts_off_is_returned_as_far_as_it_has_come(
    start_gateway: StartGateway, template: str
) -> None:
    script = say(CALL[:-20], FinishReason.LENGTH_CAPPED)
    async with start_gateway(script, chat_template=template) as gateway:
        body: dict[str, Any] = {"messages": CHAT, "tools": [LOOKUP]}
        (choice,) = json.loads((await gateway.post("/v1/chat/completions", body)).body)["choices"]
        chunks = chunks_of(await gateway.post("/v1/chat/completions", body | {"stream": True}))
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "lookup"
    assert call["function"]["arguments"] in CALL
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "length"
    deltas = [one for each in chunks for one in each["choices"][0]["delta"].get("tool_calls", [])]
    arguments = "".join(one["function"]["arguments"] for one in deltas)
    assert arguments == call["function"]["arguments"]


async def test_tools_and_calls_of_the_history_are_in_the_prompt(
    start_gateway: StartGateway, template: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"id": 5}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "!"},
    ]
    body = {"messages": messages, "tools": [LOOKUP, NOW], "return_token_strs": True}
    async with start_gateway(chat_template=template) as gateway:
        answer = json.loads((await gateway.post("/tokenize", body)).body)
        assert "".join(answer["token_strs"]) == "2user?assistant<tool_call>5</tool_call>tool!"


@pytest.mark.parametrize(
    ("settings", "body", "param"),
    [
        ({}, {"tools": [NOW]}, "tools"),
        ({"tool_call_parser": "hermes"}, {"tools": [NOW]}, "tools"),
        (
            {},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages",
        ),
    ],
)
async def test_what_the_template_or_the_parser_would_drop_is_rejected(
    start_gateway: StartGateway, settings: dict[str, Any], body: dict[str, Any], param: str
) -> None:
    async with start_gateway(**settings) as gateway:
        answer = await gateway.post("/v1/chat/completions", {"messages": CHAT, **body})
        assert answer.status == 400
        assert error_of(answer)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", ["none", "hermes"])
@pytest.mark.parametrize(
    ("choice", "text", "reason"),
    [
        ("required", '[{"name": "now", "parameters": {"zone": 5}}]', "tool_calls"),
        (choice_of("now"), '{"zone": 5}', "stop"),
    ],
)
async def test_forced_call_has_a_schema_and_is_read(
    start_gateway: StartGateway,
    template: str,
    choice: Any,
    text: str,
    reason: str,
    parser: str,
    stream: bool,
) -> None:
    settings: Any = {"chat_template": template, "tool_call_parser": parser}
    async with start_gateway(say(text), reasoning_parser="think", **settings) as gateway:
        body = {
            "messages": CHAT,
            "tools": [NOW],
            "tool_choice": choice,
            "max_tokens": 500,
            "stream": stream,
            "response_format": {"type": "json_object"},
        }
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        (sent,) = gateway.engine.requests
        assert sent.options.structured_output is not None
        assert sent.options.structured_output.kind == "json_schema"
        chat = request(tools=[NOW], tool_choice=choice)
        schema = json.loads(sent.options.structured_output.text)
        assert schema == forced_schema([NOW], tool_use(chat))
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(answer)]
            messages = [choice["delta"] for choice in choices]
        else:
            choices = json.loads(answer.body)["choices"]
            messages = [choice["message"] for choice in choices]
        assert choices[-1]["finish_reason"] == reason
        assert not any(message.get("content") for message in messages)
        (call,) = [call for message in messages for call in message.get("tool_calls", ())]
        assert call["function"] == {"name": "now", "arguments": '{"zone": 5}'}


async def test_constrained_answer_is_text_whatever_it_looks_like(
    start_gateway: StartGateway, template: str
) -> None:
    settings: Any = {"chat_template": template, "reasoning_parser": "think"}
    async with start_gateway(say(CALL), **settings) as gateway:
        body = {"messages": CHAT, "tools": [LOOKUP], "guided_regex": "<.*", "max_tokens": 500}
        (choice,) = json.loads((await gateway.post("/v1/chat/completions", body)).body)["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"tools": [{**NOW, "function": {**NOW["function"], "parameters": {"type": 5}}}]}, None),
    ],
)
async def test_what_a_forced_call_excludes_is_rejected(
    start_gateway: StartGateway, template: str, parameters: dict[str, Any], param: str | None
) -> None:
    async with start_gateway(chat_template=template) as gateway:
        body = {"messages": CHAT, "tools": [NOW], "tool_choice": "required", **parameters}
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status == 400
        assert error_of(answer)["param"] == (param or "tool_choice")
        if param is None:
            assert "/items/anyOf/0/properties/parameters/type" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"tools": [{"function": NOW["function"]}]}, "supported are function and custom"),
        ({"tools": [{"type": "function", "function": 5}]}, "must be an object"),
        ({"tools": [{"type": "function", "function": {}}]}, "name must be"),
        ({"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "name must be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [5]}}]}, "schema"),
        ({"tools": [NOW] * 1025}, "at most 1024"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [NOW], "tool_choice": "any"}, "must be"),
        ({"tools": [NOW], "tool_choice": {"type": "custom"}}, "must be"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "not in tools",
        ),
    ],
)
def test_invalid_tools_are_rejected_by_name(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        tool_use(request(**parameters))
    assert caught.value.param in parameters


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("now", '{"a": 1}', [("now", '{"a": 1}')]),
        (None, '[{"name": "now", "parameters": {}}]', [("now", "{}")]),
    ],
)
def test_forced_calls_are_read(name: str | None, text: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        parser = ForcedCalls(name, MistralTools())
        answer = ParsedAnswer(AnswerParsers(tools=parser), AnswerContext())
        assert joined(answer, pieces) == ("", "", calls, True)
        assert len(parser.call_id()) == 9


def test_reasoning_and_calls_of_messages_reach_the_template() -> None:
    call = {"function": {"name": "f", "arguments": " "}}
    messages = request(
        messages=[
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
            {"role": "assistant", "content": "B42", "reasoning_content": "Hm."},
        ]
    ).messages
    called, answered = template_input(messages)
    assert called == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        "reasoning": "Hm.",
        "reasoning_content": "Hm.",
        "thinking": "Hm.",
    }
    assert answered["reasoning_content"] == "Hm."
    assert "thinking" not in answered
