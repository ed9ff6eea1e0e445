"""gpt-oss: messages with a channel each (harmony).

`<|channel|>analysis<|message|>` is reasoning, `final` is the answer, and `commentary` with a
recipient (`to=functions.NAME`, before or after the channel) is a call. `<|end|>` or `<|call|>`
ends a message, and `<|start|>assistant` begins the next one.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules
from longshore.deploy.parsers.json_text import json_arguments
from longshore.deploy.parsers.parser import (
    AnswerContext,
    AnswerParser,
    CallForm,
    CallGrammar,
    Content,
    Events,
    Reasoning,
    ReasoningParser,
    Source,
    Steps,
    ToolParser,
    show_until,
)

MAX_HEADER_CHARACTERS: Final = 512

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_HEADER: Final = re.compile(
    r"\s*(?:<\|start\|>\s*assistant)?\s*(?:to=(?P<before>[^\s<]+)\s*)?"
    r"(?:<\|channel\|>\s*(?P<channel>\w*)\s*(?:to=(?P<after>[^\s<]+))?[^<]*)?"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
)


class _Header:
    """channel: `analysis`, `commentary` or `final`. function: the called one, or empty. (What the
    model calls while it thinks, such as a browser, is reasoning.)"""

    def __init__(self, match: re.Match[str]) -> None:
        self.end = match.end()
        self.channel = match["channel"]
        self.recipient = match["before"] or match["after"]
        self.function = (self.recipient or "").removeprefix("functions.")
        is_other_tool = self.function == self.recipient
        self.is_call = bool(self.function) and not (is_other_tool and self.channel == "analysis")


class _HarmonyParser(AnswerParser):
    """Divides an answer into messages. Text outside them is content."""

    special_tokens = (_START, _CHANNEL, "<|constrain|>", _MESSAGE, *_ENDS)

    def parse(self, source: Source, context: AnswerContext) -> Events:
        # The prompt ends with `<|start|>assistant`, so the first header lacks it.
        found: tuple[int, str] | None = (0, "")
        while found is not None:
            index, marker = found
            header = yield from _header(source, index)
            if header is not None:
                yield from self._message(source, header)
            elif marker:
                yield Content(source.take(index + len(marker)))
            found = yield from show_until(source, _START, _CHANNEL)

    @abstractmethod
    def _message(self, source: Source, header: _Header) -> Steps[None]:
        """Read the message with this header, which is not taken yet."""


class HarmonyReasoning(_HarmonyParser, ReasoningParser):
    """Leaves calls as they are, for `HarmonyTools`."""

    begin = f"{_CHANNEL}analysis{_MESSAGE}"
    mark = "<|end|>"
    answers = (
        f"{_CHANNEL}final{_MESSAGE}",
        f"{_CHANNEL}final <|constrain|>json{_MESSAGE}",
    )
    end = f"<|end|>{_START}assistant{answers[0]}"

    def _message(self, source: Source, header: _Header) -> Steps[None]:
        if not header.is_call:
            source.take(header.end)
            yield from _body(source, Reasoning if header.channel == "analysis" else Content)
            return
        source.take(header.end)
        yield Content(f"{_START}assistant to={header.recipient}{_CHANNEL}commentary{_MESSAGE}")
        if (end := (yield from _body(source, Content))) is not None:
            yield Content(end)


class HarmonyTools(_HarmonyParser, ToolParser):
    """Reads the calls; the text of other messages is content."""

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        rules = LarkRules(special_ids)
        channel = rules.literal(f"{_CHANNEL}commentary")
        kind = f"{rules.literal(' ')}? ({rules.literal('<|constrain|>')})? {rules.literal('json')}"
        header = f"({channel})? ({kind})? {rules.literal(_MESSAGE)}"
        calls = (
            f"{rules.literal(f'.{name}')} {header} {rules.json_arguments(form)}"
            for name, form in forms.items()
        )
        # Without the dot, which may be one token with the beginning of the name. The model may
        # write a recipient in its reasoning, too, but not after these tokens.
        phrases = (f"{_START}assistant to=functions", f"{_CHANNEL}commentary to=functions")
        return CallGrammar("", rules.grammar(" | ".join(calls)), phrases)

    def _message(self, source: Source, header: _Header) -> Steps[None]:
        if header.is_call:
            start = yield from source.space(header.end)
            if not (yield from json_arguments(source, start, header.function)):
                yield Content(source.take(header.end))
                return
            index = yield from source.space()
            end = yield from source.begins_with(index, *_ENDS)
            source.take((yield from source.space(index + len(end or ""))))
            return
        source.take(header.end)
        yield from _body(source, Content)


def _header(source: Source, start: int) -> Steps[_Header | None]:
    """The header of a message at `start`; None: there is none. Nothing is taken."""
    index = yield from source.space(start)
    if (yield from source.begins_with(index, _START, _CHANNEL, "to=")) is None:
        return None
    end = yield from source.find(index, _MESSAGE, MAX_HEADER_CHARACTERS)
    match = end is not None and _HEADER.fullmatch(source.text, start, end + len(_MESSAGE))
    return _Header(match) if match else None


def _body(source: Source, kind: type[Content] | type[Reasoning]) -> Steps[str | None]:
    """Give the text of a message as it arrives, and take the token that ends it. Returns it."""
    found = yield from show_until(source, *_ENDS, _START, kind=kind, holds_space=False)
    if found is None or found[1] == _START:
        return None
    source.take(len(found[1]))
    return found[1]
