"""The official client and a real server, with a model that calls a tool and uses its result."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.parsers.answer import ParsedAnswer
from longshore.deploy.parsers.parser import AnswerContext
from longshore.deploy.parsers.registry import load_parsers
from tests.conftest import ROOT
from tests.deploy.parsers.answers import joined
from tests.docs.installing import installed_example
from tests.integration.deployment import PATIENCE_S, Deployment
from tests.scripted_model import make_scripted_model

PAGE = ROOT / "docs" / "tools.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}{{ tools | tojson if tools else '' }}"
    "{{ '<|answer|>' if messages[-1].role == 'tool' else '<|assistant|>' }}"
    "{# Its answers have <think> and </think>. #}"
)
ANSWERS = {
    "<|assistant|>": [
        *("<think>", "I have to", " look it up.", "</think>", "\n\nOne moment.\n"),
        *("<tool", "_call>", '\n{"name": ', '"lookup", "argu', 'ments": {"container": "C4'),
        *('17"}', "}\n", "</tool_", "call>"),
    ],
    "<|answer|>": ["C417 is at", " B42."],
}
LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Where a container is",
        "parameters": {
            "type": "object",
            "properties": {"container": {"type": "string"}},
            "required": ["container"],
        },
    },
}
QUESTION: Any = {"role": "user", "content": "Where is C417?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("scripted")
    make_scripted_model(folder, ANSWERS, TEMPLATE)
    with Deployment(folder, tmp_path_factory.mktemp("run"), "--served-model-name", "s") as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def client(server: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *messages: Any, **settings: Any) -> Any:
    return client.chat.completions.create(
        model="s", messages=[QUESTION, *messages], temperature=0, **settings
    )


def test_agent_calls_the_tool_and_answers_with_its_result(client: openai.OpenAI) -> None:
    choice = ask(client, tools=[LOOKUP], tool_choice="auto").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "I have to look it up."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "lookup")
    assert call.function.arguments == '{"container": "C417"}'
    result = {"role": "tool", "tool_call_id": call.id, "content": "B42"}
    last = ask(client, choice.message.model_dump(), result, tools=[LOOKUP]).choices[0]
    assert last.finish_reason == "stop"
    assert last.message.content == "C417 is at B42."
    assert last.message.tool_calls is None


def test_stream_is_put_together_by_the_client(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**LOOKUP["function"], "strict": True}}
    with client.chat.completions.stream(
        model="s", messages=[QUESTION], temperature=0, tools=[strict]
    ) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.done", "content.delta"} <= kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == {"container": "C417"}
    reasoning = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", "")
        for chunk in ask(client, tools=[LOOKUP], stream=True)
    )
    assert reasoning == "I have to look it up."


def test_several_answers_have_calls_of_their_own(client: openai.OpenAI) -> None:
    choices = ask(client, tools=[LOOKUP], n=2, logprobs=True).choices
    ids = {choice.message.tool_calls[0].id for choice in choices}
    assert len(ids) == 2
    assert all(choice.logprobs.content for choice in choices)


def test_without_tools_the_answer_is_text(client: openai.OpenAI) -> None:
    for settings in ({}, {"tools": [LOOKUP], "tool_choice": "none"}):
        choice = ask(client, **settings).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content.startswith("One moment.\n<tool_call>")
        assert choice.message.reasoning_content == "I have to look it up."


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    message = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(message, "reasoning_content")
    assert message.content.startswith("One moment.")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        Deployment(
            DEMO_MODEL_DIR, tmp_path_factory.mktemp("run"), "--served-model-name", "s"
        ) as server,
        openai.OpenAI(
            base_url=f"{server.wait_until_ready().url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield client


def test_agent_of_the_page_prints_what_the_page_says(demo: openai.OpenAI) -> None:
    page = PAGE.read_text()
    agent, _ = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)
    program = (ROOT / "scripts" / "tool_agent.py").read_text()
    assert program.endswith(f'"""\n\n{agent}')
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tool_agent.py"],
        env={**os.environ, "OPENAI_BASE_URL": str(demo.base_url)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout == printed, ran.stderr


def test_the_agent_needs_five_commands() -> None:
    page = PAGE.read_text()
    (first,) = re.findall(r"^```sh\n(git clone .*?)^```$", page, re.M | re.S)
    (second,) = re.findall(r"^```sh\n(\S+ install openai\n.*?)^```$", page, re.M | re.S)
    programs = [line.split("#")[0].split() for line in (first + second).splitlines()]
    assert programs == [
        ["git", "clone", "URL", "longshore"],
        ["cd", "longshore"],
        ["scripts/quickstart", "--demo"],  # tests/scripts/test_quickstart.py runs it
        [".venv/bin/pip", "install", "openai"],
        [".venv/bin/python", "scripts/tool_agent.py"],
    ]


def test_demo_model_calls_its_tool_for_what_it_is_not_told(demo: openai.OpenAI) -> None:
    choice = ask(demo, tools=[LOOKUP]).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("lookup", '{"container": "C417"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "C417 B42 red"}
    choice = ask(demo, choice.message, result, tools=[LOOKUP]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "C417 B42 red")
    assert ask(demo).choices[0].message.content == "C417 unknown"


BOOK: Any = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "crane": {"enum": ["north", "south"]},
                "hours": {"$ref": "#/$defs/Hours"},
            },
            "required": ["crane", "hours"],
            "additionalProperties": False,
            "$defs": {"Hours": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "book"}}, "stop")],
)
def test_forced_call_follows_the_schema_of_its_function(
    demo: openai.OpenAI, choice: Any, reason: str, stream: bool
) -> None:
    settings = {"tools": [BOOK], "tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        with demo.chat.completions.stream(
            model="s", messages=[QUESTION], temperature=0, max_tokens=300, **settings
        ) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = ask(demo, max_tokens=300, **settings).choices[0]
    assert answer.finish_reason == reason
    assert not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.function.name == "book"
    arguments = json.loads(call.function.arguments)
    assert arguments["crane"] in ("north", "south")
    assert 1 <= arguments["hours"] <= 9
    assert len(arguments) == 2


def test_parser_of_the_page_can_be_installed(tmp_path: Path) -> None:
    text = 'So: CALL! {"name": "lookup", "arguments": {}} CALL! me'
    with installed_example(PAGE, tmp_path):
        parsers = load_parsers("shout", "none", "")
        for pieces in ([text], list(text)):
            answer = ParsedAnswer(parsers, AnswerContext())
            assert joined(answer, pieces) == ("So: CALL! me", "", [("lookup", "{}")], True)


def test_unknown_parser_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with Deployment(DEMO_MODEL_DIR, tmp_path, "--tool-call-parser", "hermse") as server:
        assert server.process.wait(timeout=PATIENCE_S) != 0
        assert "unknown parser 'hermse'; use one of auto, none, deepseek" in server.output
