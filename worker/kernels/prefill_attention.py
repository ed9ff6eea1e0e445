"""Attention of chunks of prompts, over a paged cache that already holds their KV."""

import torch
from torch import Tensor

from longshore.worker.kernels import decode_attention
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.scoring import Scoring


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    chunks: Tensor,
    scoring: Scoring,
    *,
    max_tokens: int,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of all chunks in one launch. A token attends to itself and the tokens
    before it in its sequence, within its reach.

    q:      (n, num_heads, head_dim), contiguous within a head.
    chunks: (num_chunks, 4) int64: line of the block table, index of the first token in q, number of
            tokens, and length of the sequence, of which they are the last.
    max_tokens: of the longest chunk.
    seen:   (n,) int64: a token attends to the first of so many stored tokens of its sequence
            instead, for context parallelism. Not descending within a chunk; without window and
            chunk. The sequence's length in `chunks` is then ignored.
    The other arguments and the result: as of `decode_attention`; n tokens instead of sequences.
    """
    if not uses_triton(q):
        return reference(
            q,
            keys,
            values,
            block_table,
            chunks,
            scoring,
            seen=seen,
        )
    from longshore.worker.kernels.gpu import prefill_attention as gpu
    from longshore.worker.kernels.gpu.decode_attention import are_latents

    out: tuple[Tensor, Tensor] = gpu.prefill_attention(
        q,
        keys,
        values,
        block_table,
        chunks,
        seen,
        scoring.sinks,
        max_tokens,
        scoring.scale,
        scoring.reach.window or 0,
        scoring.reach.chunk or 0,
        scoring.softcap or 0.0,
        scoring.key_scale,
        scoring.value_scale,
        are_latents(keys, values),
    )
    return out


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    chunks: Tensor,
    scoring: Scoring,
    *,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same in plain torch: every token is a decode over the tokens that it attends
    to."""
    rows, lens = torch.zeros((2, len(q)), dtype=torch.int64, device=q.device)
    for row, first, count, length in chunks.tolist():
        rows[first : first + count] = row
        lens[first : first + count] = torch.arange(length - count + 1, length + 1)
    return decode_attention.reference(
        q,
        keys,
        values,
        block_table,
        rows,
        lens if seen is None else seen,
        scoring,
    )
