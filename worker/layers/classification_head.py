"""The heads of models for sequence classification: one score per label.

A language model can be one, too: its score is by how much the logit of one token exceeds that of
another (Qwen3-Reranker: "yes" and "no"), so the head is the difference of two rows of the output
head. Heads are float64, so that the batch does not change a float32 result.
"""

import torch
from torch import Tensor

from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole


class ClassificationHead:
    """Computes scores before any activation. A rank has the whole weight, because it is small.

    tokens: the token against a label and the one for it, if there is one label made from them.
    weight: (num_labels, hidden_size), float64.
    """

    def __init__(
        self,
        num_labels: int,
        hidden_size: int,
        placement: Placement,
        *,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        shape = (num_labels if tokens is None else 2, hidden_size)
        self.weight = torch.empty(shape, dtype=torch.float64, device=placement.device)
        self.tokens = tokens
        if tokens is not None:
            placement.when_loaded(self._subtract)

    def _subtract(self) -> None:
        against, of_label = self.weight
        self.weight = (of_label - against).unsqueeze(0)

    def __call__(self, states: Tensor) -> Tensor:
        """states: (n, hidden_size) float64, after the final norm -> (n, num_labels) float64."""
        return states @ self.weight.T

    def stored(self) -> StoredTensor:
        """The head without tokens: the checkpoint's own head."""
        return whole(self.weight)

    def in_output_head(self, vocab_size: int) -> StoredTensor:
        """The head with tokens: the checkpoint's output head, whose rows of the tokens this rank
        needs."""
        assert self.tokens is not None
        return StoredTensor(
            (vocab_size, self.weight.shape[1]),
            tuple(
                (self.weight[row : row + 1], (slice(token, token + 1),))
                for row, token in enumerate(self.tokens)
            ),
        )


class PooledClassificationHead:
    """The head of an encoder: out(tanh(dense(state))).

    dense: (hidden_size, hidden_size); out: (num_labels, hidden_size); with biases, float64.
    names: checkpoint names of the two maps.
    """

    def __init__(
        self, num_labels: int, hidden_size: int, placement: Placement, *, names: tuple[str, str]
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float64, device=placement.device)

        self.dense, self.dense_bias = empty(hidden_size, hidden_size), empty(hidden_size)
        self.out, self.out_bias = empty(num_labels, hidden_size), empty(num_labels)
        self._names = names

    def __call__(self, states: Tensor) -> Tensor:
        """states: (n, hidden_size) float64 -> (n, num_labels) float64."""
        pooled = (states @ self.dense.T).add_(self.dense_bias).tanh_()
        return (pooled @ self.out.T).add_(self.out_bias)

    def checkpoint_tensors(self) -> StoredTensors:
        dense, out = self._names
        return {
            f"{dense}.weight": whole(self.dense),
            f"{dense}.bias": whole(self.dense_bias),
            f"{out}.weight": whole(self.out),
            f"{out}.bias": whole(self.out_bias),
        }
