"""Norms with weights stored minus one, against the formula in float32."""

import pytest
import torch
from torch import Tensor

from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import OffsetRMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZE, EPS = 40, 1e-6


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loaded_norm(dtype: torch.dtype) -> tuple[OffsetRMSNorm, Tensor]:
    """The norm, and its weight as the checkpoint has it."""
    placement = Placement(dtype, torch.device("cpu"))
    norm = OffsetRMSNorm(SIZE, EPS, placement)
    stored = random(SIZE, dtype=dtype, seed=0) * 0.01
    norm.weight.copy_(stored)
    placement.loaded()
    return norm, stored


def normalised(x: Tensor, stored: Tensor) -> Tensor:
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return wide * scale * (1.0 + stored.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_weights_are_not_lost_when_one_is_added(dtype: torch.dtype) -> None:
    """Added in bfloat16, the weights here would all become one of a few values."""
    norm, stored = loaded_norm(dtype)
    x = random(7, SIZE, dtype=dtype, seed=1)
    wanted = normalised(x, stored)
    assert norm(x).dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    assert ((norm(x).double() - wanted) / wanted).abs().max() < 1.01 * rounding + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_with_the_residual_is_kept_and_normalised(dtype: torch.dtype) -> None:
    norm, _ = loaded_norm(dtype)
    x, residual = (random(7, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    total = x + residual
    wanted = norm(total)
    got, kept = norm.after_add(x, residual)
    assert kept is residual
    assert torch.equal(kept, total)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def test_without_a_residual_the_input_becomes_it() -> None:
    norm, _ = loaded_norm(torch.bfloat16)
    x = random(7, SIZE, dtype=torch.bfloat16, seed=1)
    got, kept = norm.after_add(x, None)
    assert kept is x
    assert torch.equal(got, norm(x))
