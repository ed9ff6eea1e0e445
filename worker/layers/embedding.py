"""Token embeddings, and the output head that may share their table."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Embedding:
    """weight: (vocab_size, hidden_size)."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: (n,) int32 or int64 -> (n, hidden_size)."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden_size) -> (n, vocab_size) float32, the table as output head."""
        return F.linear(hidden, self.weight).float()
