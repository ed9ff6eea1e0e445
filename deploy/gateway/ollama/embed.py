"""POST /api/embed and /api/embeddings: embeddings in Ollama's format."""

import time
from collections.abc import Sequence

import msgspec

from longshore.deploy.gateway.api.embeddings import EmbeddingEndpoint, EmbeddingRequest
from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.pooling_endpoint import PoolingCall
from longshore.deploy.gateway.ollama.bodies import OllamaEmbeddingResponse, OllamaEmbedResponse
from longshore.deploy.gateway.ollama.requests import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaNames,
    keep,
    parse_embedding,
    served_name,
)
from longshore.protocol.outputs import FinishedRequest


class OllamaEmbedEndpoint(OllamaNames, EmbeddingEndpoint):
    """Embeds texts. Without any, the request only asks to load the model."""

    path = "/api/embed"
    id_prefix = "embed"
    body_type: type[OllamaEmbedRequest | OllamaEmbeddingsRequest] = OllamaEmbedRequest

    def parse(self, body: bytes, service: Service) -> EmbeddingRequest:
        request, keep_s = parse_embedding(self.body_type, body)
        keep(service, keep_s)
        request.model = served_name(request.model, service.names)
        return request

    async def answer(self, call: PoolingCall[EmbeddingRequest]) -> bytes:
        prompts, ends = ([], []) if not call.request.input else await self.embedded(call)
        return await call.service.json.run(
            sum(end.pooled.nbytes for end in ends), self.body, call, sum(map(len, prompts)), ends
        )

    def body(
        self,
        call: PoolingCall[EmbeddingRequest],
        num_tokens: int,
        ends: Sequence[FinishedRequest],
    ) -> bytes:
        """The response, as JSON."""
        response = OllamaEmbedResponse(
            model=call.service.model_name,
            embeddings=[end.pooled.tolist() for end in ends],
            total_duration=round((time.perf_counter() - call.arrived_s) * 1e9),
            prompt_eval_count=num_tokens,
        )
        return msgspec.json.encode(response)


class OllamaEmbeddingsEndpoint(OllamaEmbedEndpoint):
    """Embeds one text, as Ollama did before /api/embed."""

    path = "/api/embeddings"
    id_prefix = "embeddings"
    body_type = OllamaEmbeddingsRequest

    def body(
        self,
        call: PoolingCall[EmbeddingRequest],
        num_tokens: int,
        ends: Sequence[FinishedRequest],
    ) -> bytes:
        embedding = ends[0].pooled.tolist() if ends else []
        return msgspec.json.encode(OllamaEmbeddingResponse(embedding))
