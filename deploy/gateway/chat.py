"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.endpoint import GenerationEndpoint, ResponseWriter, Service
from longshore.deploy.gateway.generation import GenerationSpec, Piece
from longshore.deploy.gateway.openai import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatRequest,
    ChatResponse,
    Usage,
)
from longshore.deploy.gateway.prompts import chat_max_tokens


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """One answer to a list of messages."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"
    request_type = ChatRequest

    async def specify(
        self, service: Service, request: ChatRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        return GenerationSpec(
            request_id=request_id,
            prompts=[await service.prompts.chat_prompt(request)],
            sampling=service.prompts.sampling(request, chat_max_tokens(request)),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
        )

    def writer(self, service: Service, request: ChatRequest, request_id: str) -> "ChatWriter":
        return ChatWriter(request, request_id, service.model_name)


class ChatWriter(ResponseWriter):
    """Chat completions: in a stream first the role, then text, then the reason for the end."""

    def __init__(self, request: ChatRequest, request_id: str, model_name: str) -> None:
        self._id = request_id
        self._created = int(time.time())
        self._model = model_name
        self._chunk_usage = None if request.include_usage else msgspec.UNSET

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return (self._chunk(ChatDelta(role="assistant", content="")),)

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        chunks = []
        if piece.text:
            chunks.append(self._chunk(ChatDelta(content=piece.text)))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(ChatDelta(), piece.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=(), usage=usage
        )

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (answer,) = pieces
        return ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(ChatChoice(ChatAnswer(answer.text), answer.finish_reason),),
            usage=usage,
        )

    def _chunk(self, delta: ChatDelta, finish_reason: str | None = None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(ChatChunkChoice(delta, finish_reason),),
            usage=self._chunk_usage,
        )
