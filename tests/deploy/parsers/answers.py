"""Parses whole answers, or their pieces, for tests."""

from collections.abc import Sequence

from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    Event,
    MoreArguments,
    Reasoning,
    ToolCall,
)
from longshore.deploy.parsers.registry import load_reasoning_parser, load_tool_parser

SCHEMAS = {
    "lookup": {"type": "object", "properties": {"id": {"type": "string"}}},
    "now": {
        "type": "object",
        "properties": {"text": {"$ref": "#/$defs/text"}},
        "$defs": {"text": {"type": "string"}},
    },
    "book": {
        "type": "object",
        "properties": {
            "seats": {"type": "integer"},
            "when": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array"},
            "paid": {"enum": [True, False]},
        },
    },
}
CONTEXT = AnswerContext(frozenset({"lookup", "now"}), schemas=SCHEMAS)
Parsed = tuple[str, str, list[tuple[str, str]], bool]
"""Content, reasoning, calls with their names and arguments, and `ends_with_calls`."""


def parse(
    pieces: Sequence[str],
    tools: str = "none",
    reasoning: str = "none",
    context: AnswerContext = CONTEXT,
    *,
    is_cut: bool = False,
) -> Parsed:
    """The joined deltas of an answer that arrives in these pieces. is_cut: and then reaches its
    maximum length."""
    parsers = AnswerParsers(load_reasoning_parser(reasoning), load_tool_parser(tools))
    return joined(ParsedAnswer(parsers, context), pieces, is_cut=is_cut)


def joined(answer: ParsedAnswer, pieces: Sequence[str], *, is_cut: bool = False) -> Parsed:
    events: list[Event] = []
    for piece in pieces:
        events += answer.feed(piece)
    events += answer.feed("", is_last=True, is_cut=is_cut)
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCall(name, arguments):
                calls.append((name, arguments))
            case MoreArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, reasoning, calls, answer.ends_with_calls
