"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.api.chat import ChatEndpoint, chat_parsing, echoed_text
from longshore.deploy.gateway.api.endpoint import ResponseWriter, Service
from longshore.deploy.gateway.api.logprobs import ChatLogprobs, LogprobsWriter
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.openai.chat_deltas import ChatDeltas
from longshore.deploy.gateway.openai.continuous_usage import UsageSoFar
from longshore.deploy.gateway.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
)
from longshore.deploy.gateway.openai.routed_experts import encoded
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.chat_parsing import ChatParsing, ShownAnswer
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece


class ChatCompletionsEndpoint(ChatEndpoint):
    """`n` answers to a list of messages."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        return ChatWriter(
            request,
            spec.request_id,
            service.model_name,
            service.tokenizer,
            chat_parsing(service, request),
        )


class ChatWriter(ResponseWriter):
    """Writes the bodies of chat completions. A stream has first the role, then text or calls, then
    the finish reason.

    parsing: how the answers are parsed; None: they are text.
    """

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        model_name: str,
        tokenizer: ModelTokenizer | None,
        parsing: ChatParsing | None = None,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._parsing = parsing
        self._deltas: dict[int, ChatDeltas] = {}
        self._logprobs = LogprobsWriter(None if request.return_tokens_as_token_ids else tokenizer)
        self._echoed = echoed_text(request)
        self._usage_so_far = UsageSoFar() if request.includes_continuous_usage else None
        self._prompt_ids_are_due = bool(request.return_token_ids)
        self._id = request_id
        self._created = int(time.time())
        self._model = model_name
        self._chunk_usage: Usage | msgspec.UnsetType | None = (
            None if request.include_usage else msgspec.UNSET
        )

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        deltas = [ChatDelta(role="assistant", content="")]
        if self._echoed:
            deltas.append(ChatDelta(content=self._echoed))
        indices = range(self._request.num_samples)
        return [self._chunk(index, delta) for index in indices for delta in deltas]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        chunks = []
        if self._usage_so_far is not None:
            self._chunk_usage = self._usage_so_far.after(piece)
        logprobs = self._piece_logprobs(piece)
        reason = piece.finish_reason
        delta = ChatDelta(content=piece.text) if piece.text else None
        if self._parsing is not None:
            deltas = self._deltas_of(piece, self._parsing)
            delta = deltas.feed(piece.text, reason)
            reason = reason and deltas.finish_reason(reason)
        token_ids = self._piece_token_ids(piece)
        if delta is not None or logprobs is not None or token_ids:
            delta = delta or ChatDelta(content="")
            chunk = self._chunk(piece.index, delta, logprobs=logprobs, token_ids=token_ids)
            if self._prompt_ids_are_due and piece.prompt is not None:
                self._prompt_ids_are_due = False
                chunk = msgspec.structs.replace(chunk, prompt_token_ids=piece.prompt.token_ids)
            chunks.append(chunk)
        if reason is not None:
            experts = encoded(piece.routed_experts)
            chunks.append(self._chunk(piece.index, ChatDelta(), reason, routed_experts=experts))
        return chunks

    def _deltas_of(self, piece: Piece, parsing: ChatParsing) -> ChatDeltas:
        """The deltas of the answer that the piece belongs to."""
        deltas = self._deltas.get(piece.index)
        if deltas is None:
            answer = ShownAnswer(parsing, self._tokenizer, piece)
            deltas = ChatDeltas(answer, names_call=parsing.names_call)
            self._deltas[piece.index] = deltas
        return deltas

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [
            ChatChunk(
                id=self._id, created=self._created, model=self._model, choices=(), usage=usage
            )
        ]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        choices = [self._choice(piece) for piece in pieces]
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=tuple(choices),
            usage=usage,
            kv_transfer_params=msgspec.UNSET
            if (params := pieces[0].kv_transfer_params) is None
            else params,
        )
        wanted, prompt = self._request.prompt_logprobs, pieces[0].prompt
        if self._request.return_token_ids and prompt is not None:
            response = msgspec.structs.replace(response, prompt_token_ids=prompt.token_ids)
        if wanted is None or prompt is None or prompt.scores is None:
            return response
        by_token = self._logprobs.prompt(prompt.scores, wanted)
        return msgspec.structs.replace(response, prompt_logprobs=by_token)

    def _choice(self, piece: Piece) -> ChatChoice:
        message, reason = ChatAnswer(piece.text), piece.finish_reason
        if self._parsing is not None:
            deltas = self._deltas_of(piece, self._parsing)
            message = deltas.message(piece.text, reason or "stop")
            reason = reason and deltas.finish_reason(reason)
        if self._echoed:
            content = self._echoed + (message.content or "")
            message = msgspec.structs.replace(message, content=content)
        return ChatChoice(
            message,
            reason,
            piece.index,
            self._piece_logprobs(piece),
            self._piece_token_ids(piece),
            encoded(piece.routed_experts),
        )

    def _piece_token_ids(self, piece: Piece) -> list[int] | msgspec.UnsetType:
        return piece.token_ids if self._request.return_token_ids else msgspec.UNSET

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
        token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
        routed_experts: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(
                ChatChunkChoice(delta, finish_reason, index, logprobs, token_ids, routed_experts),
            ),
            usage=self._chunk_usage,
        )
