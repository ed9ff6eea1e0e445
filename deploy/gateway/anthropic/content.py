"""The content of Anthropic's messages, and the messages of a chat that it means."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.requests.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    MessageToolCall,
    Unread,
    arguments_object,
)
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.errors import shortened

_OF_ROLE: Final = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks to keep the prompt's KV for this long after the answer."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ResultBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of a tool's result; only type `text` is supported. The fields after `cache_control`
    are accepted."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    citations: Unread = msgspec.UNSET
    source: Unread = msgspec.UNSET
    title: Unread = msgspec.UNSET
    content: Unread = msgspec.UNSET
    tool_name: Unread = msgspec.UNSET


class ContentBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of content. The fields after `cache_control` are accepted: they are of types that are
    not supported, or have no effect.

    text:     of type `text`.
    thinking, signature: of type `thinking`.
    data:     of type `redacted_thinking`.
    id, name, input: of type `tool_use`.
    tool_use_id, content: of type `tool_result`.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = msgspec.UNSET
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    cache_control: CacheControl | None = None
    caller: Unread = msgspec.UNSET
    citations: Unread = msgspec.UNSET
    context: Unread = msgspec.UNSET
    is_error: Unread = msgspec.UNSET
    source: Unread = msgspec.UNSET
    title: Unread = msgspec.UNSET


Content: TypeAlias = str | list[ContentBlock]


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    """One turn, or a part of it: messages of the same role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Content


def chat_messages(
    system: Content | None, messages: Sequence[MessageParam], seal: ReasoningSeal
) -> list[ChatMessage]:
    """The messages in OpenAI's format. Raises RequestError for what is not supported."""
    if not messages:
        raise invalid("messages is empty; it needs at least one message", param="messages")
    turns: list[tuple[str, list[ContentBlock]]] = []
    if system is not None:
        turns.append(("system", _checked(system, "system", "system")))
    for position, message in enumerate(messages):
        blocks = _checked(message.content, message.role, f"messages.{position}.content")
        _complete(blocks, f"messages[{position}].content", seal)
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return [message for role, blocks in turns for message in _messages(role, blocks)]


def cache_controls(
    system: Content | None, messages: Sequence[MessageParam]
) -> Iterable[CacheControl]:
    """The `cache_control` of all content blocks that have one."""
    for content in (system, *(message.content for message in messages)):
        for block in content if isinstance(content, list) else ():
            nested = block.content if isinstance(block.content, list) else ()
            for control in (*(inner.cache_control for inner in nested), block.cache_control):
                if control is not None:
                    yield control


def _complete(blocks: Sequence[ContentBlock], where: str, seal: ReasoningSeal) -> None:
    """Set the text of reasoning that has none, and the input of calls that is no object. The
    response names the latter, and what cannot be opened, such as reasoning of another server."""
    for index, block in enumerate(blocks):
        if block.type == "tool_use":
            block.input, is_object = arguments_object(block.input)
            if not is_object:
                ignore_fields((f"{where}[{index}].input",))
        sealed = block.data if block.type == "redacted_thinking" else block.signature
        if sealed and not block.thinking:
            block.thinking = seal.open(sealed)
            if block.thinking is None:
                name = "data" if block.type == "redacted_thinking" else "signature"
                ignore_fields((f"{where}[{index}].{name}",))


def _messages(role: str, blocks: Sequence[ContentBlock]) -> list[ChatMessage]:
    """The messages of one turn: results of tools come before the user's text, as in OpenAI's
    format."""
    texts = [ContentPart("text", block.text) for block in blocks if block.type == "text"]
    if role == "assistant":
        calls = [
            MessageToolCall(CalledFunction(block.name or "", block.input), block.id)
            for block in blocks
            if block.type == "tool_use"
        ]
        thoughts = [block.thinking for block in blocks if block.thinking]
        return [
            ChatMessage(
                role,
                content=texts if texts or not calls else None,
                tool_calls=calls or None,
                reasoning_content="\n".join(thoughts) or None,
            )
        ]
    results = [
        ChatMessage("tool", content=_result_text(block), tool_call_id=block.tool_use_id)
        for block in blocks
        if block.type == "tool_result"
    ]
    return [*results, ChatMessage(role, content=texts)] if texts or not results else results


def _result_text(block: ContentBlock) -> str | list[ContentPart]:
    if not isinstance(block.content, list):
        return block.content or ""
    return [ContentPart("text", inner.text) for inner in block.content]


def _checked(content: Content, role: str, where: str) -> list[ContentBlock]:
    """The blocks. Raises RequestError for those that are not supported."""
    if isinstance(content, str):
        return [ContentBlock("text", content)]
    for position, block in enumerate(content):
        place = f"{where}.{position}"
        if block.type not in _OF_ROLE[role]:
            raise _unsupported(place, block.type, role)
        for name in {
            "text": ("text",),
            "thinking": ("thinking",),
            "redacted_thinking": ("data",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
        }[block.type]:
            value = getattr(block, name)
            if value is msgspec.UNSET or (value is None and name != "input"):
                raise invalid(f"{place}.{name} is missing", param=where.partition(".")[0])
        for index, inner in enumerate(block.content if isinstance(block.content, list) else ()):
            if inner.type != "text" or inner.text is None:
                raise _unsupported(f"{place}.content.{index}", inner.type, "tool result")
    return list(content)


def _unsupported(place: str, kind: str, role: str) -> RequestError:
    allowed = " or ".join(map(repr, _OF_ROLE.get(role, ("text",))))
    return invalid(
        f"{place}: a block of type {shortened(kind)!r} is not supported here; send {allowed}",
        param=place.partition(".")[0],
        code="unsupported_parameter",
    )
