"""Embeddings from a table that is divided among ranks by tokens."""

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def embed_part(token_ids: Tensor, table: Tensor, first: int, num_tokens: int) -> Tensor:
    """token_ids: (n,) int32 or int64. table: (at least num_tokens, size), contiguous, the vectors
    of the tokens from `first` on.

    Returns (n, size), zeros for the tokens of other ranks.
    """
    if uses_triton(table):
        from longshore.worker.kernels.gpu import embedding as gpu

        vectors: Tensor = gpu.embed_part(token_ids, table, first, num_tokens)
        return vectors
    rows = token_ids - first
    elsewhere = (rows < 0) | (rows >= num_tokens)
    found = F.embedding(rows.masked_fill_(elsewhere, 0), table)
    return found.masked_fill_(elsewhere.unsqueeze(1), 0)
