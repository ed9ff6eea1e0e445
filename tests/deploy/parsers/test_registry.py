"""Parsers by name, by chat template, and from other packages; and a parser that fails."""

import logging
from pathlib import Path

import pytest

from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.deepseek import DeepSeekTools
from longshore.deploy.parsers.demo import DemoTools
from longshore.deploy.parsers.gemma import GemmaReasoning, GemmaTools
from longshore.deploy.parsers.harmony import HarmonyReasoning, HarmonyTools
from longshore.deploy.parsers.hermes import HermesTools
from longshore.deploy.parsers.kimi import KimiTools
from longshore.deploy.parsers.llama import LlamaTools
from longshore.deploy.parsers.mistral import MistralTools
from longshore.deploy.parsers.nemotron import NemotronTools
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Events,
    Source,
    ToolParser,
    show_until,
)
from longshore.deploy.parsers.registry import (
    ALIASES,
    REASONING_PARSERS,
    TOOL_PARSERS,
    TOOL_PARSERS_GROUP,
    load_parsers,
    load_reasoning_parser,
    load_tool_parser,
)
from longshore.deploy.parsers.think import ThinkReasoning
from longshore.deploy.parsers.xml import GlmTools, MiniMaxTools, Qwen3CoderTools
from longshore.protocol.errors import ConfigError
from tests.deploy.parsers.answers import joined


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{{ x }}</tool_call>", HermesTools, None),
        (
            "<tool_call> {{ '<think>' }} {{ content.split('</think>') }}",
            HermesTools,
            ThinkReasoning,
        ),
        ("<tool_call>\n<function=name>", None, None),
        (
            "<tool_call>\n<function=name>\n<parameter=key>\n{{ '<think>' }}</think>",
            Qwen3CoderTools,
            ThinkReasoning,
        ),
        ("<seed:tool_call><function=name><parameter=key>", None, None),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key> </think>", GlmTools, ThinkReasoning),
        ("{%- set begin = '<minimax:tool_call>' %}<invoke name=>", MiniMaxTools, None),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", KimiTools, None),
        ("{{ '<|tool_call>call:' + name }}", GemmaTools, None),
        ("{{ '<|tool_call>call:' }} {{ '<|channel>thought\n' }}", GemmaTools, GemmaReasoning),
        ("<TOOLCALL>[{{ call }}]</TOOLCALL>", NemotronTools, None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MistralTools, None),
        ("<｜tool▁calls▁begin｜> </think>", DeepSeekTools, ThinkReasoning),
        ('"parameters": dictionary of argument name and its value', LlamaTools, None),
        ("<|header_start|> <|python_start|>", LlamaTools, None),
        ("<|start|>assistant<|channel|>final<|message|>", HarmonyTools, HarmonyReasoning),
        ("{# Answers are calls of lookup(container). #}", DemoTools, None),
        ("{{ messages }}", None, None),
    ],
)
def test_the_template_tells_the_format(
    template: str, tools: type | None, reasoning: type | None
) -> None:
    parsers = load_parsers("auto", "auto", template)
    assert type(parsers.tools) is (tools or type(None))
    assert type(parsers.reasoning) is (reasoning or type(None))
    assert load_parsers("none", "none", template) == AnswerParsers()


def test_names_of_vllm_are_known() -> None:
    for alias, name in ALIASES.items():
        if name in TOOL_PARSERS:
            assert type(load_tool_parser(alias)) is TOOL_PARSERS[name]
        if name in REASONING_PARSERS:
            assert type(load_reasoning_parser(alias)) is REASONING_PARSERS[name]


class BrokenTools(ToolParser):
    """Gives text up to a mark, and then raises."""

    def parse(self, source: Source, context: AnswerContext) -> Events:
        yield from show_until(source, "#")
        source.take(0)
        raise RuntimeError("no")


class ShortTools(ToolParser):
    """Ends at a mark, although there is more text."""

    def parse(self, source: Source, context: AnswerContext) -> Events:
        yield from show_until(source, "#")


class NoParser:
    """Extends nothing."""


def test_parser_of_another_package_is_found_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    (tmp_path / "example_parser.py").write_text(
        "from longshore.deploy.parsers.hermes import HermesTools\n"
        "class Example(HermesTools):\n    pass\n"
    )
    (info / "entry_points.txt").write_text(
        f"[{TOOL_PARSERS_GROUP}]\nexample = example_parser:Example\n"
        "missing = example_parser:Missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load_tool_parser("example")).__name__ == "Example"
    assert type(load_tool_parser("example_parser:Example")).__name__ == "Example"
    with pytest.raises(ConfigError, match=r"'missing'.*cannot be loaded"):
        load_tool_parser("missing")
    with pytest.raises(
        ConfigError, match=r"unknown parser 'other'; use one of auto, none.*example"
    ):
        load_tool_parser("other")
    with pytest.raises(ConfigError, match=r"must extend .*ToolParser"):
        load_tool_parser(f"{__name__}:NoParser")


@pytest.mark.parametrize("kind", [BrokenTools, ShortTools])
def test_text_of_a_parser_that_fails_is_content(
    kind: type[ToolParser], caplog: pytest.LogCaptureFixture
) -> None:
    answer = ParsedAnswer(AnswerParsers(tools=kind()), AnswerContext())
    with caplog.at_level(logging.ERROR):
        assert joined(answer, ["one ", "two #thr", "ee # four", " five"]) == (
            "one two #three # four five",
            "",
            [],
            False,
        )
    assert len(caplog.records) == (kind is BrokenTools)


def test_failed_parser_shows_text_as_it_arrives() -> None:
    answer = ParsedAnswer(AnswerParsers(tools=BrokenTools()), AnswerContext())
    answer.feed("#")
    assert answer.feed("more") == [Content("more")]
