"""The parser of one answer: reasoning first, then tool calls in the rest."""

import logging
from collections.abc import Iterable

import msgspec

from longshore.deploy.parsers.json_text import is_json_object
from longshore.deploy.parsers.parser import (
    AnswerContext,
    AnswerParser,
    Content,
    Event,
    MoreArguments,
    Reasoning,
    ReasoningParser,
    Source,
    ToolCall,
    ToolParser,
)

logger = logging.getLogger(__name__)


class AnswerParsers(msgspec.Struct, frozen=True):
    """The parsers of a model's answers; None: the text is not searched."""

    reasoning: ReasoningParser | None = None
    tools: ToolParser | None = None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Special tokens that must be part of the text."""
        used = [parser for parser in (self.reasoning, self.tools) if parser is not None]
        return frozenset(token for parser in used for token in parser.special_tokens)


NO_PARSERS = AnswerParsers()


class ParsedAnswer:
    """The events of one answer as its text arrives."""

    def __init__(self, parsers: AnswerParsers, context: AnswerContext) -> None:
        reasoning, tools = parsers.reasoning, parsers.tools
        self._reasoning = None if reasoning is None else _Stage(reasoning, context)
        self._tools = None if tools is None else _Stage(tools, context)
        self._arguments: list[str] = []  # parts of the last call's
        self._num_calls = 0
        self._num_cut = 0

    @property
    def ends_with_calls(self) -> bool:
        """The answer has calls, and the arguments of each are complete."""
        return self._num_calls > 0 and self._num_cut == 0

    def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> list[Event]:
        """The events of the next piece of text. `is_last`: no text follows. `is_cut`: because the
        answer has reached its maximum length."""
        events: Iterable[Event] = [Content(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.feed(text, is_last=is_last)
        if self._tools is not None:
            events = self._with_calls(self._tools, events, is_last=is_last, is_cut=is_cut)
        return _joined(events)

    def _with_calls(
        self, tools: "_Stage", events: Iterable[Event], *, is_last: bool, is_cut: bool
    ) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                parsed += tools.feed(event.text, is_last=False)
            else:
                parsed.append(event)
        if is_last:
            parsed += tools.feed("", is_last=True, is_cut=is_cut)
        for event in parsed:
            match event:
                case ToolCall(arguments=arguments):
                    self._end_call()
                    self._num_calls += 1
                    self._arguments = [arguments]
                case MoreArguments(text):
                    self._arguments.append(text)
        if is_last:
            self._end_call()
        return parsed

    def _end_call(self) -> None:
        if self._arguments and not is_json_object("".join(self._arguments)):
            self._num_cut += 1
        self._arguments = []


class _Stage:
    """Feeds one parser. If it raises, that is logged, and the text that it had not taken and all
    text after it are content."""

    def __init__(self, parser: AnswerParser, context: AnswerContext) -> None:
        self._name = type(parser).__name__
        self._source = Source()
        self._steps = parser.parse(self._source, context)
        self._has_ended = False

    def feed(self, text: str, *, is_last: bool, is_cut: bool = False) -> list[Event]:
        source = self._source
        source.text += text
        source.is_complete, source.is_cut = is_last, is_cut
        events: list[Event] = []
        while not self._has_ended:
            try:
                event = next(self._steps)
            except StopIteration:
                self._has_ended = True
                break
            except Exception:
                logger.exception("%s failed; the rest of the answer stays text", self._name)
                self._has_ended = True
                break
            if event is None:
                break
            events.append(event)
        if source.text and (is_last or self._has_ended):
            events.append(Content(source.take()))
        return events


def _joined(events: Iterable[Event]) -> list[Event]:
    """The events, with consecutive texts of one kind, or of one call, as one."""
    joined: list[Event] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case Content(before), Content(text):
                joined[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case ToolCall(name, before, call_id), MoreArguments(text):
                joined[-1] = ToolCall(name, before + text, call_id)
            case MoreArguments(before), MoreArguments(text):
                joined[-1] = MoreArguments(before + text)
            case _:
                joined.append(event)
    return joined
