"""The head of a model for sequence classification: one score per label."""

import torch
from torch import Tensor

from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, whole


class ClassificationHead:
    """Computes scores before any activation. A rank has the whole weight, because it is small.

    weight: (num_labels, hidden_size), float64, so that the batch does not change a float32 result.
    """

    def __init__(self, num_labels: int, hidden_size: int, placement: Placement) -> None:
        shape = (num_labels, hidden_size)
        self.weight = torch.empty(shape, dtype=torch.float64, device=placement.device)

    def __call__(self, states: Tensor) -> Tensor:
        """states: (n, hidden_size) float64, after the final norm -> (n, num_labels) float64."""
        return states @ self.weight.T

    def stored(self) -> StoredTensor:
        return whole(self.weight)
