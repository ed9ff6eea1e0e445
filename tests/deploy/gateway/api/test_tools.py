"""Tools that are no functions: those that a server runs, and custom ones, in every dialect."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from longshore.deploy.requests.chat_tools import as_functions, custom_arguments, custom_input
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import FreeText
from tests.deploy.gateway.api.test_thinking_budget import tagged
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.http.test_exchange import chunks_of, error_of, say
from tests.deploy.gateway.responses_api.test_responses import events_of
from tests.deploy.tiny_tokenizer import byte_level_tokenizer, save_tokenizer

HEADER = "x-longshore-ignored-fields"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": HI},
    "/tokenize": {"messages": HI},
    RESPONSES: {"input": HI},
    MESSAGES: {"model": "tiny", "max_tokens": 99, "messages": HI},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HI},
}
OWN: dict[str, dict[str, Any]] = {
    CHATS: {"type": "function", "function": {"name": "own"}},
    "/tokenize": {"type": "function", "function": {"name": "own"}},
    RESPONSES: {"type": "function", "name": "own"},
    MESSAGES: {"name": "own", "input_schema": {}},
    "/v1/messages/count_tokens": {"name": "own", "input_schema": {}},
}
SERVERS = ("web_search", "namespace", "code_interpreter", "mcp", "tool_search")
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}:{{ c.function.arguments.input }}]"
    "{% endfor %};{% endfor %}"
)
PATCH = '+ "é"\\ 🚢\n'
CALL = "<tool_call>" + json.dumps({"name": "patch", "arguments": {"input": PATCH}}) + "</tool_call>"
LARK = {"syntax": "lark", "definition": 'start: "+" /(.|\\n)*/'}
CUSTOM = {"name": "patch", "description": "Edits.", "format": {"type": "grammar", **LARK}}
OF_RESPONSES = {"type": "custom", **CUSTOM}
OF_CHATS = {
    "type": "custom",
    "custom": {**CUSTOM, "format": {"type": "grammar", "grammar": LARK}},
}


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    file = tmp_path / "tools.jinja"
    file.write_text(TEMPLATE)
    return {
        "chat_template": str(file),
        "runtime_dir": str(tmp_path),
        "tool_call_parser": "hermes",
        "max_body_bytes": 1 << 16,
    }


def test_the_model_sees_a_custom_tool_with_its_grammar() -> None:
    (tool,) = as_functions([OF_CHATS])
    function = tool["function"]
    assert function["name"] == "patch"
    assert function["description"].startswith("Edits.\n\nThe input matches this lark grammar:\n")
    assert function["description"].endswith(LARK["definition"])
    assert function["parameters"]["required"] == ["input"]
    (plain,) = as_functions([{"type": "custom", "custom": {"name": "p", "format": None}}])
    assert "description" not in plain["function"]
    assert as_functions([OWN[CHATS]]) == [OWN[CHATS]]


def prompt_of(gateway: RunningGateway) -> str:
    return byte_level_tokenizer().decode(gateway.engine.requests[-1].prompt_token_ids.tolist())


async def test_tools_of_servers_are_left_out_and_named(
    start_gateway: StartGateway, settings: Any
) -> None:
    async with start_gateway(say("x"), **settings) as gateway:
        for path, body in BODIES.items():
            servers = [{"type": kind, "name": "x"} for kind in SERVERS]
            for tools in ([*servers, OWN[path]], servers):
                answer = await gateway.post(path, {**body, "tools": tools})
                assert answer.status == 200, answer.body
                named = answer.headers[HEADER].split(", ")
                assert named == [f"tools.{kind}" for kind in SERVERS]
                if path in (CHATS, RESPONSES, MESSAGES):
                    assert ("<own>" in prompt_of(gateway)) == (tools != servers)
                    assert "<x>" not in prompt_of(gateway)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (
            {"type": "function", "function": {"name": "own", "x": 1}, "y": 1},
            "tool_choice.y, tool_choice.function.x",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "own"}}],
                    "x": 1,
                },
            },
            "tool_choice.allowed_tools.x",
        ),
    ],
)
async def test_unknown_fields_of_a_choice_are_named(
    start_gateway: StartGateway, settings: Any, choice: dict[str, Any], names: str
) -> None:
    tool = {"type": "function", "function": {"name": "own"}}
    async with start_gateway(say("x"), **settings) as gateway:
        body = {"messages": HI, "tools": [tool], "tool_choice": choice}
        answer = await gateway.post(CHATS, body)
    assert answer.status == 200, answer.body
    assert answer.headers[HEADER] == names


OF_FUNCTION = {"parameters": {"type": "object", "x": 1}, "name": "own", "cache_control": {}}
IN_HISTORY = {"function": {"arguments": "{}", "name": "own", "x": 1}, "id": "c", "index": 0, "y": 1}


@pytest.mark.parametrize("path", [*BODIES, "/api/chat"])
async def test_unknown_fields_of_tools_and_of_calls_in_the_history_are_named_and_not_shown(
    start_gateway: StartGateway, settings: Any, tmp_path: Path, path: str
) -> None:
    (tmp_path / "tools.jinja").write_text(
        "{% for t in tools %}{{ t | join(',') }}:{{ t.function | join(',') }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %};{{ c.function | join(',') }}{% endfor %}{% endfor %}"
    )
    if path in (CHATS, "/tokenize", "/api/chat"):
        tool = {"function": OF_FUNCTION, "type": "function", "defer_loading": True}
        call = {"role": "assistant", "content": "", "tool_calls": [IN_HISTORY]}
        body = {"messages": [*HI, call], "tools": [tool], "model": "tiny", "stream": False}
        if path == "/tokenize":
            del body["stream"]
        names = ["tools[0].defer_loading", "tools[0].function.cache_control"]
        names += ["messages[1].tool_calls[0].function.x", "messages[1].tool_calls[0].y"]
    elif path == RESPONSES:
        items = [
            {"type": "function_call", "name": "own", "call_id": "c", "arguments": "{}", "x": 1}
        ]
        body = {"input": [*HI, *items], "tools": [{**OF_FUNCTION, "type": "function"}]}
        names = ["tools[0].cache_control", "input[1].x"]
    else:
        use = {"type": "tool_use", "id": "c", "name": "own", "input": {}, "x": 1}
        turn = {"role": "assistant", "content": [use]}
        tool = {"name": "own", "input_schema": OF_FUNCTION["parameters"], "x": 1}
        body = {**BODIES[path], "messages": [*HI, turn], "tools": [tool]}
        names = ["tools[0].x", "messages[1].content[0].x"]
    async with start_gateway(say("x"), **settings) as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 200, answer.body
        assert sorted(answer.headers[HEADER].split(", ")) == sorted(names)
        if path in (CHATS, "/api/chat"):  # in the order of the request
            assert prompt_of(gateway) == "function,type:parameters,namehi;name,arguments"
    async with start_gateway(say("x"), strict_requests=True, **settings) as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 400
        assert any(name.encode() in answer.body for name in names)


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_choice_of_one_is_refused(
    start_gateway: StartGateway, settings: Any, path: str, kind: str
) -> None:
    body = {**BODIES[path], "tools": [OWN[path], {"type": kind}], "tool_choice": {"type": kind}}
    async with start_gateway(say("x"), **settings) as gateway:
        answer = await gateway.post(path, body)
        assert answer.status == 400
        error = error_of(answer)
        assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
        assert kind in error["message"]
        required = {**body, "tools": [{"type": kind}], "tool_choice": "required"}
        assert error_of(await gateway.post(path, required))["param"] == "tool_choice"
        assert gateway.engine.requests == []


async def test_a_custom_tool_is_called_with_a_text_in_chats(
    start_gateway: StartGateway, settings: Any
) -> None:
    body = {**BODIES[CHATS], "tools": [OF_CHATS]}
    async with start_gateway(say(f"Ok.{CALL}"), **settings) as gateway:
        (choice,) = json.loads((await gateway.post(CHATS, body)).body)["choices"]
        chunks = chunks_of(await gateway.post(CHATS, {**body, "stream": True}))
        assert "<patch>" in prompt_of(gateway)
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        history = {**body, "messages": [*HI, choice["message"], result]}
        assert (await gateway.post(CHATS, history)).status == 200
        assert f"aOk.[patch:{PATCH}];tdone;" in prompt_of(gateway)
    assert call == {
        "id": call["id"],
        "type": "custom",
        "custom": {"name": "patch", "input": PATCH},
    }
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    ((streamed,),) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert streamed == {**call, "index": 0, "id": streamed["id"]}


async def test_a_custom_tool_is_called_with_a_text_in_responses(
    start_gateway: StartGateway, settings: Any
) -> None:
    body = {**BODIES[RESPONSES], "tools": [OF_RESPONSES, OWN[RESPONSES]]}
    async with start_gateway(say(f"Ok.{CALL}"), **settings) as gateway:
        response = json.loads((await gateway.post(RESPONSES, body)).body)
        events = events_of(await gateway.post(RESPONSES, {**body, "stream": True}))
        call = response["output"][-1]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        for history in (
            {"input": [result], "previous_response_id": response["id"]},
            {"input": [*HI, *response["output"], result]},
        ):
            answer = await gateway.post(RESPONSES, {**body, **history})
            assert answer.status == 200, answer.body
            assert f"uhi;aOk.[patch:{PATCH}];tdone;" in prompt_of(gateway)
    assert call["id"].startswith("ctc_")
    del call["id"], call["call_id"]
    assert call == {
        "type": "custom_tool_call",
        "status": "completed",
        "name": "patch",
        "input": PATCH,
    }
    kind = "response.custom_tool_call_input"
    assert [e["delta"] for e in events if e["type"] == f"{kind}.delta"] == [PATCH]
    assert [e["input"] for e in events if e["type"] == f"{kind}.done"] == [PATCH]


@pytest.mark.parametrize("syntax", ["lark", "regex", None])
async def test_a_choice_of_a_custom_tool_constrains_its_input(
    start_gateway: StartGateway, settings: Any, syntax: str | None
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": "start: /a+/"}
    tool = {**OF_RESPONSES, "format": form if syntax else {"type": "text"}}
    choice = {"type": "custom", "name": "patch"}
    text = "aa" if syntax else '{"input": "aa"}'
    body = {**BODIES[RESPONSES], "tools": [tool], "tool_choice": choice}
    async with start_gateway(say(text), **settings) as gateway:
        answer = await gateway.post(RESPONSES, body)
        assert answer.status == 200, answer.body
        constraint = gateway.engine.requests[-1].options.structured_output
    (call,) = json.loads(answer.body)["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "aa")
    assert constraint is not None
    assert ("/a+/" in str(constraint)) == bool(syntax)
    assert ("properties" in str(constraint)) == (syntax is None)


async def test_an_input_that_is_cut_off_is_the_beginning_of_it(
    start_gateway: StartGateway, settings: Any
) -> None:
    cut = CALL[: CALL.index("\\n")]
    body = {**BODIES[RESPONSES], "tools": [OF_RESPONSES]}
    script = say(cut + "x" * 1500, FinishReason.LENGTH_CAPPED)
    async with start_gateway(script, **settings) as gateway:
        response = json.loads((await gateway.post(RESPONSES, body)).body)
    (call,) = response["output"]
    assert (call["type"], call["status"]) == ("custom_tool_call", "incomplete")
    assert call["input"].startswith('+ "é"\\ 🚢xxx')


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "custom"}, "tools[0]"),
        ({"type": "custom", "name": ""}, "name"),
        ({"type": "custom", "name": "p", "format": {"type": "xml"}}, "xml"),
        ({"type": "custom", "name": "p", "format": {"type": "grammar"}}, "tools[0].custom"),
        (
            {
                "type": "custom",
                "name": "p",
                "format": {"type": "grammar", "syntax": "abnf", "definition": ""},
            },
            "abnf",
        ),
        ({"name": "p"}, "type"),
    ],
)
async def test_a_custom_tool_that_is_not_valid_is_rejected(
    start_gateway: StartGateway, settings: Any, tool: dict[str, Any], words: str
) -> None:
    async with start_gateway(say("x"), **settings) as gateway:
        answer = await gateway.post(RESPONSES, {**BODIES[RESPONSES], "tools": [tool]})
        assert answer.status == 400
        assert error_of(answer)["param"] == "tools"
        assert words in error_of(answer)["message"]


@given(text=st.text(), end=st.integers(0, 300))
def test_any_beginning_of_a_calls_arguments_is_a_beginning_of_its_input(
    text: str, end: int
) -> None:
    for arguments in (custom_arguments(text), json.dumps({"input": text})):
        assert custom_input(arguments) == text
        cut = arguments[: len('{"input": "') + end]
        assert text.startswith(custom_input(cut).removesuffix("�"))


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', "[1]", "null", "plain", '{"input": 5}'])
def test_other_arguments_are_the_input_as_they_are(arguments: str) -> None:
    assert custom_input(arguments) == arguments


STRICT: dict[str, Any] = {"name": "own", "strict": True}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"id": {"type": "integer"}}}
STRICT_TOOLS: dict[str, dict[str, Any]] = {
    CHATS: {"type": "function", "function": {**STRICT, "parameters": SCHEMA}},
    RESPONSES: {"type": "function", **STRICT, "parameters": SCHEMA},
    MESSAGES: {**STRICT, "input_schema": SCHEMA},
}


def save_with_marker(folder: Path) -> int:
    """A tokenizer to which the marker of calls is one token. Returns its id."""
    save_tokenizer(folder)
    tokenizer = tagged("<tool_call>")
    tokenizer.save(str(folder / "tokenizer.json"))
    marker: int = tokenizer.token_to_id("<tool_call>")
    return marker


async def test_calls_of_strict_functions_follow_the_schema_from_their_marker_on(
    start_gateway: StartGateway, settings: Any, tmp_path: Path
) -> None:
    marker = save_with_marker(tmp_path)
    async with start_gateway(say("x"), tokenizer=False, **settings) as gateway:
        for path, tool in STRICT_TOOLS.items():
            answer = await gateway.post(path, {**BODIES[path], "tools": [OWN[path], tool]})
            assert answer.status == 200, answer.body
            assert HEADER not in answer.headers
            sent = gateway.engine.requests[-1].options.structured_output
            assert sent is not None
            assert (sent.kind, sent.free) == (
                "tool_calls",
                FreeText(((marker,),), repeats=True),
            )
            assert '"id":{"type":"integer"}' in sent.text.replace(": ", ":")
            assert '"additionalProperties":false' in sent.text.replace(": ", ":")
            answer = await gateway.post(path, {**BODIES[path], "tools": [OWN[path]]})
            assert gateway.engine.requests[-1].options.structured_output is None


async def test_calls_of_gpt_oss_follow_the_schema_from_their_recipient_on(
    start_gateway: StartGateway, settings: Any, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    tokenizer = byte_level_tokenizer()
    tags = ("<|start|>", "<|channel|>", "<|message|>")
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings["tool_call_parser"] = "harmony"
    async with start_gateway(say("x"), tokenizer=False, **settings) as gateway:
        answer = await gateway.post(CHATS, {**BODIES[CHATS], "tools": [STRICT_TOOLS[CHATS]]})
        assert HEADER not in answer.headers
        sent = gateway.engine.requests[-1].options.structured_output
    assert sent is not None
    assert sent.free is not None
    marks = [tokenizer.decode(mark, skip_special_tokens=False) for mark in sent.free.marks]
    assert marks == ["<|start|>assistant to=functions", "<|channel|>commentary to=functions"]
    assert f"<[{tokenizer.token_to_id('<|message|>')}]>" in sent.text


@pytest.mark.parametrize("choice", ["auto", {"type": "allowed_tools"}])
async def test_answers_of_llama_are_constrained_from_their_beginning_on(
    start_gateway: StartGateway, settings: Any, choice: Any
) -> None:
    """No token marks its calls."""
    settings["tool_call_parser"] = "llama"
    tools = [STRICT_TOOLS[CHATS]]
    if choice != "auto":
        tools = [OWN[CHATS], {"type": "function", "function": {"name": "other"}}]
        choice = allowed(CHATS, "auto", "own")
    async with start_gateway(say("x"), **settings) as gateway:
        body = {**BODIES[CHATS], "tools": tools, "tool_choice": choice}
        answer = await gateway.post(CHATS, body)
        assert answer.status == 200, answer.body
        assert HEADER not in answer.headers
        sent = gateway.engine.requests[-1].options.structured_output
    assert sent is not None
    assert (sent.kind, sent.free) == ("tool_calls", None)
    assert '"own"' in sent.text.replace("\\", "")
    assert "other" not in sent.text


@pytest.mark.parametrize("parser", ["hermes", "glm45", "gemma4", "llama"])
@pytest.mark.parametrize("flaw", [{"properties": [1]}, {"required": 5}, {"anyOf": {}}])
async def test_a_strict_function_needs_a_valid_schema(
    start_gateway: StartGateway, settings: Any, parser: str, flaw: dict[str, Any]
) -> None:
    settings["tool_call_parser"] = parser
    tool = {"type": "function", "function": {**STRICT, "parameters": flaw}}
    async with start_gateway(say("x"), **settings) as gateway:
        error = error_of(await gateway.post(CHATS, {**BODIES[CHATS], "tools": [tool]}))
    assert error["param"] == "tools"
    assert f"/{next(iter(flaw))}" in error["message"]


async def test_strict_functions_are_named_if_no_token_marks_their_calls(
    start_gateway: StartGateway, settings: Any
) -> None:
    async with start_gateway(say("x"), **settings) as gateway:
        for path, tool in STRICT_TOOLS.items():
            answer = await gateway.post(path, {**BODIES[path], "tools": [tool]})
            assert answer.status == 200, answer.body
            assert answer.headers[HEADER] == "tools[0].strict"
            assert gateway.engine.requests[-1].options.structured_output is None


@pytest.mark.parametrize("parser", ["hermes", "glm45"])
@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_the_model_s_own_call_of_a_custom_tool_follows_its_grammar(
    start_gateway: StartGateway, settings: Any, tmp_path: Path, parser: str, syntax: str
) -> None:
    """Where calls are JSON, a Lark grammar is no grammar of the JSON text."""
    save_with_marker(tmp_path)
    form = {"type": "grammar", "syntax": syntax, "definition": "[ab]+"}
    body = {**BODIES[RESPONSES], "tools": [{**OF_RESPONSES, "format": form}]}
    settings["tool_call_parser"] = parser
    async with start_gateway(say("x"), tokenizer=False, **settings) as gateway:
        answer = await gateway.post(RESPONSES, body)
        assert answer.status == 200, answer.body
        sent = gateway.engine.requests[-1].options.structured_output
    is_possible = (parser, syntax) != ("hermes", "lark")
    assert (sent is not None) == is_possible
    assert answer.headers.get(HEADER) == (None if is_possible else "tools[0].format")
    assert sent is None or "[ab]+" in sent.text


def allowed(path: str, mode: str, *names: str) -> dict[str, Any]:
    if path == RESPONSES:
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
async def test_only_allowed_tools_can_be_called_but_the_prompt_has_all(
    start_gateway: StartGateway, settings: Any, tmp_path: Path, path: str
) -> None:
    save_with_marker(tmp_path)
    other = json.loads(json.dumps(OWN[path]).replace("own", "other"))
    body = {**BODIES[path], "tools": [OWN[path], other]}
    text = '[{"name": "other", "parameters": {}}]'
    async with start_gateway(say(text), tokenizer=False, **settings) as gateway:
        for mode in ("auto", "required"):
            asked = {**body, "tool_choice": allowed(path, mode, "other")}
            answer = await gateway.post(path, asked)
            assert answer.status == 200, answer.body
            assert "<own><other>" in prompt_of(gateway)
            sent = gateway.engine.requests[-1].options.structured_output
            assert sent is not None
            assert sent.kind == ("tool_calls" if mode == "auto" else "json_schema")
            assert "other" in sent.text
            assert "own" not in sent.text
            has_call = any(name in answer.body for name in (b'"call_id"', b'"tool_calls"'))
            assert has_call == (mode == "required")
        both = {**body, "tool_choice": allowed(path, "auto", "own", "other")}
        assert (await gateway.post(path, both)).status == 200
        assert gateway.engine.requests[-1].options.structured_output is None
        for choice in (
            allowed(path, "auto", "missing"),
            allowed(path, "none", "own"),
            allowed(path, "auto"),
            {"type": "allowed_tools"},
        ):
            error = error_of(await gateway.post(path, {**body, "tool_choice": choice}))
            assert error["param"] == "tool_choice"


async def test_allowed_tools_are_refused_if_no_token_marks_calls(
    start_gateway: StartGateway, settings: Any
) -> None:
    other = json.loads(json.dumps(OWN[CHATS]).replace("own", "other"))
    choice = allowed(CHATS, "auto", "own")
    body = {**BODIES[CHATS], "tools": [OWN[CHATS], other], "tool_choice": choice}
    async with start_gateway(say("x"), **settings) as gateway:
        error = error_of(await gateway.post(CHATS, body))
    assert error["param"] == "tool_choice"
    assert "token of their own" in error["message"]


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
async def test_required_calls_have_a_limit_in_every_dialect(
    start_gateway: StartGateway, settings: Any, path: str
) -> None:
    any_tool: Any = {"type": "any"} if path == MESSAGES else "required"
    one: dict[str, Any] = {"parallel_tool_calls": False}
    if path == MESSAGES:
        one = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    body = {**BODIES[path], "tools": [OWN[path]], "tool_choice": any_tool}
    async with start_gateway(say("[]"), max_forced_calls=5, **settings) as gateway:
        for asked, limit in ((body, 5), ({**body, **one}, 1)):
            assert (await gateway.post(path, asked)).status == 200
            sent = gateway.engine.requests[-1].options.structured_output
            assert sent is not None
            assert json.loads(sent.text)["maxItems"] == limit
