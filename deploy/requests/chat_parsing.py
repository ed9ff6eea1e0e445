"""How the answers to a chat are parsed, and what is shown of one as its text arrives."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Event,
    MoreArguments,
    Reasoning,
    ToolCall,
)
from longshore.deploy.requests.chat_tools import custom_input
from longshore.deploy.requests.generation_spec import Piece
from longshore.deploy.requests.thinking import PROMPT_END_TOKENS


class ChatParsing(msgspec.Struct, frozen=True):
    """How the answers to one request are parsed.

    tool_names:     functions that the request declares.
    schemas:        JSON schemas of their arguments, by name.
    max_calls:      later calls are left out; None: no limit.
    has_reasoning:  the answer includes its reasoning.
    names_call:     the request names the function that is called.
    custom_names:   of custom tools.
    """

    parsers: AnswerParsers
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    has_reasoning: bool = True
    names_call: bool = False
    custom_names: frozenset[str] = frozenset()
    schemas: Mapping[str, Mapping[str, Any]] = {}


class ShownAnswer:
    """What is shown of one answer. A call of a custom tool has its input as arguments, and is shown
    once it is complete.

    first:     its first piece; None: nothing is known of the prompt.
    num_calls: calls so far, also those that are left out.
    """

    def __init__(
        self,
        parsing: ChatParsing,
        tokenizer: ModelTokenizer | None = None,
        first: Piece | None = None,
    ) -> None:
        prompt_end = ""
        if tokenizer is not None and first is not None and first.prompt is not None:
            prompt_end = tokenizer.decode(first.prompt.token_ids[-PROMPT_END_TOKENS:])
        self._parsing = parsing
        context = AnswerContext(parsing.tool_names, prompt_end, parsing.schemas)
        self._parsed = ParsedAnswer(parsing.parsers, context)
        self._custom: tuple[ToolCall, list[str]] | None = None  # and more parts of the arguments
        self.num_calls = 0

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and the arguments of each are complete."""
        return self._parsed.ends_with_calls

    def feed(self, text: str, finish_reason: str | None = None) -> Iterator[Event]:
        """The events of the next piece of text. finish_reason: of the last piece."""
        is_last = finish_reason is not None
        events = self._parsed.feed(text, is_last=is_last, is_cut=finish_reason == "length")
        for event in self._with_inputs(events, is_last=is_last):
            match event:
                case Reasoning() if not self._parsing.has_reasoning:
                    continue
                case ToolCall():
                    self.num_calls += 1
            if not (isinstance(event, ToolCall | MoreArguments) and self._has_too_many_calls):
                yield event

    def is_custom(self, name: str) -> bool:
        """Whether a call is one of a custom tool."""
        return name in self._parsing.custom_names

    def _with_inputs(self, events: Iterable[Event], *, is_last: bool) -> Iterator[Event]:
        """The events, with calls of custom tools as a whole."""
        for event in events:
            if isinstance(event, MoreArguments) and self._custom is not None:
                self._custom[1].append(event.text)
                continue
            yield from self._custom_call()
            if isinstance(event, ToolCall) and self.is_custom(event.name):
                self._custom = (event, [])
            else:
                yield event
        if is_last:
            yield from self._custom_call()

    def _custom_call(self) -> Iterator[Event]:
        if self._custom is not None:
            call, more = self._custom
            self._custom = None
            text = custom_input("".join((call.arguments, *more)))
            yield msgspec.structs.replace(call, arguments=text)

    @property
    def _has_too_many_calls(self) -> bool:
        maximum = self._parsing.max_calls
        return maximum is not None and self.num_calls > maximum

    def id_of(self, call: ToolCall) -> str:
        """The id that the model gave the call that has begun, or a new one."""
        if call.call_id:
            return call.call_id
        tools = self._parsing.parsers.tools
        assert tools is not None
        return tools.call_id()
