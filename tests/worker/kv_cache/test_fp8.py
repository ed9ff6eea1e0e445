"""fp8 numbers: every conversion against the definition, bit by bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.kernels.native import Native
from longshore.worker.kernels.paged_attention import PagedAttention
from longshore.worker.kv_cache.fp8 import (
    FP8,
    KVScales,
    from_fp8,
    to_fp8,
)
from tests.worker import fp8_oracle
from tests.worker.caches import paged_kv
from tests.worker.kernels.variants import native_only

DTYPES = [torch.float32, torch.bfloat16]


def interesting() -> Tensor:
    """Every number, midpoints, their float32 neighbours, and numbers out of range."""
    numbers = fp8_oracle.NUMBERS
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [2.0**-10, 464.0, 480.0]])
    exact = exact.astype(np.float32)
    beside = [np.nextafter(exact, np.float32(to)) for to in (0, np.inf)]
    rest = np.float32([np.inf, np.nan, 1e-45, 1e-30, 3e38])
    sizes = np.concatenate([exact, *beside, rest])
    return torch.from_numpy(np.concatenate([sizes, -sizes]))


def written(kernels: Native, vectors: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The bytes that the kernel writes for keys and values (tokens, 1, head_dim)."""
    num_tokens, _, head_dim = vectors.shape
    cache = paged_kv(
        num_tokens // 4 + 2,
        num_layers=1,
        block_size=4,
        num_kv_heads=1,
        head_dim=head_dim,
        dtype=vectors.dtype,
        scales=KVScales(scale, scale),
    )
    attention = PagedAttention(kernels, cache, num_heads=1, scale=1.0)
    table = torch.arange(1, num_tokens // 4 + 2, dtype=torch.int32)[None]
    slots = 4 + torch.arange(num_tokens)
    step = attention.plan(table, slots, np.array([(0, 0, num_tokens, num_tokens)]))
    step.forward(0, AttentionInputs(vectors, vectors, vectors))
    planes = cache.planes.view(torch.uint8)[1:, 0, 0].transpose(0, 1).flatten(1, 2)
    return planes[0, :num_tokens, None], planes[1, :num_tokens, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.floats(2.0**-20, 2.0**20, width=32))
def test_torch_stores_the_nearest_number(dtype: torch.dtype, scale: float) -> None:
    for values in (interesting(), interesting() * scale):
        values = values.to(dtype)
        assert torch.equal(to_fp8(values, scale), fp8_oracle.stored(values, scale))


@native_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 64])
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20])
def test_the_kernel_stores_the_bits_that_torch_stores(
    kernels: Native, head_dim: int, dtype: torch.dtype, scale: float
) -> None:
    values = torch.cat([interesting(), interesting() * scale]).to(dtype)
    vectors = values[: len(values) // head_dim * head_dim].view(-1, 1, head_dim)
    wanted = to_fp8(vectors, scale)
    for bits in written(kernels, vectors, scale):
        assert torch.equal(bits, wanted)


@native_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_new", [1, 127])
def test_the_kernel_reads_every_number_exactly(
    kernels: Native, num_new: int, dtype: torch.dtype
) -> None:
    """With a single visible key the result is its value."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    values = from_fp8(codes, dtype).view(num_new, 1, -1)
    cache = paged_kv(
        2,
        num_layers=1,
        block_size=128,
        num_kv_heads=1,
        head_dim=values.shape[2],
        dtype=dtype,
        scales=KVScales(),
    )
    attention = PagedAttention(kernels, cache, num_heads=1, scale=1.0, window=1)
    table, slots = torch.tensor([[1]], dtype=torch.int32), 128 + torch.arange(num_new)
    step = attention.plan(table, slots, np.array([(0, 0, num_new, num_new)]))
    out = step.forward(
        0, AttentionInputs(torch.zeros_like(values), torch.zeros_like(values), values)
    )
    assert torch.equal(out.view_as(values), values)


def test_numbers_of_every_dtype_of_a_model_hold_what_was_stored() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = torch.tensor([fp8_oracle.number(code) for code in range(256)], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = from_fp8(codes, dtype).double()
        torch.testing.assert_close(numbers, wanted, rtol=0, atol=0, equal_nan=True)


def test_numbers_out_of_range_are_clamped_and_nan_stays_nan() -> None:
    values = torch.tensor([449.0, 1e30, math.inf, -math.inf, math.nan, -500.0])
    numbers = to_fp8(values, 1.0).view(FP8).float()
    assert numbers[:4].tolist() == [448.0, 448.0, 448.0, -448.0]
    assert numbers[4].isnan()
    assert numbers[5] == -448.0
