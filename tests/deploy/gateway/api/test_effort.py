"""How much the model reasons, as every dialect says it, reaches the chat template."""

from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.settings import GatewaySettings
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.requests.chat_prompt import thinking_variables
from longshore.protocol.errors import ConfigError
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.http.test_exchange import say
from tests.deploy.tiny_tokenizer import byte_level_tokenizer

HEADER = "x-longshore-ignored-fields"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
OF_MESSAGES: dict[str, Any] = {"model": "tiny", "messages": CHAT}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DIALECTS = [
    ("/v1/chat/completions", {"messages": CHAT}, lambda effort: {"reasoning_effort": effort}),
    ("/tokenize", {"messages": CHAT}, lambda effort: {"reasoning_effort": effort}),
    ("/v1/responses", {"input": "Where?"}, lambda effort: {"reasoning": {"effort": effort}}),
    (
        "/v1/messages",
        {**OF_MESSAGES, "max_tokens": 9},
        lambda effort: {"output_config": {"effort": effort}},
    ),
    ("/api/chat", {**OF_MESSAGES, "stream": False}, lambda effort: {"think": effort}),
]
NAMES = {
    "/v1/chat/completions": "reasoning_effort",
    "/tokenize": "reasoning_effort",
    "/v1/responses": "reasoning.effort",
    "/v1/messages": "output_config.effort",
    "/api/chat": "think",
}
# As gpt-oss, Qwen3, DeepSeek V3.1 and Mistral have it.
LEVELS = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
GPT_OSS = LEVELS + "[{{ reasoning_effort }}]{% for m in messages %}{{ m.thinking }}{% endfor %}"
QWEN = "[{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}]"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}[{{ thinking }}]"
MISTRAL = (
    LEVELS + "{% if reasoning_effort not in ['none', 'high', 'medium'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}[{{ reasoning_effort }}]"
)
PLAIN = "[{% for m in messages %}{{ m.content }}{% endfor %}]"


def variables(template: str, effort: str | None, thinks: bool | None = None) -> dict[str, object]:
    return thinking_variables(ChatTemplate(template, {}), effort, thinks=thinks)


@pytest.mark.parametrize("effort", EFFORTS)
def test_an_effort_reaches_each_template_by_its_variable(effort: str) -> None:
    is_on = effort != "none"
    assert variables(GPT_OSS, effort) == ({"reasoning_effort": effort} if is_on else {})
    assert variables(QWEN, effort) == {"enable_thinking": is_on}
    assert variables(DEEPSEEK, effort) == {"thinking": is_on}
    assert variables(MISTRAL, effort) == {"reasoning_effort": effort}
    assert variables(PLAIN, effort) == {}


def test_a_switch_beside_the_effort_has_precedence() -> None:
    both = QWEN + MISTRAL
    assert variables(both, None) == {}
    assert variables(both, None, thinks=False) == {"enable_thinking": False}
    assert variables(both, "high", thinks=False) == {
        "enable_thinking": False,
        "reasoning_effort": "high",
    }


async def rendered(gateway: RunningGateway, path: str, body: dict[str, Any]) -> tuple[str, Any]:
    """What the template made of it, and the fields that the response names."""
    answer = await gateway.post(path, body)
    assert answer.status == 200, answer.body
    if path == "/tokenize":
        return "", answer.headers.get(HEADER)
    prompt = gateway.engine.requests[-1].prompt_token_ids.tolist()
    return byte_level_tokenizer().decode(prompt), answer.headers.get(HEADER)


def template_file(folder: Path, text: str) -> dict[str, str]:
    file = folder / "effort.jinja"
    file.write_text(text)
    return {"chat_template": str(file), "runtime_dir": str(folder)}


@pytest.mark.parametrize(
    ("template", "effort", "expected", "is_named"),
    [
        (GPT_OSS, "xhigh", "[xhigh]", False),
        (GPT_OSS, "none", "[medium]", True),
        (QWEN, "none", "[off]", False),
        (QWEN, "low", "[]", True),
        (MISTRAL, "none", "[none]", False),
        (MISTRAL, "low", "[medium]", True),  # the template rejects it
        (PLAIN, "high", "[Where?]", True),
    ],
)
async def test_every_dialect_passes_its_effort_on(
    start_gateway: StartGateway,
    tmp_path: Path,
    template: str,
    effort: str,
    expected: str,
    is_named: bool,
) -> None:
    async with start_gateway(say("x"), **template_file(tmp_path, template)) as gateway:
        for path, body, spelled in DIALECTS:
            text, named = await rendered(gateway, path, {**body, **spelled(effort)})
            assert named == (NAMES[path] if is_named else None)
            if path != "/tokenize":
                assert expected in text


async def test_variables_of_the_client_have_precedence(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    body = {"messages": CHAT, "reasoning_effort": "none"}
    async with start_gateway(say("x"), **template_file(tmp_path, DEEPSEEK)) as gateway:
        chat = "/v1/chat/completions"
        assert "[False]" in (await rendered(gateway, chat, body))[0]
        body["chat_template_kwargs"] = {"thinking": True}
        assert "[True]" in (await rendered(gateway, chat, body))[0]


async def test_variables_of_the_server_are_for_requests_that_set_none(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    settings: Any = {
        **template_file(tmp_path, DEEPSEEK),
        "default_chat_template_kwargs": '{"thinking": true}',
    }
    async with start_gateway(say("x"), **settings) as gateway:
        for path, body, spelled in DIALECTS:
            if path != "/tokenize":
                assert "[True]" in (await rendered(gateway, path, body))[0]
                none = {**body, **spelled("none")}
                assert "[False]" in (await rendered(gateway, path, none))[0]
        own = {"messages": CHAT, "chat_template_kwargs": {"thinking": False}}
        assert "[False]" in (await rendered(gateway, "/v1/chat/completions", own))[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [("[]", "not a JSON object"), ("{", "not a JSON"), ('{"tools": []}', "has tools")],
)
def test_variables_that_are_none_are_refused_at_the_start(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GatewaySettings(default_chat_template_kwargs=given)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("enabled", "[True]"), ("disabled", "[False]"), ("adaptive", "[False]")],
)
async def test_anthropics_thinking_turns_it_on_and_off(
    start_gateway: StartGateway, tmp_path: Path, kind: str, expected: str
) -> None:
    body = {**OF_MESSAGES, "max_tokens": 9, "thinking": {"type": kind}}
    async with start_gateway(say("x"), **template_file(tmp_path, DEEPSEEK)) as gateway:
        text, named = await rendered(gateway, "/v1/messages", body)
    assert expected in text
    assert named is None
