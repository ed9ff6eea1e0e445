"""Attention of one new token per sequence, over a paged cache that already holds its KV."""

from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.scoring import Scoring

MIN_PROGRAMS: Final = 528
"""Programs that keep a large GPU busy: four for each of an H100's 132 multiprocessors."""

MIN_SPLIT_TOKENS: Final = 128
MAX_SPLITS: Final = 64


def num_splits(num_rows: int, num_kv_heads: int, max_tokens: int) -> int:
    """Into how many parts the context is divided, which are computed at the same time: a power of
    two, because each number is a kernel of its own, which takes time to compile. It does not depend
    on the lengths in a step, so that a graph can be replayed with others.

    max_tokens: the longest context that a token can attend to.
    """
    wanted = -(-MIN_PROGRAMS // (num_rows * num_kv_heads)) if num_rows else 1
    most = max(1, min(MAX_SPLITS, max_tokens // MIN_SPLIT_TOKENS))
    return min(1 << (wanted - 1).bit_length(), 1 << (most.bit_length() - 1))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scoring: Scoring,
    *,
    num_splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """q: (n, num_heads, head_dim), contiguous within a head.
    keys, values: (num_blocks, num_kv_heads, block_size, head_dim or value_dim), contiguous within a
                  token, in q's dtype or float8_e4m3fn; they may share memory.
    block_table:  (max_num_seqs, max_blocks) int32.
    rows, lens:   (n,) int64, the line of the table and the number of tokens of each sequence. A
                  sequence of 0 tokens reads nothing, and its result is 0.

    Returns (n, num_heads, value_dim) in q's dtype, and (n, num_heads) float32, the logarithms of
    the sums of the exponentials of scores, which merge attention over parts of a context.
    """
    if not uses_triton(q):
        return reference(q, keys, values, block_table, rows, lens, scoring)
    from longshore.worker.kernels.gpu import decode_attention as gpu

    out: tuple[Tensor, Tensor] = gpu.decode_attention(
        q,
        keys,
        values,
        block_table,
        rows,
        lens,
        scoring.sinks,
        scoring.scale,
        scoring.reach.window or 0,
        scoring.reach.chunk or 0,
        scoring.softcap or 0.0,
        scoring.key_scale,
        scoring.value_scale,
        num_splits,
        gpu.are_latents(keys, values),
    )
    return out


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Compute the same in plain torch, one sequence at a time, in float32 or q's dtype if that is
    wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scale, reach, softcap, sinks, key_scale, value_scale = scoring
    group, block_size = q.shape[1] // keys.shape[1], keys.shape[2]
    out = q.new_zeros((*q.shape[:2], values.shape[3]))
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        if length == 0:
            lse[index] = float("-inf") if sinks is None else sinks
            continue
        positions = torch.arange(max(0, reach.first_key(length - 1)), length, device=q.device)
        blocks = block_table[row, positions // block_size].long()
        k, v = (
            cache.to(wide)[blocks, :, positions % block_size].repeat_interleave(group, dim=1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,nhd->hn", q[index].to(wide), k) * (scale * key_scale)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide)[:, None]), dim=1)
        weights = scores.softmax(dim=1)[:, : len(positions)]
        out[index] = (torch.einsum("hn,nhd->hd", weights, v) * value_scale).to(q.dtype)
        lse[index] = scores.logsumexp(dim=1)
    return out, lse
