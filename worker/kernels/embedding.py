"""Embeddings: rows of a table, which may be quantised or divided among ranks by tokens."""

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.operators import uses_triton


def look_up(indices: Tensor, table: Tensor | PackedMatrix | DeviceMatrix) -> Tensor:
    """indices: (n,) int32 or int64; table: (rows, size) -> (n, size)."""
    if isinstance(table, Tensor):
        return F.embedding(indices, table)
    return table.rows(indices)


def embed_part(
    token_ids: Tensor, table: Tensor | PackedMatrix | DeviceMatrix, first: int, num_tokens: int
) -> Tensor:
    """token_ids: (n,) int32 or int64. table: (at least num_tokens, size), contiguous, the vectors
    of the tokens from `first` on.

    Returns (n, size), zeros for the tokens of other ranks.
    """
    if isinstance(table, Tensor) and uses_triton(table):
        from longshore.worker.kernels.gpu import embedding as gpu

        vectors: Tensor = gpu.embed_part(token_ids, table, first, num_tokens)
        return vectors
    rows = token_ids - first
    elsewhere = (rows < 0) | (rows >= num_tokens)
    found = look_up(rows.masked_fill_(elsewhere, 0), table)
    return found.masked_fill_(elsewhere.unsqueeze(1), 0)
