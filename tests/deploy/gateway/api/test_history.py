"""Conversations as agents send them back, in every dialect: what is odd in them does not end it."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.requests.chat_messages import arguments_object, template_input
from longshore.deploy.requests.chat_prompt import chat_prompt_options, render_chat
from longshore.deploy.requests.errors import RequestError
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.gateway.openai.test_chat_tools import request
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

HEADER = "x-longshore-ignored-fields"
# Fails for arguments that are no object, as most templates do.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    "{{ k[0] }}={{ v }},{% endfor %}{% endfor %};{% endfor %}{{ '' if tools else '' }}"
)
ODD: list[tuple[Any, str]] = [
    (None, ""),
    ("null", ""),
    ("not JSON", "a=not JSON,"),
    ("[1]", "a=[1],"),
    (5, "a=5,"),
    ([1], "a=[1],"),
]
EVEN: list[tuple[Any, str]] = [
    ("", ""),
    (" ", ""),
    ('{"id": 5}', "i=5,"),
    ({"id": 5}, "i=5,"),
]


def chats(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
    name = "messages[1].tool_calls[0].function.arguments"
    return "/v1/chat/completions", {"messages": messages}, name


def responses(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    return (
        "/v1/responses",
        {"input": [{"role": "user", "content": "u"}, call]},
        "input[1].arguments",
    )


def messages(arguments: Any) -> tuple[str, dict[str, Any], str]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    turns = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": "."},
    ]
    body = {"model": "tiny", "max_tokens": 9, "messages": turns}
    return "/v1/messages", body, "messages[1].content[0].input"


@pytest.mark.parametrize("dialect", [chats, responses, messages])
async def test_arguments_that_are_no_object_become_one_and_are_named(
    start_gateway: StartGateway, tmp_path: Path, dialect: Any
) -> None:
    file = tmp_path / "objects.jinja"
    file.write_text(TEMPLATE)
    settings = {"chat_template": str(file), "runtime_dir": str(tmp_path)}
    async with start_gateway(say("x"), **settings) as gateway:
        for arguments, expected in (*ODD, *EVEN):
            path, body, name = dialect(arguments)
            answer = await gateway.post(path, body)
            assert answer.status == 200, answer.body
            prompt = gateway.engine.requests[-1].prompt_token_ids.tolist()
            assert f"uu;a{expected};" in byte_level_tokenizer().decode(prompt)
            is_odd = (arguments, expected) in ODD
            assert answer.headers.get(HEADER) == (name if is_odd else None)


def test_an_object_is_itself_whatever_it_holds() -> None:
    for value in ({}, {"arguments": None}, {"a": [1.5, "é", None]}):
        assert arguments_object(value) == arguments_object(json.dumps(value)) == (value, True)


def test_results_of_tools_have_the_name_of_their_function() -> None:
    calls = [{"id": i, "function": {"name": n}} for i, n in (("1", "first"), ("2", "second"))]
    results = [{"role": "tool", "tool_call_id": i, "content": ""} for i in ("2", "1", "3")]
    results.append({**results[0], "name": "own"})
    history = request(messages=[{"role": "assistant", "tool_calls": calls}, *results]).messages
    _, *named = template_input(history)
    assert [message.get("name") for message in named] == ["second", "first", None, "own"]


def test_a_template_that_needs_all_fields_of_a_function_gets_them() -> None:
    def rendered(template: str, function: dict[str, Any]) -> str:
        asked = request(tools=[{"type": "function", "function": function}])
        form = chat_prompt_options(asked)
        return render_chat(ChatTemplate(template, {}), template_input(asked.messages), form)

    strict = (
        "{% for t in tools %}{% for p in t.function.parameters.properties.items() %}{% endfor %}"
        "{{ t.function.description | length }}{% endfor %}"
    )
    assert rendered(strict, {"name": "f"}) == "0"
    assert rendered(strict, {"name": "f", "description": None, "parameters": {}}) == "0"
    # Others get what the request says.
    assert rendered("{{ tools | tojson }}", {"name": "f"}) == (
        '[{"type": "function", "function": {"name": "f"}}]'
    )
    with pytest.raises(RequestError, match="rejects these messages: no"):
        rendered("{{ tools[0] }}{{ raise_exception('no') }}", {"name": "f"})


@pytest.mark.parametrize("kind", ["image", "input_audio", "document"])
async def test_parts_that_the_model_cannot_take_are_refused_by_name(
    start_gateway: StartGateway, kind: str
) -> None:
    content = [{"type": "text", "text": "x"}, {"type": kind}]
    turns = [{"role": "user", "content": content}]
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": turns}, "messages[0].content[1]"),
        ("/v1/responses", {"input": turns}, "input[0].content[1]"),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 9, "messages": turns},
            "messages.0.content.1",
        ),
    ]
    async with start_gateway() as gateway:
        for path, body, place in bodies:
            answer = await gateway.post(path, body)
            assert answer.status == 400
            message = json.loads(answer.body)["error"]["message"]
            assert place in message
            assert repr(kind) in message
