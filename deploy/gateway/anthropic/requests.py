"""Request bodies of Anthropic's Messages API, and the chat that they mean."""

from typing import Final, Literal, TypeAlias

import msgspec

from longshore.deploy.gateway.openai.chat_messages import ChatMessage, ContentPart
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.requests import (
    CacheSalt,
    ChatRequest,
    Int32,
    StreamOptions,
    check_deadline,
    check_salt,
)
from longshore.protocol.errors import shortened

MAX_CACHE_BREAKPOINTS: Final = 4

# Accepted, without effect on the answer.
IGNORED: Final = frozenset({"metadata"})
# Not supported yet. The values here (and null) have no effect, so they are accepted.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "output_format": (),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
}


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks to keep the prefix up to here. Accepted: every prefix is cached as long as memory
    allows."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class ContentBlock(msgspec.Struct):
    """A block of content; only type `text` is supported. Fields of other types are not decoded."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


Content: TypeAlias = str | list[ContentBlock]


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn, or a part of it: messages of the same role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Conversation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens, and the prompt of POST /v1/messages."""

    model: str
    messages: list[InputMessage]
    system: Content | None = None
    cache_control: CacheControl | None = None

    def chat_messages(self) -> list[ChatMessage]:
        """The messages in OpenAI's format. Raises ApiError for what is not supported."""
        self._check_breakpoints()
        if not self.messages:
            raise invalid("messages is empty; it needs at least one message", param="messages")
        turns: list[tuple[str, list[ContentPart]]] = []
        if self.system is not None:
            turns.append(("system", _parts(self.system, "system")))
        for position, message in enumerate(self.messages):
            parts = _parts(message.content, f"messages.{position}.content")
            if turns and turns[-1][0] == message.role:
                turns[-1][1].extend(parts)
            else:
                turns.append((message.role, parts))
        return [ChatMessage(role, content=list(parts)) for role, parts in turns]

    def chat(self) -> ChatRequest:
        """The request as a chat, which continues the last message if it is the assistant's."""
        return ChatRequest(
            model=self.model,
            messages=self.chat_messages(),
            continue_final_message=self.messages[-1].role == "assistant",
        )

    def _check_breakpoints(self) -> None:
        contents = (self.system, *(message.content for message in self.messages))
        num_breakpoints = (self.cache_control is not None) + sum(
            block.cache_control is not None
            for content in contents
            if isinstance(content, list)
            for block in content
        )
        if num_breakpoints > MAX_CACHE_BREAKPOINTS:
            raise invalid(
                f"{num_breakpoints} blocks have cache_control; at most {MAX_CACHE_BREAKPOINTS} "
                "are allowed",
                param="cache_control",
            )


class MessagesRequest(Conversation, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. The last five parameters are Longshore's, as for chats."""

    max_tokens: Int32
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    stream: bool | None = None
    cache_salt: CacheSalt | None = None
    deadline_s: float | None = None
    no_store: bool | None = None
    priority: Int32 | None = None
    seed: int | None = None

    def chat(self) -> ChatRequest:
        """The request as a chat. Raises ApiError naming the invalid parameter."""
        chat = super().chat()
        for name in (
            *("max_tokens", "temperature", "top_p", "top_k", "stream"),
            *("cache_salt", "deadline_s", "no_store", "priority", "seed"),
        ):
            setattr(chat, name, getattr(self, name))
        chat.stop = self.stop_sequences
        chat.stops("stop_sequences")
        if self.stream:
            chat.stream_options = StreamOptions(include_usage=True)
        check_deadline(chat.deadline_s)
        check_salt(chat)
        return chat


def _parts(content: Content, where: str) -> list[ContentPart]:
    """Raises ApiError for blocks that are not supported."""
    if isinstance(content, str):
        return [ContentPart("text", content)]
    for position, block in enumerate(content):
        if block.type != "text":
            raise invalid(
                f"{where}.{position}: blocks of type {shortened(block.type)!r} are not supported; "
                "send blocks of type 'text'",
                param=where.partition(".")[0],
                code="unsupported_parameter",
            )
        if block.text is None:
            raise invalid(f"{where}.{position}.text is missing", param=where.partition(".")[0])
    return [ContentPart("text", block.text) for block in content]
