"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.openai.endpoint import (
    GenerationEndpoint,
    ResponseWriter,
    Service,
)
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.logprobs import ChatLogprobs, LogprobsWriter
from longshore.deploy.gateway.openai.prompts import chat_max_tokens
from longshore.deploy.gateway.openai.requests import ChatRequest
from longshore.deploy.gateway.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    Usage,
)
from longshore.deploy.gateway.openai.structured_output import read_constraint
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """`n` answers to a list of messages."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"
    request_type = ChatRequest

    async def specify(
        self, service: Service, request: ChatRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        return GenerationSpec(
            request_id=request_id,
            prompts=[await service.prompts.chat_prompt(request)],
            sampling=service.prompts.sampling(
                request,
                chat_max_tokens(request, service.prompts.defaults),
                logprobs=request.num_logprobs,
                prompt_logprobs=request.prompt_logprobs,
            ),
            priority=request.priority or 0,
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
            num_samples=request.num_samples,
            stops=service.prompts.stops(request),
            structured_output=await read_constraint(
                request, service.json, ignores_end=request.ignore_eos
            ),
        )

    def writer(self, service: Service, request: ChatRequest, request_id: str) -> "ChatWriter":
        return ChatWriter(request, request_id, service.model_name, service.tokenizer)


class ChatWriter(ResponseWriter):
    """Chat completions. A stream has first the role, then text, then the finish reason."""

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        model_name: str,
        tokenizer: ModelTokenizer | None,
    ) -> None:
        self._request = request
        self._logprobs = LogprobsWriter(tokenizer)
        self._id = request_id
        self._created = int(time.time())
        self._model = model_name
        self._chunk_usage = None if request.include_usage else msgspec.UNSET

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        role = ChatDelta(role="assistant", content="")
        return [self._chunk(index, role) for index in range(self._request.num_samples)]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        chunks = []
        logprobs = self._piece_logprobs(piece)
        if piece.text or logprobs is not None:
            delta = ChatDelta(content=piece.text)
            chunks.append(self._chunk(piece.index, delta, logprobs=logprobs))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(piece.index, ChatDelta(), piece.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model, choices=(), usage=usage
        )

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        choices = [
            ChatChoice(
                ChatAnswer(piece.text),
                piece.finish_reason,
                piece.index,
                self._piece_logprobs(piece),
            )
            for piece in pieces
        ]
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=tuple(choices),
            usage=usage,
        )
        wanted, prompt = self._request.prompt_logprobs, pieces[0].prompt
        if wanted is None or prompt is None or prompt.scores is None:
            return response
        by_token = self._logprobs.prompt(prompt.scores, wanted)
        return msgspec.structs.replace(response, prompt_logprobs=by_token)

    def _piece_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_best = self._request.num_logprobs
        if num_best is None or not piece.scores:
            return None
        return self._logprobs.chat(piece.scores, num_best)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        finish_reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(ChatChunkChoice(delta, finish_reason, index, logprobs),),
            usage=self._chunk_usage,
        )
