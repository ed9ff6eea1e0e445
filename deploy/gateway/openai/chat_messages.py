"""The messages of a chat, in OpenAI's format and as input of chat templates."""

from collections.abc import Sequence
from typing import Final

import msgspec

from longshore.deploy.gateway.openai.errors import invalid
from longshore.protocol.errors import shortened

MAX_MESSAGES: Final = 16_384
_EMPTY: Final = (b"null", b"[]")


class ContentPart(msgspec.Struct):
    """A part of a message's content; only type `text` is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. `name` and `refusal` are accepted as the API defines them. Unsupported fields
    are accepted if empty, because clients send answers back as they got them; they are not decoded.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    audio: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    function_call: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_call_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tool_calls: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def as_template_input(self, position: int) -> dict[str, object]:
        """The message for chat templates. Raises ApiError for what is not supported."""
        role = "system" if self.role == "developer" else self.role
        if role not in ("system", "user", "assistant"):
            raise invalid(
                f"messages[{position}].role is {shortened(self.role)!r}; supported are system, "
                "developer, user and assistant (tools are not supported yet)",
                param="messages",
            )
        for name in ("annotations", "audio", "function_call", "tool_call_id", "tool_calls"):
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
        return message

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
