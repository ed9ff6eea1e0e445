"""Embeddings in all APIs: the parameters, and how they are computed.

Each input is a request to the engine. A limited number of them run at a time; the embeddings are
returned together, in order.
"""

from typing import Literal

from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.pooled_inputs import InputRequest
from longshore.deploy.gateway.api.pooling_endpoint import PoolingCall, PoolingEndpoint
from longshore.deploy.gateway.api.requests import Int32, TokenIds
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.requests.errors import invalid
from longshore.protocol.outputs import FinishedRequest
from longshore.protocol.requests import PoolingParams


class EmbeddingRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings, with vLLM's `normalize`.

    dimensions: number of leading elements to return, normalized again if the embedding is.
    normalize:  None: the model folder's setting.
    """

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    normalize: bool | None = None


class EmbeddingEndpoint(PoolingEndpoint[EmbeddingRequest]):
    """Available for every model that takes text, except classifiers."""

    param = "input"
    request_type = EmbeddingRequest

    def check_service(self, service: Service) -> None:
        embedding_model(service, self.path)

    async def embedded(
        self, call: PoolingCall[EmbeddingRequest]
    ) -> tuple[list[TokenIds], list[FinishedRequest]]:
        """The prompts and their embeddings. Raises RequestError."""
        service, request = call.service, call.request
        pooling = embedding_pooling(
            embedding_model(service, self.path),
            normalize=request.normalize,
            dimensions=request.dimensions,
        )
        prompts = await request.token_ids(service)
        return prompts, await self.pooled(call, prompts, pooling)


def embedding_model(service: Service, path: str) -> EmbeddingModel:
    """How the model pools embeddings. Raises RequestError if it has none."""
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
    """Raises RequestError naming the setting that the model does not support."""
    try:
        return model.pooling(normalize=normalize, dimensions=dimensions)
    except ValueError as error:
        param = str(error).replace("=", ":").partition(":")[0]
        raise invalid(str(error).removeprefix("model: "), param=param) from error
