"""The messages of a chat, in OpenAI's format and as input of chat templates."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.parsers.json_text import read_json
from longshore.protocol.errors import shortened

MAX_MESSAGES: Final = 16_384
_EMPTY: Final = (b"null", b"[]")
Unread: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A field that is not decoded."""


class ContentPart(msgspec.Struct):
    """A part of a message's content; only type `text` is supported."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """arguments: JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""

    def as_template_input(self) -> dict[str, object]:
        """With the arguments as an object, as templates expect them. Arguments that are not an
        object, for which the model is to blame, stay text."""
        arguments = self.arguments
        if isinstance(arguments, str):
            value = read_json(arguments) if arguments.strip() else {}
            arguments = value if isinstance(value, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class MessageToolCall(msgspec.Struct):
    """A call that the assistant made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None

    def as_template_input(self) -> dict[str, object]:
        call: dict[str, object] = {
            "type": "function",
            "function": self.function.as_template_input(),
        }
        return call if self.id is None else {"id": self.id, **call}


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. `name` and `refusal` are accepted as the API defines them. Unsupported fields
    are accepted if empty, because clients send answers back as they got them; they are not decoded.

    tool_calls: of an assistant. tool_call_id: the call that a message of the role `tool` answers.
    reasoning_content, reasoning: of an assistant, under either name.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Unread = msgspec.UNSET
    audio: Unread = msgspec.UNSET
    function_call: Unread = msgspec.UNSET
    tool_call_id: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def as_template_input(self, position: int) -> dict[str, object]:
        """The message for chat templates. Raises ApiError for what is not supported."""
        role = "system" if self.role == "developer" else self.role
        if role not in ("system", "user", "assistant", "tool"):
            raise invalid(
                f"messages[{position}].role is {shortened(self.role)!r}; supported are system, "
                "developer, user, assistant and tool",
                param="messages",
            )
        for name in ("annotations", "audio", "function_call"):
            value = getattr(self, name)
            if value is not msgspec.UNSET and b"".join(bytes(value).split()) not in _EMPTY:
                raise invalid(
                    f"messages[{position}].{name} is not supported; remove it",
                    param="messages",
                    code="unsupported_parameter",
                )
        message: dict[str, object] = {"role": role, "content": self._text(position)}
        if self.name is not None:
            message["name"] = self.name
        if role == "assistant":
            self._add_calls_and_reasoning(message)
        elif self.tool_calls:
            raise invalid(
                f"messages[{position}].tool_calls is for the role assistant, not {role}",
                param="messages",
            )
        if role == "tool" and self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _add_calls_and_reasoning(self, message: dict[str, object]) -> None:
        """Reasoning under each name that templates have for it."""
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
            if self.content is None:
                message["content"] = None  # templates tell calls from answers by it
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
            if not message["content"]:  # gpt-oss: calls with reasoning and text are rejected
                message["thinking"] = reasoning

    def _text(self, position: int) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise invalid(
                    f"messages[{position}].content has a part of type {shortened(part.type)!r}; "
                    "only text is supported",
                    param="messages",
                )
        return "\n".join(part.text or "" for part in self.content)


def template_input(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages for chat templates. Raises ApiError for what is not supported."""
    if not messages:
        raise invalid("messages is empty; a chat needs at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            f"messages has {len(messages)} items; at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    return [message.as_template_input(i) for i, message in enumerate(messages)]
