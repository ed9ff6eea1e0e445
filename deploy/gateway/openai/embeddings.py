"""POST /v1/embeddings: returns an embedding of each text or list of token ids."""

import base64
from collections.abc import Sequence

import msgspec
import numpy as np

from longshore.deploy.gateway.api.embeddings import EmbeddingEndpoint, EmbeddingRequest
from longshore.deploy.gateway.api.pooling_endpoint import PoolingCall, PoolingUsage, usage_of
from longshore.protocol.outputs import FinishedRequest


class EmbeddingItem(msgspec.Struct, frozen=True):
    """A list of numbers, or the base64 of little-endian float32s."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    data: list[EmbeddingItem]
    model: str
    usage: PoolingUsage
    object: str = "list"


class EmbeddingsEndpoint(EmbeddingEndpoint):
    """Embeds texts and token ids."""

    path = "/v1/embeddings"
    id_prefix = "embd"

    async def answer(self, call: PoolingCall[EmbeddingRequest]) -> bytes:
        service, request = call.service, call.request
        prompts, ends = await self.embedded(call)
        as_text = request.encoding_format == "base64"
        return await service.json.run(
            sum(end.pooled.nbytes for end in ends),
            _response,
            ends,
            service.model_name,
            usage_of(prompts, ends),
            as_text=as_text,
        )


def _response(
    ends: Sequence[FinishedRequest], model: str, usage: PoolingUsage, *, as_text: bool
) -> bytes:
    """The response as JSON. Each embedding is encoded on its own, to release the interpreter lock
    in between."""
    data = [
        msgspec.Raw(
            msgspec.json.encode(
                EmbeddingItem(
                    index,
                    base64.b64encode(end.pooled.astype(np.dtype("<f4"))).decode()
                    if as_text
                    else end.pooled.tolist(),
                )
            )
        )
        for index, end in enumerate(ends)
    ]
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
