"""The items of the Responses API: those of a request, the messages that they mean, and how stored
ones are shown."""

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.responses_api.bodies import (
    COMPLETED,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from longshore.deploy.requests.chat_messages import (
    MAX_MESSAGES,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    Unread,
    arguments_object,
    unsupported_part,
)
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.errors import shortened

_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ResponsePart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's content; only text is supported. The fields after `text` are accepted."""

    type: str
    text: str | None = None
    annotations: Unread = msgspec.UNSET
    logprobs: Unread = msgspec.UNSET
    detail: Unread = msgspec.UNSET
    file_data: Unread = msgspec.UNSET
    file_id: Unread = msgspec.UNSET
    file_url: Unread = msgspec.UNSET
    filename: Unread = msgspec.UNSET
    image_url: Unread = msgspec.UNSET
    refusal: Unread = msgspec.UNSET


class ResponseItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the input. Items of a former output can be sent back as they are: the fields after
    `output` are accepted.

    role, content:           of type `message`.
    call_id, name, arguments: of type `function_call`.
    call_id, output:         of type `function_call_output`, and of `custom_tool_call_output`.
    call_id, name, input:    of type `custom_tool_call`.
    summary, content, encrypted_content: of type `reasoning`.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = msgspec.UNSET
    input: str | None = None
    output: str | list[ResponsePart] | None = None
    encrypted_content: str | None = None
    id: Unread = msgspec.UNSET
    status: Unread = msgspec.UNSET
    phase: Unread = msgspec.UNSET


def read_items(
    given: str | Sequence[ResponseItem], seal: ReasoningSeal
) -> tuple[list[ChatMessage], list[InputItem]]:
    """The messages of `input`, and its items as they are shown. Raises RequestError for what is not
    supported."""
    items = [ResponseItem(role="user", content=given)] if isinstance(given, str) else given
    if not items:
        raise invalid("input is empty; it needs at least one item", param="input")
    if len(items) > MAX_MESSAGES:
        raise invalid(
            f"input has {len(items)} items; at most {MAX_MESSAGES} are allowed", param="input"
        )
    prefix = uuid.uuid4().hex
    shown = [_shown(item, f"input[{i}]", f"{prefix}_{i}", seal) for i, item in enumerate(items)]
    return _messages(shown), shown


def num_characters(message: ChatMessage) -> int:
    """Number of characters of a message that `read_items` made, or an answer."""
    assert not isinstance(message.content, list)
    texts = [message.content, message.reasoning_content, message.tool_call_id]
    for call in message.tool_calls or ():
        texts += [call.function.name, str(call.function.arguments), call.id]
    return sum(map(len, filter(None, texts)))


def _shown(item: ResponseItem, where: str, suffix: str, seal: ReasoningSeal) -> InputItem:
    match item.type:
        case "message":
            if item.role not in ("user", "assistant", "system", "developer"):
                raise invalid(
                    f"{where}.role is {shortened(str(item.role))!r}; supported are user, "
                    "assistant, system and developer",
                    param="input",
                )
            if item.content is None:
                raise _missing(where, "content")
            text = _text(item.content, f"{where}.content")
            part = OutputText(text) if item.role == "assistant" else InputText(text)
            return InputMessage(id=f"msg_{suffix}", role=item.role, content=[part])
        case "function_call":
            given = item.arguments
            if item.call_id is None or item.name is None or given is msgspec.UNSET:
                raise _missing(where, "call_id, name or arguments")
            if not arguments_object(given)[1]:
                ignore_fields((f"{where}.arguments",))
            return FunctionCall(
                id=f"fc_{suffix}",
                status=COMPLETED,
                call_id=item.call_id,
                name=item.name,
                arguments=given if isinstance(given, str) else msgspec.json.encode(given).decode(),
            )
        case "custom_tool_call":
            if item.call_id is None or item.name is None or item.input is None:
                raise _missing(where, "call_id, name or input")
            return CustomToolCall(
                id=f"ctc_{suffix}",
                status=COMPLETED,
                call_id=item.call_id,
                name=item.name,
                input=item.input,
            )
        case "function_call_output" | "custom_tool_call_output":
            if item.call_id is None or item.output is None:
                raise _missing(where, "call_id or output")
            output = _text(item.output, f"{where}.output")
            if item.type == "function_call_output":
                return FunctionCallOutput(id=f"fc_{suffix}", call_id=item.call_id, output=output)
            return CustomToolCallOutput(id=f"ctc_{suffix}", call_id=item.call_id, output=output)
        case "reasoning":
            text = _reasoning(item, where, seal)
            return ReasoningItem(id=f"rs_{suffix}", status=COMPLETED, content=[ReasoningText(text)])
    raise invalid(
        f"{where}: items of type {shortened(item.type)!r} are not supported; send messages, "
        "function calls and their outputs",
        param="input",
        code="unsupported_parameter",
    )


def _reasoning(item: ResponseItem, where: str, seal: ReasoningSeal) -> str:
    """The sealed reasoning, or else what the item shows of it. The response names what cannot be
    opened, such as reasoning of another server."""
    if item.encrypted_content is not None:
        opened = seal.open(item.encrypted_content)
        if opened is not None:
            return opened
        ignore_fields((f"{where}.encrypted_content",))
    return _text(item.content or item.summary or "", f"{where}.content")


def _text(content: str | Sequence[ResponsePart], where: str) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in _TEXTS or part.text is None:
            raise unsupported_part(f"{where}[{number}]", part.type)
    return "\n".join(part.text or "" for part in content)


def _missing(where: str, names: str) -> RequestError:
    return invalid(f"{where}: {names} is missing", param="input")


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case InputMessage(role="assistant", content=[part]):
                if not _is_assistant(messages) or messages[-1].content or messages[-1].tool_calls:
                    messages.append(ChatMessage("assistant"))
                messages[-1].content = part.text
            case InputMessage(role=role, content=[part]):
                messages.append(ChatMessage(role, part.text))
            case FunctionCall() | CustomToolCall():
                if not _is_assistant(messages):
                    messages.append(ChatMessage("assistant"))
                if isinstance(item, CustomToolCall):
                    arguments = {"input": item.input}
                else:
                    arguments, _ = arguments_object(item.arguments)
                function = CalledFunction(item.name, arguments)
                call = MessageToolCall(function, item.call_id, "function")
                calls = messages[-1].tool_calls = messages[-1].tool_calls or []
                calls.append(call)
            case (
                FunctionCallOutput(call_id=call_id, output=output)
                | CustomToolCallOutput(call_id=call_id, output=output)
            ):
                messages.append(ChatMessage("tool", output, tool_call_id=call_id))
            case ReasoningItem(content=[part]) if part.text:
                messages.append(ChatMessage("assistant", reasoning_content=part.text))
    return messages


def _is_assistant(messages: Sequence[ChatMessage]) -> bool:
    return bool(messages) and messages[-1].role == "assistant"
