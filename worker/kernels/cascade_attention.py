"""Attention of one new token per sequence, if all sequences begin with the same blocks: the keys
and values of these are read once, not once per sequence."""

from typing import Final

from torch import Tensor

from longshore.worker.kernels import decode_attention
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.scoring import Scoring

MIN_SAVED_BYTES: Final = 32 << 20
"""Keys and values of a layer that must not be read again for the additional kernel to pay: about
10 us of memory traffic on an H100. An estimate, not measured on a device."""

SHARED_QUERIES: Final = 128
"""Queries of a program over the shared blocks; see `tiles` of the prefill kernel."""


def pays(num_rows: int, num_shared_tokens: int, token_bytes: int) -> bool:
    """Whether to read shared tokens once for a step of `num_rows` decodes. token_bytes: keys and
    values of a token, of one layer."""
    return (num_rows - 1) * num_shared_tokens * token_bytes >= MIN_SAVED_BYTES


def num_shared_splits(num_rows: int, num_heads: int, num_kv_heads: int, max_tokens: int) -> int:
    """Into how many parts the shared tokens are divided; see `num_splits` of decode attention."""
    num_tiles = -(-num_rows * num_heads // num_kv_heads // SHARED_QUERIES)
    return decode_attention.num_splits(num_tiles, num_kv_heads, max_tokens)


def cascade_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    shared: Tensor,
    scoring: Scoring,
    *,
    num_splits: int = 1,
    num_shared_splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """shared: (1,) int64, a number of tokens in whole blocks, which may be 0: the blocks of so many
               leading tokens are those of the first sequence in all others. No length is less,
               except 0; the result of such a sequence is finite, and not specified.
    scoring: with every token in reach.
    num_shared_splits: parts of the shared tokens; `num_splits`, of the others.
    The other arguments and the result: as of `decode_attention`.
    """
    if not uses_triton(q):
        return decode_attention.reference(q, keys, values, block_table, rows, lens, scoring)
    from longshore.worker.kernels.gpu import cascade_attention as gpu
    from longshore.worker.kernels.gpu.decode_attention import are_latents

    out: tuple[Tensor, Tensor] = gpu.cascade_attention(
        q,
        keys,
        values,
        block_table,
        rows,
        lens,
        shared,
        scoring.sinks,
        scoring.scale,
        scoring.softcap or 0.0,
        scoring.key_scale,
        scoring.value_scale,
        num_splits,
        num_shared_splits,
        are_latents(keys, values),
    )
    return out
