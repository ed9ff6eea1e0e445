"""The settings of `LLM.embed`, `encode`, `classify` and `score`, with vLLM's names."""

from dataclasses import dataclass

from longshore.deploy.model.classifier import CLASSIFIED
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.requests.refused import refusing
from longshore.protocol.requests import PoolingKind
from longshore.protocol.requests import PoolingParams as EnginePoolingParams


@refusing
@dataclass(kw_only=True)
class PoolingParams:
    """How a prompt is pooled. None: as the model folder says.

    dimensions:     number of leading elements of an embedding to keep.
    use_activation: of embeddings, whether they are normalized to length 1; of labels and scores,
                    whether the head's activation is applied.
    kind:           hidden states that an embedding is pooled from: `last`, `mean` or `cls`.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    kind: PoolingKind | None = None

    def of_embedding(self, model: EmbeddingModel) -> EnginePoolingParams:
        """Raises ValueError naming the setting that the model does not support."""
        return model.pooling(
            kind=self.kind, normalize=self.use_activation, dimensions=self.dimensions
        )

    def of_labels(self) -> EnginePoolingParams:
        """Raises ValueError for settings of embeddings."""
        for name in ("dimensions", "kind"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"PoolingParams: {name}={value!r} is a setting of embeddings")
        return CLASSIFIED
