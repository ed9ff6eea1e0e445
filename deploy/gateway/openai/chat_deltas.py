"""The message of a chat answer, and its deltas in a stream, from the answer's text."""

import msgspec

from longshore.deploy.gateway.openai.responses import (
    AnswerToolCall,
    CalledCustomText,
    CalledFunctionText,
    ChatAnswer,
    ChatDelta,
    ToolCallDelta,
)
from longshore.deploy.parsers.parser import Content, MoreArguments, Reasoning, ToolCall
from longshore.deploy.requests.chat_parsing import ShownAnswer


class ChatDeltas:
    """The deltas of one answer as its text arrives."""

    def __init__(self, answer: ShownAnswer, *, names_call: bool) -> None:
        self._answer = answer
        self._names_call = names_call

    def feed(self, text: str, finish_reason: str | None = None) -> ChatDelta | None:
        """The delta of the next piece of text; None: it adds nothing yet. finish_reason: of the
        last piece."""
        answer, content, reasoning = self._answer, "", ""
        calls: list[ToolCallDelta] = []
        for event in answer.feed(text, finish_reason):
            match event:
                case Content(added):
                    content += added
                case Reasoning(added):
                    reasoning += added
                case ToolCall(name, text) if answer.is_custom(name):
                    custom, call_id = CalledCustomText(name, text), answer.id_of(event)
                    index = answer.num_calls - 1
                    calls.append(ToolCallDelta(index, id=call_id, type="custom", custom=custom))
                case ToolCall(name, arguments):
                    function, call_id = CalledFunctionText(arguments, name), answer.id_of(event)
                    calls.append(ToolCallDelta(answer.num_calls - 1, function, call_id, "function"))
                case MoreArguments(added):
                    calls.append(ToolCallDelta(answer.num_calls - 1, CalledFunctionText(added)))
        if not content and not reasoning and not calls:
            return None
        return ChatDelta(
            content=content or msgspec.UNSET,
            tool_calls=tuple(calls) or msgspec.UNSET,
            reasoning=reasoning or msgspec.UNSET,
            reasoning_content=reasoning or msgspec.UNSET,
        )

    def finish_reason(self, reason: str) -> str:
        """`tool_calls` for an answer that ended by itself and whose calls are complete. OpenAI and
        vLLM leave the reason as it is if the request names the function."""
        if reason != "stop" or self._names_call:
            return reason
        return "tool_calls" if self._answer.ends_with_calls else reason

    def message(self, text: str, finish_reason: str) -> ChatAnswer:
        """The message of an answer with this text."""
        delta = self.feed(text, finish_reason) or ChatDelta()
        calls = tuple(
            AnswerToolCall(call.id, call.function, str(call.type), call.custom)
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
