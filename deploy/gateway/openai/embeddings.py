"""POST /v1/embeddings: returns an embedding of each text or list of token ids.

Each input is a request to the engine. A limited number of them run at a time; the embeddings are
returned together, in order.
"""

import base64
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.pooled_inputs import MAX_INPUTS, max_tokens_of, token_ids_of
from longshore.deploy.gateway.openai.pooling_endpoint import (
    PoolingCall,
    PoolingEndpoint,
    PoolingRequest,
    PoolingUsage,
    usage_of,
)
from longshore.deploy.gateway.openai.requests import Int32, TokenIds, each_of
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.protocol.outputs import FinishedRequest
from longshore.protocol.requests import PoolingParams


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """`add_special_tokens` and `normalize` as in vLLM.

    dimensions: number of leading elements to return, normalized again if the embedding is.
    normalize:  None: the model folder's setting.
    """

    input: str | list[str | int | TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None

    def inputs(self) -> list[str | TokenIds]:
        """The list of inputs. Raises ApiError as `each_of` does."""
        return each_of(self.input, "input", MAX_INPUTS)


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


class EmbeddingsEndpoint(PoolingEndpoint[EmbeddingRequest]):
    """Available for every model that takes text, except classifiers."""

    path = "/v1/embeddings"
    id_prefix = "embd"
    param = "input"
    request_type = EmbeddingRequest

    def check_service(self, service: Service) -> None:
        embedding_model(service, self.path)

    async def answer(self, call: PoolingCall[EmbeddingRequest]) -> bytes:
        service, request = call.service, call.request
        pooling = embedding_pooling(
            embedding_model(service, self.path),
            normalize=request.normalize,
            dimensions=request.dimensions,
        )
        prompts = await token_ids_of(
            request.inputs(),
            service,
            max_tokens=max_tokens_of(request.truncate_prompt_tokens, service),
            keeps_end=request.keeps_end,
            with_special=request.add_special_tokens is not False,
        )
        ends = await self.pooled(call, prompts, pooling)
        as_text = request.encoding_format == "base64"
        return await service.json.run(
            sum(end.pooled.nbytes for end in ends),
            _response,
            ends,
            service.model_name,
            usage_of(prompts, ends),
            as_text=as_text,
        )


def embedding_model(service: Service, path: str) -> EmbeddingModel:
    """How the model pools embeddings. Raises ApiError if it has none."""
    if service.embedding is not None:
        return service.embedding
    if service.classifier is None:
        kind, other = "is a speech model and has no embeddings", "for models that take text"
    else:
        kind = "classifies text and has no embeddings"
        other = "for embedding models; use /classify, /v1/score or /v1/rerank"
    raise invalid(f"{service.model_name} {kind}; {path} is {other}", param="model")


def embedding_pooling(
    model: EmbeddingModel, *, normalize: bool | None = None, dimensions: int | None = None
) -> PoolingParams:
    """Raises ApiError naming the setting that the model does not support."""
    try:
        return model.pooling(normalize=normalize, dimensions=dimensions)
    except ValueError as error:
        param = str(error).replace("=", ":").partition(":")[0]
        raise invalid(str(error).removeprefix("model: "), param=param) from error


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
