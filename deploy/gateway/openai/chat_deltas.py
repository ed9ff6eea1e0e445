"""The message of a chat answer, and its deltas in a stream, from the answer's text."""

import msgspec

from longshore.deploy.gateway.openai.responses import (
    AnswerToolCall,
    CalledFunctionText,
    ChatAnswer,
    ChatDelta,
    ToolCallDelta,
)
from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.parser import (
    AnswerContext,
    Content,
    MoreArguments,
    Reasoning,
    ToolCall,
)


class ChatParsing(msgspec.Struct, frozen=True):
    """How the answers to one request are parsed.

    tool_names:     functions that the request declares.
    max_calls:      later calls are left out; None: no limit.
    has_reasoning:  the answer includes its reasoning.
    names_call:     the request names the function that is called.
    """

    parsers: AnswerParsers
    tool_names: frozenset[str] = frozenset()
    max_calls: int | None = None
    has_reasoning: bool = True
    names_call: bool = False


class ChatDeltas:
    """The deltas of one answer as its text arrives.

    prompt_end: the end of the prompt's text.
    """

    def __init__(self, parsing: ChatParsing, prompt_end: str) -> None:
        self._parsing = parsing
        self._num_calls = 0
        self._answer = ParsedAnswer(parsing.parsers, AnswerContext(parsing.tool_names, prompt_end))

    def feed(self, text: str, *, is_last: bool) -> ChatDelta | None:
        """The delta of the next piece of text; None: it adds nothing yet."""
        content, reasoning = "", ""
        calls: list[ToolCallDelta] = []
        for event in self._answer.feed(text, is_last=is_last):
            match event:
                case Content(added):
                    content += added
                case Reasoning(added) if self._parsing.has_reasoning:
                    reasoning += added
                case ToolCall(name, arguments):
                    self._num_calls += 1
                    if self._is_shown:
                        calls.append(self._first_delta(name, arguments))
                case MoreArguments(added) if self._is_shown:
                    calls.append(ToolCallDelta(self._num_calls - 1, CalledFunctionText(added)))
        if not content and not reasoning and not calls:
            return None
        return ChatDelta(
            content=content or msgspec.UNSET,
            tool_calls=tuple(calls) or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET,
            reasoning_content=reasoning or msgspec.UNSET,
        )

    @property
    def _is_shown(self) -> bool:
        """Whether the last call is within the limit."""
        maximum = self._parsing.max_calls
        return maximum is None or self._num_calls <= maximum

    def _first_delta(self, name: str, arguments: str) -> ToolCallDelta:
        tools = self._parsing.parsers.tools
        assert tools is not None
        function = CalledFunctionText(arguments, name)
        return ToolCallDelta(self._num_calls - 1, function, tools.call_id(), "function")

    def finish_reason(self, reason: str) -> str:
        """`tool_calls` for an answer that ended by itself and whose calls are complete. OpenAI and
        vLLM leave the reason as it is if the request names the function."""
        if reason != "stop" or self._parsing.names_call:
            return reason
        return "tool_calls" if self._answer.ends_with_calls else reason

    def message(self, text: str) -> ChatAnswer:
        """The message of an answer with this text."""
        delta = self.feed(text, is_last=True) or ChatDelta()
        calls = tuple(
            AnswerToolCall(call.id, call.function)
            for call in delta.tool_calls or ()
            if call.id is not msgspec.UNSET
        )
        is_text = not calls and delta.reasoning is msgspec.UNSET
        return ChatAnswer(
            content=delta.content or ("" if is_text else None),
            tool_calls=calls or msgspec.UNSET,
            reasoning=delta.reasoning,
            reasoning_content=delta.reasoning,
        )
