"""The messages of a chat, in OpenAI's format and as input of chat templates."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.parsers.json_text import read_json
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.errors import shortened

MAX_MESSAGES: Final = 16_384
_EMPTY: Final = (b"null", b"[]")
Unread: TypeAlias = msgspec.Raw | msgspec.UnsetType
"""A field that is not decoded."""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; only type `text` is supported."""

    type: str
    text: str | None = None


def arguments_object(arguments: object) -> tuple[dict[str, Any], bool]:
    """The arguments of a call as an object, and whether they are one: JSON text of one, the object
    itself, or an empty text. Null is none; others, for which a model is to blame, are the only
    member of the object."""
    value = arguments
    if isinstance(arguments, str):
        text = arguments.strip()
        value = read_json(text) if text else {}
        if text == "null":
            arguments = None
    if isinstance(value, dict):
        return value, True
    return ({} if arguments is None else {"arguments": arguments}), False


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """arguments: see `arguments_object`. index: as in Ollama's answers."""

    name: str
    arguments: Any = ""
    index: Unread = msgspec.UNSET

    def as_template_input(self) -> dict[str, object]:
        return {"name": self.name, "arguments": arguments_object(self.arguments)[0]}


class CalledCustomTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: str


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the assistant made: of a function, or of a custom tool, which is one for the
    template. index: in a stream, from which clients take it."""

    function: CalledFunction = msgspec.field(default_factory=lambda: CalledFunction(""))
    id: str | None = None
    type: str | None = None
    custom: CalledCustomTool | None = None
    index: Unread = msgspec.UNSET

    def __post_init__(self) -> None:
        """Raises ValueError for a call of nothing."""
        if self.custom is not None:
            self.function = CalledFunction(self.custom.name, {"input": self.custom.input})
        elif not self.function.name:
            raise ValueError("a call needs `function`, with a name, or `custom`")

    def as_template_input(self) -> dict[str, object]:
        call: dict[str, object] = {
            "type": "function",
            "function": self.function.as_template_input(),
        }
        return call if self.id is None else {"id": self.id, **call}


def unsupported_part(where: str, kind: str) -> RequestError:
    """The error of a part that is no text, such as an image or audio."""
    return invalid(
        f"{where} is of type {shortened(kind)!r}; this model takes only text, so remove it",
        param=where.partition("[")[0],
        code="unsupported_parameter",
    )


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
        """The message for chat templates. Raises RequestError for what is not supported."""
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
        for number, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise unsupported_part(f"messages[{position}].content[{number}]", part.type)
        return "\n".join(part.text or "" for part in self.content)


def template_input(messages: Sequence[ChatMessage]) -> list[dict[str, object]]:
    """The messages for chat templates. Raises RequestError for what is not supported."""
    if not messages:
        raise invalid("messages is empty; a chat needs at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            f"messages has {len(messages)} items; at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    given = [message.as_template_input(i) for i, message in enumerate(messages)]
    _name_results(given)
    return given


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Give results of tools the name of the function, which some templates need and OpenAI's API
    leaves out."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
