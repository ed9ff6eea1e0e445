"""POST /v1/messages: a chat whose request and response have Anthropic's format."""

from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from longshore.deploy.gateway.anthropic.bodies import (
    AnthropicUsage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
)
from longshore.deploy.gateway.anthropic.errors import anthropic_error
from longshore.deploy.gateway.anthropic.requests import (
    IGNORED,
    UNSUPPORTED,
    Conversation,
    MessagesRequest,
)
from longshore.deploy.gateway.http.exchange import Exchange, server_sent_event
from longshore.deploy.gateway.openai.chat import ChatEndpoint
from longshore.deploy.gateway.openai.endpoint import NamedEventWriter, ResponseWriter, Service
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.parameters import read_parameters
from longshore.deploy.gateway.openai.requests import ChatRequest
from longshore.deploy.gateway.openai.responses import Usage

_TEXT_INDEX: Final = 0  # of the only content block
# Other finish reasons of ours: the model's turn ended.
_STOP_REASONS: Final = {"length": "max_tokens"}

ConversationT = TypeVar("ConversationT", bound=Conversation)


def parse_conversation(kind: type[ConversationT], body: bytes) -> ChatRequest:
    """A request body of the given kind, as a chat. Raises ApiError naming the invalid parameter."""
    return read_parameters(kind, body, ignored=IGNORED, unsupported=UNSUPPORTED).chat()


class MessagesEndpoint(ChatEndpoint):
    """One answer to a conversation."""

    path = "/v1/messages"
    id_prefix = "msg"

    async def read(self, exchange: Exchange, service: Service) -> ChatRequest:
        body = await self.read_body(exchange, service)
        return await service.json.run(len(body), partial(parse_conversation, MessagesRequest), body)

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        return MessageWriter(spec, service.model_name)


class MessageWriter(NamedEventWriter):
    """Messages. A stream has an empty message, then a content block as it grows, then the reason
    why it stopped."""

    def __init__(self, spec: GenerationSpec, model_name: str) -> None:
        self._message = Message(
            id=spec.request_id,
            model=model_name,
            usage=AnthropicUsage(input_tokens=len(spec.prompts[0]), output_tokens=0),
        )
        self._max_tokens = spec.sampling.max_tokens
        self._has_block = False
        self._last: Piece | None = None

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return [MessageStart(self._message), Ping()]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        chunks: list[msgspec.Struct] = []
        if piece.text and not self._has_block:
            self._has_block = True
            chunks.append(ContentBlockStart(_TEXT_INDEX, TextBlock("")))
        if piece.text:
            chunks.append(ContentBlockDelta(_TEXT_INDEX, TextDelta(piece.text)))
        if piece.finish_reason is not None:
            self._last = piece
            if self._has_block:
                chunks.append(ContentBlockStop(_TEXT_INDEX))
        return chunks

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        assert self._last is not None
        return [MessageDelta(self._stop(self._last, usage), _usage(usage)), MessageStop()]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        stop = self._stop(piece, usage)
        return msgspec.structs.replace(
            self._message,
            content=[TextBlock(piece.text)] if piece.text else [],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=_usage(usage),
        )

    def error_events(self, error: ApiError) -> Sequence[bytes]:
        return [server_sent_event(msgspec.json.encode(anthropic_error(error)), "error")]

    def _stop(self, piece: Piece, usage: Usage) -> StopDelta:
        if piece.stop_string is not None:
            return StopDelta("stop_sequence", piece.stop_string)
        reason = _STOP_REASONS.get(piece.finish_reason or "", "end_turn")
        limit = self._max_tokens
        if reason == "max_tokens" and limit is not None and usage.completion_tokens < limit:
            reason = "model_context_window_exceeded"
        return StopDelta(reason, None)


def _usage(usage: Usage) -> AnthropicUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
    )
