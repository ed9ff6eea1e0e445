"""A model for sequence classification: the names of its labels, and the function that turns their
scores into probabilities, as transformers and sentence-transformers choose it."""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.requests import PoolingParams

Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]

CLASSIFIED: Final = PoolingParams("classify", normalize=False)
"""Asks for the scores of the labels."""

_OF_PROBLEM: Final[dict[object, Activation]] = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
}
_OF_SENTENCE_TRANSFORMERS: Final[dict[object, Activation]] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}


class ClassifierModel(msgspec.Struct, frozen=True):
    """labels: their names, by index. activation: applied to their scores."""

    labels: tuple[str, ...]
    activation: Activation

    def probabilities(
        self, scores: npt.NDArray[np.floating[Any]], *, use_activation: bool | None = None
    ) -> npt.NDArray[np.floating[Any]]:
        """Of the labels.

        scores: (..., num_labels) -> the same shape; none, of a request that failed: none.
        use_activation: False: the scores themselves.
        """
        if use_activation is False or not scores.size:
            return scores
        return self.activated(scores)

    def activated(self, scores: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """scores: (..., num_labels) -> the same shape."""
        values = scores.astype(np.float64)
        match self.activation:
            case "identity":
                return values
            case "sigmoid":
                # Of two equal forms, the one whose exponential cannot overflow.
                small = np.exp(-np.abs(values))
                return np.where(values < 0, small, 1.0) / (1.0 + small)
            case "softmax":
                powers = np.exp(values - values.max(axis=-1, keepdims=True))
                return powers / powers.sum(axis=-1, keepdims=True)


def read_classifier(config: Mapping[str, Any], labels: tuple[str, ...]) -> ClassifierModel:
    """config: of config.json. `problem_type` chooses the activation; without it several labels have
    a softmax, and one has what sentence-transformers stored, or a sigmoid.

    Raises ConfigError for another activation.
    """
    activation = _OF_PROBLEM.get(config.get("problem_type"))
    if activation is None and len(labels) > 1:
        activation = "softmax"
    return ClassifierModel(labels, activation or _of_cross_encoder(config))


def _of_cross_encoder(config: Mapping[str, Any]) -> Activation:
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid"
    if not isinstance(name, str) or name not in _OF_SENTENCE_TRANSFORMERS:
        raise ConfigError(
            f"config.json has the activation {shortened(repr(name))}; supported are "
            f"{', '.join(map(str, _OF_SENTENCE_TRANSFORMERS))}"
        )
    return _OF_SENTENCE_TRANSFORMERS[name]
