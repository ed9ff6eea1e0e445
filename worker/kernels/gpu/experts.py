"""A mixture of experts in four launches whose sizes depend on the number of tokens only, so that
they can be captured in a CUDA graph. See `worker/kernels/experts.py`.

A pair is a token with one of its experts: pair = token * top_k + rank. Pairs are sorted by expert;
a tile is some consecutive pairs of one expert. There are as many programs as there can be tiles;
those beyond the last tile return at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.device_matrix import Coding
from longshore.worker.kernels.gpu import round_rows
from longshore.worker.kernels.gpu.gate import activated, factor
from longshore.worker.kernels.gpu.packed import (
    add_product_of_fp8,
    codes_of,
    columns_of,
    constants_of,
    inputs_of_tile,
    weights_of,
)
from longshore.worker.kernels.operators import operator


# Numbers that vary from step to step are not specialised: a multiple of 16 would be compiled anew.
@triton.jit(do_not_specialize=["num_pairs"])
def _sort(chosen_ptr, pairs_ptr, starts_ptr, num_pairs, num_experts, BLOCK: tl.constexpr):
    """A program per expert. pairs: sorted, in order within an expert; starts: (num_experts + 1,),
    of each expert in `pairs`."""
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    num_before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        is_inside = first + places < num_pairs
        chosen = tl.load(chosen_ptr + first + places, mask=is_inside, other=num_experts)
        num_before += (chosen < expert).to(tl.int32)
    place = tl.sum(num_before, axis=0)
    tl.store(starts_ptr + expert, place)
    if expert == num_experts - 1:
        tl.store(starts_ptr + num_experts, num_pairs)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + places
        chosen = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=num_experts)
        is_own = (chosen == expert).to(tl.int32)
        ranks = tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + place + ranks, pairs, mask=is_own == 1)
        place += tl.sum(is_own, axis=0)


@triton.jit
def _tile_and_column(num_tiles, num_columns, GROUP: tl.constexpr):
    """Neighbouring programs compute a group of tiles, so that tiles of one expert read its matrix,
    and columns of one tile read its rows, from the L2 cache."""
    program = tl.program_id(0)
    group = program // (GROUP * num_columns)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    place = program - group * GROUP * num_columns
    return group * GROUP + place % size, place // size


@triton.jit
def _expert_of(tile, starts_ptr, num_experts, BLOCK_E: tl.constexpr, TILE: tl.constexpr):
    """The tile's expert, which is num_experts or more beyond the last tile, and the first of its
    sorted pairs."""
    experts = tl.arange(0, BLOCK_E)
    is_inside = experts < num_experts
    starts = tl.load(starts_ptr + experts, mask=is_inside, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=is_inside, other=0)
    tiles = tl.cumsum((ends - starts + TILE - 1) // TILE, axis=0)
    is_before = tiles <= tile
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(is_before, tiles, 0), axis=0)
    start = tl.sum(tl.where(experts == expert, starts, 0), axis=0)
    return expert, start + (tile - first_tile) * TILE


@triton.jit
def _stored(
    matrices_ptr,
    lines,
    first,
    size,
    PARTS: tl.constexpr,
    CODING: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """Of rows of all matrices: floats, (inputs, rows), or the codes of `weights_of`."""
    if CODING >= 0:
        stored = codes_of(matrices_ptr, lines, first, size, PARTS, COUNT, HAS_TAIL)
    else:
        at = first + tl.arange(0, COUNT)[:, None]
        places = matrices_ptr + lines.to(tl.int64)[None, :] * size + at
        stored = tl.load(places, mask=at < size, other=0.0) if HAS_TAIL else tl.load(places)
    return stored


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(
    x_ptr,
    x_scales_ptr,
    weights_ptr,
    matrices_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    pairs_ptr,
    starts_ptr,
    hidden_ptr,
    num_experts,
    num_tiles,
    size,
    width,
    x_stride,
    alpha,
    limit,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    MIDDLE: tl.constexpr,
    CODING: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    WEIGHS_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, column = _tile_and_column(num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    expert, first = _expert_of(tile, starts_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(starts_ptr + expert + 1)
    pairs = tl.load(pairs_ptr + places, mask=is_row, other=0)
    outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and outputs beyond the end compute something valid, which is not stored.
    gates = tl.where(outputs < width, outputs, 0)
    if IS_INTERLEAVED:
        gates = 2 * gates
        ups = gates + 1
    else:
        ups = gates + width
    tokens = (pairs // TOP_K).to(tl.int64)
    x_lines = x_ptr + tokens[:, None] * x_stride
    gates += expert * 2 * width
    ups += expert * 2 * width
    COUNT: tl.constexpr = BLOCK_K // PARTS
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if WEIGHS_INPUTS:
        weights = tl.load(weights_ptr + pairs)
    for k in range(0, size, BLOCK_K):
        if IS_ROUNDED:
            scale_lines = x_scales_ptr + tokens * (size // SPAN)
            gate = add_product_of_fp8(
                gate, x_lines, scale_lines, matrices_ptr, scales_ptr, gates, k, size, SPAN, COUNT
            )
            up = add_product_of_fp8(
                up, x_lines, scale_lines, matrices_ptr, scales_ptr, ups, k, size, SPAN, COUNT
            )
        else:
            g = _stored(matrices_ptr, gates, k, size, PARTS, CODING, COUNT, HAS_TAIL)
            u = _stored(matrices_ptr, ups, k, size, PARTS, CODING, COUNT, HAS_TAIL)
            for part in tl.static_range(PARTS):
                at = columns_of(k, part, PARTS, COUNT)[None, :]
                if HAS_TAIL:
                    x = tl.load(x_lines + at, mask=at < size, other=0.0)
                else:
                    x = tl.load(x_lines + at)
                if WEIGHS_INPUTS:
                    x = (x.to(tl.float32) * weights[:, None]).to(x.dtype)
                if CODING < 0:
                    gate = tl.dot(x, g, gate, input_precision="ieee")
                    up = tl.dot(x, u, up, input_precision="ieee")
                else:
                    gate_weights = weights_of(
                        g, part, scales_ptr, offsets_ptr, gates, k, size,
                        PARTS, SPAN, MIDDLE, CODING, COUNT, HAS_TAIL,
                    )  # fmt: skip
                    up_weights = weights_of(
                        u, part, scales_ptr, offsets_ptr, ups, k, size,
                        PARTS, SPAN, MIDDLE, CODING, COUNT, HAS_TAIL,
                    )  # fmt: skip
                    gate = tl.dot(x, gate_weights.to(x.dtype), gate, input_precision="ieee")
                    up = tl.dot(x, up_weights.to(x.dtype), up, input_precision="ieee")
    if IS_ROUNDED and WEIGHS_INPUTS:
        gate *= weights[:, None]
        up *= weights[:, None]
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gates).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + ups).to(tl.float32)[None, :]
    gated = activated(gate, alpha, limit, ACTIVATION) * factor(up, limit, ACTIVATION)
    out = gated.to(hidden_ptr.dtype.element_ty)
    tl.store(
        hidden_ptr + places.to(tl.int64)[:, None] * width + outputs[None, :],
        out,
        mask=is_row[:, None] & (outputs < width)[None, :],
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _down(
    hidden_ptr,
    hidden_scales_ptr,
    weights_ptr,
    matrices_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    pairs_ptr,
    starts_ptr,
    out_ptr,
    num_experts,
    num_tiles,
    size,
    width,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    MIDDLE: tl.constexpr,
    CODING: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    WEIGHS_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out: (num_pairs, size), in the order of tokens."""
    tile, column = _tile_and_column(num_tiles, tl.cdiv(size, BLOCK_N), GROUP)
    expert, first = _expert_of(tile, starts_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < tl.load(starts_ptr + expert + 1)
    pairs = tl.load(pairs_ptr + places, mask=is_row, other=0)
    outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = expert * size + tl.where(outputs < size, outputs, 0)
    hidden_rows = tl.where(is_row, places, first).to(tl.int64)
    hidden_lines = hidden_ptr + hidden_rows[:, None] * width
    COUNT: tl.constexpr = BLOCK_K // PARTS
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, width, BLOCK_K):
        if IS_ROUNDED:
            scale_lines = hidden_scales_ptr + hidden_rows * (width // SPAN)
            out = add_product_of_fp8(
                out, hidden_lines, scale_lines, matrices_ptr, scales_ptr, lines, k, width,
                SPAN, COUNT,
            )  # fmt: skip
        else:
            d = _stored(matrices_ptr, lines, k, width, PARTS, CODING, COUNT, HAS_TAIL)
            for part in tl.static_range(PARTS):
                at = columns_of(k, part, PARTS, COUNT)[None, :]
                if HAS_TAIL:
                    x = tl.load(hidden_lines + at, mask=at < width, other=0.0)
                else:
                    x = tl.load(hidden_lines + at)
                if CODING < 0:
                    out = tl.dot(x, d, out, input_precision="ieee")
                else:
                    weights = weights_of(
                        d, part, scales_ptr, offsets_ptr, lines, k, width,
                        PARTS, SPAN, MIDDLE, CODING, COUNT, HAS_TAIL,
                    )  # fmt: skip
                    out = tl.dot(x, weights.to(x.dtype), out, input_precision="ieee")
    if HAS_BIAS:
        out += tl.load(bias_ptr + lines).to(tl.float32)[None, :]
    if not WEIGHS_INPUTS:
        out *= tl.load(weights_ptr + pairs)[:, None]
    tl.store(
        out_ptr + pairs.to(tl.int64)[:, None] * size + outputs[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (outputs < size)[None, :],
    )


@triton.jit
def _sum(
    by_pair_ptr,
    shared_ptr,
    out_ptr,
    size,
    shared_stride,
    HAS_SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds in the order of ranks, so that a token has the same bits in every batch."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        line = by_pair_ptr + (token * TOP_K + rank) * size
        total += tl.load(line + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + columns, mask=is_inside, other=0.0)
        total += shared.to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * size + columns, out, mask=is_inside)


@dataclass(frozen=True)
class _Tiling:
    """Pairs, outputs of either product, and columns per tile, and how it is computed."""

    pairs: int
    gate_up_outputs: int
    down_outputs: int
    columns: int
    num_warps: int
    num_stages: int


def _tiling(num_pairs: int, num_experts: int, dtype: torch.dtype) -> _Tiling:
    """The tile fits the pairs that an expert has on average: more would compute nothing, and fewer
    would read its matrices repeatedly."""
    mean = triton.next_power_of_2(-(-num_pairs // num_experts))
    if dtype == torch.float32:  # without tensor cores: registers and shared memory limit the tile
        return _Tiling(min(max(mean, 16), 64), 32, 64, 32, 4, 2)
    match min(max(mean, 16), 128):
        case 16:  # narrow, so that a few tiles occupy all multiprocessors
            return _Tiling(16, 32, 64, 64, 4, 4)
        case 32:
            return _Tiling(32, 64, 64, 64, 4, 4)
        case 64:
            return _Tiling(64, 64, 128, 64, 4, 3)
        case _:
            return _Tiling(128, 64, 128, 64, 8, 3)


def _max_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """Every expert with pairs has at most one tile that is not full."""
    return (num_pairs + (tile - 1) * min(num_experts, num_pairs)) // tile


def _fake(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_offsets: Tensor | None,
    gate_up_bits: int,
    gate_up_coding: int,
    down: Tensor,
    down_scales: Tensor | None,
    down_offsets: Tensor | None,
    down_bits: int,
    down_coding: int,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    num_experts: int,
    width: int,
    activation: int,
    alpha: float,
    limit: float,
    is_interleaved: bool,
    weighs_inputs: bool,
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(
    "experts(Tensor x, Tensor weights, Tensor chosen, "
    "Tensor gate_up, Tensor? gate_up_scales, Tensor? gate_up_offsets, int gate_up_bits, "
    "int gate_up_coding, Tensor down, Tensor? down_scales, Tensor? down_offsets, int down_bits, "
    "int down_coding, Tensor? gate_up_bias, Tensor? down_bias, Tensor? shared, int num_experts, "
    "int width, int activation, float alpha, float limit, bool is_interleaved, bool weighs_inputs)"
    " -> Tensor",
    fake=_fake,
    launches=4,
)
def experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_offsets: Tensor | None,
    gate_up_bits: int,
    gate_up_coding: int,
    down: Tensor,
    down_scales: Tensor | None,
    down_offsets: Tensor | None,
    down_bits: int,
    down_coding: int,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    num_experts: int,
    width: int,
    activation: int,
    alpha: float,
    limit: float,
    is_interleaved: bool,
    weighs_inputs: bool,
) -> Tensor:
    """x, shared: (n, size), each line contiguous; the others contiguous. gate_up, down: see
    `constants_of`; with all experts below each other. Returns (n, size)."""
    return _launch(
        x,
        None,
        weights,
        chosen,
        _Stored(gate_up, gate_up_scales, gate_up_offsets, gate_up_bits, gate_up_coding),
        _Stored(down, down_scales, down_offsets, down_bits, down_coding),
        gate_up_bias,
        down_bias,
        shared,
        num_experts,
        width,
        (activation, alpha, limit),
        is_interleaved,
        weighs_inputs,
        x.dtype,
    )


def _fake_of_fp8(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    num_experts: int,
    width: int,
    activation: int,
    alpha: float,
    limit: float,
    is_interleaved: bool,
    weighs_inputs: bool,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@operator(
    "experts_of_fp8(Tensor x, Tensor x_scales, Tensor weights, Tensor chosen, Tensor gate_up, "
    "Tensor gate_up_scales, Tensor down, Tensor down_scales, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor? shared, int num_experts, int width, int activation, float alpha, "
    "float limit, bool is_interleaved, bool weighs_inputs, ScalarType dtype) -> Tensor",
    fake=_fake_of_fp8,
    launches=5,
)
def experts_of_fp8(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    num_experts: int,
    width: int,
    activation: int,
    alpha: float,
    limit: float,
    is_interleaved: bool,
    weighs_inputs: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same with x and x_scales as `round_rows` makes them, with the span of gate_up, and both
    matrices in FP8; what is between them is rounded, too. dtype: of the result."""
    return _launch(
        x,
        x_scales,
        weights,
        chosen,
        _Stored(gate_up, gate_up_scales, None, 8, Coding.FP8),
        _Stored(down, down_scales, None, 8, Coding.FP8),
        gate_up_bias,
        down_bias,
        shared,
        num_experts,
        width,
        (activation, alpha, limit),
        is_interleaved,
        weighs_inputs,
        dtype,
    )


class _Stored(NamedTuple):
    """Matrices of all experts, see `constants_of`."""

    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    bits: int
    coding: int

    @property
    def memory(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.codes, self.scales, self.offsets

    def constants(self, size: int) -> tuple[int, int, int, int]:
        return constants_of(self.codes, self.scales, self.bits, self.coding, size)


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    weights: Tensor,
    chosen: Tensor,
    gate_up: _Stored,
    down: _Stored,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    num_experts: int,
    width: int,
    gate: tuple[int, float, float],
    is_interleaved: bool,
    weighs_inputs: bool,
    dtype: torch.dtype,
) -> Tensor:
    """gate: activation, alpha and limit."""
    (num_tokens, top_k), size = chosen.shape, x.shape[1]
    gate_up_constants, down_constants = gate_up.constants(size), down.constants(width)
    activation, alpha, limit = gate
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * top_k
    pairs = torch.empty((num_pairs,), dtype=torch.int32, device=x.device)
    starts = torch.empty((num_experts + 1,), dtype=torch.int32, device=x.device)
    block = min(max(triton.next_power_of_2(num_pairs), 32), 2048)
    _sort[(num_experts,)](
        chosen, pairs, starts, num_pairs, num_experts, BLOCK=block, num_warps=min(block // 32, 8)
    )
    tiling = _tiling(num_pairs, num_experts, x.dtype)
    num_tiles = _max_tiles(num_pairs, num_experts, tiling.pairs)
    columns, down_columns, down_outputs = tiling.columns, tiling.columns, tiling.down_outputs
    if x_scales is not None:
        down_outputs = min(down_outputs, 64)  # the products before they are scaled need registers
        columns = inputs_of_tile(columns, gate_up_constants[1])
        down_columns = inputs_of_tile(down_columns, down_constants[1])
    common = {
        "GROUP": 8,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tiling.pairs,
        "IS_ROUNDED": x_scales is not None,
        "WEIGHS_INPUTS": weighs_inputs,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    hidden = torch.empty((num_pairs, width), dtype=dtype, device=x.device)
    _gate_up[(num_tiles * triton.cdiv(width, tiling.gate_up_outputs),)](
        x,
        x_scales,
        weights,
        *gate_up.memory,
        gate_up_bias,
        pairs,
        starts,
        hidden,
        num_experts,
        num_tiles,
        size,
        width,
        x.stride(0),
        alpha,
        limit,
        *gate_up_constants,
        TOP_K=top_k,
        ACTIVATION=activation,
        IS_INTERLEAVED=is_interleaved,
        HAS_BIAS=gate_up_bias is not None,
        HAS_TAIL=size % columns != 0,
        BLOCK_N=tiling.gate_up_outputs,
        BLOCK_K=columns,
        **common,
    )
    hidden_scales = None
    if x_scales is not None:
        hidden, hidden_scales = round_rows.launch(hidden, down_constants[1])
    by_pair = torch.empty((num_pairs, size), dtype=dtype, device=x.device)
    _down[(num_tiles * triton.cdiv(size, down_outputs),)](
        hidden,
        hidden_scales,
        weights,
        *down.memory,
        down_bias,
        pairs,
        starts,
        by_pair,
        num_experts,
        num_tiles,
        size,
        width,
        *down_constants,
        HAS_BIAS=down_bias is not None,
        HAS_TAIL=width % down_columns != 0,
        BLOCK_N=down_outputs,
        BLOCK_K=down_columns,
        **common,
    )
    block = min(triton.next_power_of_2(size), 1024)
    _sum[(num_tokens, triton.cdiv(size, block))](
        by_pair,
        shared,
        out,
        size,
        0 if shared is None else shared.stride(0),
        HAS_SHARED=shared is not None,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out
