"""POST /v1/messages: a chat whose request and response have Anthropic's format."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from longshore.deploy.gateway.anthropic.bodies import (
    AnthropicUsage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputBlock,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from longshore.deploy.gateway.anthropic.errors import anthropic_error
from longshore.deploy.gateway.anthropic.requests import (
    IGNORED,
    UNSUPPORTED,
    Conversation,
    MessagesRequest,
)
from longshore.deploy.gateway.http.exchange import Exchange, server_sent_event
from longshore.deploy.gateway.openai.answer_blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockStart,
)
from longshore.deploy.gateway.openai.chat import ChatEndpoint, chat_parsing
from longshore.deploy.gateway.openai.endpoint import NamedEventWriter, ResponseWriter, Service
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.parameters import read_parameters
from longshore.deploy.gateway.openai.requests import OF_CHATS, ChatRequest
from longshore.deploy.gateway.openai.responses import Usage
from longshore.deploy.parsers.json_text import is_json_object

_DELTAS: Final[Mapping[str, Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]]] = {
    "text": TextDelta,
    "reasoning": ThinkingDelta,
    "call": InputJsonDelta,
}
# Other finish reasons of ours: the model's turn ended.
_STOP_REASONS: Final = {"length": "max_tokens"}

ConversationT = TypeVar("ConversationT", bound=Conversation)


def parse_conversation(kind: type[ConversationT], body: bytes) -> ChatRequest:
    """A request body of the given kind, as a chat. Raises ApiError naming the invalid parameter."""
    # How an answer is generated does not matter where tokens are counted.
    unsupported = UNSUPPORTED if kind is Conversation else OF_CHATS | UNSUPPORTED
    return read_parameters(kind, body, ignored=IGNORED, unsupported=unsupported).chat()


class MessagesEndpoint(ChatEndpoint):
    """One answer to a conversation."""

    path = "/v1/messages"
    id_prefix = "msg"
    names: Mapping[str, str] = {"response_format": "output_config.format"}

    async def read(self, exchange: Exchange, service: Service) -> ChatRequest:
        body = await self.read_body(exchange, service)
        return await service.json.run(len(body), partial(parse_conversation, MessagesRequest), body)

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        blocks = AnswerBlocks(chat_parsing(service, request), service.tokenizer)
        return MessageWriter(spec, service.model_name, blocks)


class MessageWriter(NamedEventWriter):
    """Messages. A stream has an empty message, then each content block as it grows, then the reason
    why it stopped."""

    def __init__(self, spec: GenerationSpec, model_name: str, blocks: AnswerBlocks) -> None:
        self._message = Message(
            id=spec.request_id,
            model=model_name,
            usage=AnthropicUsage(input_tokens=len(spec.prompts[0]), output_tokens=0),
        )
        self._max_tokens = spec.sampling.max_tokens
        self._blocks = blocks
        self._last: Piece | None = None

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return [MessageStart(self._message), Ping()]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        if piece.finish_reason is not None:
            self._last = piece
        return [_block_chunk(event) for event in self._blocks.feed(piece)]

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        assert self._last is not None
        return [MessageDelta(self._stop(self._last, usage), _usage(usage)), MessageStop()]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        self._blocks.feed(piece)
        stop = self._stop(piece, usage)
        return msgspec.structs.replace(
            self._message,
            content=[_whole_block(block) for block in self._blocks.blocks],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=_usage(usage),
        )

    def error_events(self, error: ApiError) -> Sequence[bytes]:
        return [server_sent_event(msgspec.json.encode(anthropic_error(error)), "error")]

    def _stop(self, piece: Piece, usage: Usage) -> StopDelta:
        if piece.stop_string is not None:
            return StopDelta("stop_sequence", piece.stop_string)
        if piece.finish_reason == "stop" and self._blocks.ends_with_calls:
            return StopDelta("tool_use", None)
        reason = _STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        limit = self._max_tokens
        if reason == "max_tokens" and limit is not None and usage.completion_tokens < limit:
            reason = "model_context_window_exceeded"
        return StopDelta(reason, None)


def _block_chunk(event: BlockEvent) -> msgspec.Struct:
    index, block = event.index, event.block
    match event:
        case BlockStart():
            empty = AnswerBlock(block.kind, [], block.name, block.call_id)
            return ContentBlockStart(index, _whole_block(empty))
        case BlockDelta(text=text):
            return ContentBlockDelta(index, _DELTAS[block.kind](text))
        case BlockEnd():
            return ContentBlockStop(index)


def _whole_block(block: AnswerBlock) -> OutputBlock:
    """Arguments that are cut off, and so no object, stay text."""
    text = block.text
    match block.kind:
        case "text":
            return TextBlock(text)
        case "reasoning":
            return ThinkingBlock(text)
        case "call":
            arguments = text or "{}"
            if not is_json_object(arguments):
                return TextBlock(text)
            return ToolUseBlock(block.call_id, block.name, msgspec.Raw(arguments.encode()))


def _usage(usage: Usage) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.num_cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
    )
