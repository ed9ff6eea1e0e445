"""How an answer is divided into pieces never changes what is found in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.forced import ForcedCalls
from longshore.deploy.parsers.json_text import MAX_HELD_CHARACTERS
from longshore.deploy.parsers.parser import AnswerContext
from longshore.deploy.parsers.registry import TOOL_PARSERS
from longshore.deploy.parsers.think import ThinkReasoning
from tests.deploy.parsers.answers import CONTEXT, joined, parse
from tests.deploy.parsers.test_formats import CALLS, LONG, A

FRAGMENTS = [
    *(text for _, text, _, _ in CALLS),
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "```"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *('{"name": "lookup", "arguments": ', "lookup", "assistant", "analysis", " to=functions.now"),
    *("C417", " unknown", " B42"),
    *("<function=now>", "<parameter=text>", "</parameter>", "</function>", '<|"|>', ":"),
    *("<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>now", "<|tool_call>"),
    *('<invoke name="now">', '<parameter name="text">', "</invoke>", "call:now{text:"),
    *("<|tool_call_begin|>functions.now:0", "<|tool_call_argument_begin|>", "<tool_call|>"),
    *("{", "}", "[", "]", '"', "\\", "(", ")", "'", ",", ";", " ", "\n", A, LONG, LONG[:-1]),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=8).map("".join)


@st.composite
def divided(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and its pieces."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=40)))
    return text, [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("tools", sorted(TOOL_PARSERS))
@given(answer=divided(), is_cut=st.booleans())
@settings(max_examples=300)
def test_pieces_joined_are_what_the_whole_text_gives(
    tools: str, answer: tuple[str, list[str]], is_cut: bool
) -> None:
    text, pieces = answer
    for reasoning in ("none", "harmony" if tools == "harmony" else "think"):
        whole = parse([text], tools, reasoning, is_cut=is_cut)
        assert parse(pieces, tools, reasoning, is_cut=is_cut) == whole


@pytest.mark.parametrize("name", ["lookup", None])
@given(answer=divided(), prompt_end=st.sampled_from(["", "<think>"]))
@settings(max_examples=300)
def test_pieces_of_a_forced_call_are_what_the_whole_text_gives(
    name: str | None, answer: tuple[str, list[str]], prompt_end: str
) -> None:
    text, pieces = answer
    context = AnswerContext(CONTEXT.tool_names, prompt_end)
    for reasoning in (None, ThinkReasoning()):
        parsers = AnswerParsers(reasoning, ForcedCalls(name))
        whole = joined(ParsedAnswer(parsers, context), [text])
        assert joined(ParsedAnswer(parsers, context), pieces) == whole


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_every_character_may_come_alone(
    tools: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    reasoning = "harmony" if tools == "harmony" else "think"
    assert parse(list(text), tools, reasoning) == parse([text], tools, reasoning)


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_a_call_may_be_cut_anywhere(
    tools: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """The text is in two pieces, and the answer is over at every place, too."""
    reasoning = "harmony" if tools == "harmony" else "think"
    whole = parse([text], tools, reasoning)
    step = 1 if len(text) < MAX_HELD_CHARACTERS else 37
    for cut in range(0, len(text), step):
        assert parse([text[:cut], text[cut:]], tools, reasoning) == whole
        begun = parse([text[:cut]], tools, reasoning, is_cut=True)
        assert (
            parse([text[: cut // 2], text[cut // 2 : cut]], tools, reasoning, is_cut=True) == begun
        )
        for (name, arguments), (full_name, full) in zip(begun[2], calls, strict=False):
            assert name == full_name
            assert full.startswith(arguments)


@given(text=texts)
def test_text_without_a_format_s_markers_is_content_unchanged(text: str) -> None:
    for tools, marker in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        if marker not in text:
            assert parse([text], tools)[0] == text
