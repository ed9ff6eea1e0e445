"""Response bodies of Anthropic's Messages API: whole messages and the events of streams."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec


class AnthropicUsage(msgspec.Struct, frozen=True):
    """Token counts. The prompt has the sum of the three kinds of input tokens; none are charged for
    being written to the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """signature: see ReasoningSeal; empty while the block grows."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """input: a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


OutputBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A whole answer; in a stream, its beginning."""

    id: str
    role: str = "assistant"
    model: str
    content: Sequence[OutputBlock] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The last delta of a thinking block."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Has no meaning; clients skip it."""


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: OutputBlock


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """The end of an answer. The counts are those of the whole message."""

    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event."""


MessageEvent: TypeAlias = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
