"""What a layer with latents does between its products and attention, in one launch: per token, a
program per tile of query heads, and one for the cached vector. See `worker/kernels/latents.py`."""

import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.rms_norm import normal
from longshore.worker.kernels.gpu.rotary import head_tiles, load_heads, store_heads
from longshore.worker.kernels.operators import operator


@triton.jit
def _kernel(
    q_rope_ptr,
    vectors_ptr,
    q_ptr,
    latents_ptr,
    slots_ptr,
    norm_ptr,
    positions_ptr,
    table_ptr,
    num_heads,
    q_rope_stride,
    q_rope_head_stride,
    vectors_stride,
    block_stride,
    token_stride,
    eps,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CACHED: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles_ptr = table_ptr
    if NUM_PAIRS > 0:
        angles_ptr += tl.load(positions_ptr + token) * (2 * NUM_PAIRS)
    num_tiles = tl.num_programs(1) - 1
    if tile < num_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = heads < num_heads
        lines = q_rope_ptr + token * q_rope_stride + heads * q_rope_head_stride
        first, second, rest = load_heads(
            lines,
            is_head,
            norm_ptr,
            angles_ptr,
            eps,
            ROPE,
            NUM_PAIRS,
            HEADS,
            BLOCK_P,
            BLOCK_R,
            HAS_NORM=False,
        )
        lines = q_ptr + (token * num_heads + heads) * (LATENT + ROPE) + LATENT
        store_heads(lines, is_head, first, second, rest, ROPE, NUM_PAIRS, BLOCK_P, BLOCK_R)
        return
    columns = tl.arange(0, BLOCK_L)
    is_column = columns < LATENT
    line = vectors_ptr + token * vectors_stride
    latent = tl.load(line + columns, mask=is_column, other=0.0)
    if HAS_NORM:
        wide = latent.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT + eps)
        latent = normal(wide, scale, norm_ptr, columns, is_column).to(latent.dtype)
    nothing = tl.zeros((1, 1), tl.int32)
    is_head = nothing == 0
    first, second, rest = load_heads(
        line + LATENT + nothing,
        is_head,
        norm_ptr,
        angles_ptr,
        eps,
        ROPE,
        NUM_PAIRS,
        1,
        BLOCK_P,
        BLOCK_R,
        HAS_NORM=False,
    )
    tl.debug_barrier()  # where threads share an element, all have read it
    tl.store(line + columns, latent, mask=is_column)
    store_heads(
        line + LATENT + nothing, is_head, first, second, rest, ROPE, NUM_PAIRS, BLOCK_P, BLOCK_R
    )
    if IS_CACHED:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            line = latents_ptr + block * block_stride + offset * token_stride
            tl.store(line + columns, latent, mask=is_column)
            store_heads(
                line + LATENT + nothing,
                is_head,
                first,
                second,
                rest,
                ROPE,
                NUM_PAIRS,
                BLOCK_P,
                BLOCK_R,
            )


def _fake(*_: object) -> None:
    return None


@operator(
    "latents(Tensor q_rope, Tensor(a!) vectors, Tensor(b!) q, Tensor? norm, float eps, "
    "Tensor? positions, Tensor? table, Tensor(c!)? cache, Tensor? slots) -> ()",
    fake=_fake,
)
def latents(
    q_rope: Tensor,
    vectors: Tensor,
    q: Tensor,
    norm: Tensor | None,
    eps: float,
    positions: Tensor | None,
    table: Tensor | None,
    cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    """See the wrapper."""
    num_tokens, num_heads, rope_dim = q_rope.shape
    if num_tokens == 0:
        return
    latent_dim = vectors.shape[1] - rope_dim
    num_pairs = 0 if table is None else table.shape[2]
    tiles = head_tiles(num_heads, rope_dim, num_pairs)
    _kernel[(num_tokens, triton.cdiv(num_heads, tiles.heads) + 1)](
        q_rope,
        vectors,
        q,
        cache,
        slots,
        norm,
        positions,
        table,
        num_heads,
        q_rope.stride(0),
        q_rope.stride(1),
        vectors.stride(0),
        0 if cache is None else cache.stride(0),
        0 if cache is None else cache.stride(1),
        eps,
        LATENT=latent_dim,
        ROPE=rope_dim,
        NUM_PAIRS=num_pairs,
        HEADS=tiles.heads,
        BLOCK_L=triton.next_power_of_2(latent_dim),
        BLOCK_P=tiles.first,
        BLOCK_R=tiles.rest,
        BLOCK_SIZE=1 if cache is None else cache.shape[1],
        HAS_NORM=norm is not None,
        IS_CACHED=cache is not None,
        num_warps=2,
    )
