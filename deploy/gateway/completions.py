"""POST /v1/completions."""

import time
from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.endpoint import GenerationEndpoint, ResponseWriter, Service
from longshore.deploy.gateway.generation import GenerationSpec, Piece
from longshore.deploy.gateway.openai import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from longshore.deploy.gateway.prompts import completion_max_tokens


class CompletionsEndpoint(GenerationEndpoint[CompletionRequest]):
    """One answer per prompt, as choices numbered like the prompts."""

    path = "/v1/completions"
    id_prefix = "cmpl"
    request_type = CompletionRequest

    async def specify(
        self, service: Service, request: CompletionRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        return GenerationSpec(
            request_id=request_id,
            prompts=await service.prompts.completion_prompts(request),
            sampling=service.prompts.sampling(request, completion_max_tokens(request)),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
        )

    def writer(
        self, service: Service, request: CompletionRequest, request_id: str
    ) -> "CompletionWriter":
        with_token_ids = request.return_token_ids
        if with_token_ids is None:  # what would be left of an answer without text?
            with_token_ids = service.tokenizer is None
        return CompletionWriter(
            request, request_id, service.model_name, with_token_ids=with_token_ids
        )


class CompletionWriter(ResponseWriter):
    """Text completions."""

    def __init__(
        self, request: CompletionRequest, request_id: str, model_name: str, *, with_token_ids: bool
    ) -> None:
        self._frame = CompletionResponse(
            id=request_id,
            created=int(time.time()),
            model=model_name,
            choices=(),
            usage=None if request.include_usage else msgspec.UNSET,
        )
        self._with_token_ids = with_token_ids

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return ()

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        if not piece.text and piece.finish_reason is None and not self._with_token_ids:
            return ()
        return (self._filled(self._choice(piece)),)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return msgspec.structs.replace(self._frame, usage=usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        return msgspec.structs.replace(self._filled(*map(self._choice, pieces)), usage=usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        token_ids = piece.token_ids if self._with_token_ids else msgspec.UNSET
        return CompletionChoice(piece.index, piece.text, piece.finish_reason, token_ids=token_ids)

    def _filled(self, *choices: CompletionChoice) -> CompletionResponse:
        return msgspec.structs.replace(self._frame, choices=choices)
