"""Rows of an embedding table that is divided among ranks, one program per token and span of
columns. See `worker/kernels/embedding.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 1024


@triton.jit
def _kernel(ids_ptr, table_ptr, out_ptr, first, num_tokens, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    row = tl.load(ids_ptr + token).to(tl.int64) - first
    num_read = tl.where((row >= 0) & (row < num_tokens), size, 0)
    vector = tl.load(table_ptr + row * size + columns, mask=columns < num_read, other=0.0)
    tl.store(out_ptr + token * size + columns, vector, mask=is_inside)


def _fake(token_ids: Tensor, table: Tensor, first: int, num_tokens: int) -> Tensor:
    return torch.empty((len(token_ids), table.shape[1]), dtype=table.dtype, device=table.device)


@operator(
    "embed_part(Tensor token_ids, Tensor table, int first, int num_tokens) -> Tensor", fake=_fake
)
def embed_part(token_ids: Tensor, table: Tensor, first: int, num_tokens: int) -> Tensor:
    """See the wrapper."""
    out = _fake(token_ids, table, first, num_tokens)
    if len(token_ids) == 0:
        return out
    size = table.shape[1]
    _kernel[(len(token_ids), triton.cdiv(size, BLOCK))](
        token_ids, table, out, first, num_tokens, size, BLOCK=BLOCK, num_warps=4
    )
    return out
