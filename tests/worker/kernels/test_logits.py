"""Logits from the products of an output head: every variant against float64."""

import math

import pytest
import torch

from longshore.worker.kernels.logits import to_logits
from tests.worker.kernels.variants import TRITON, every_variant_and_triton, using

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)


@every_variant_and_triton
@every_dtype
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 3.0), (2.0, 30.0)])
def test_logits_are_scaled_and_capped_and_padding_is_left_out(
    variant: str, dtype: torch.dtype, scale: float, cap: float | None
) -> None:
    products = 20 * torch.randn(2, 2100).to(dtype)
    wanted = products[:, :2090].double() * scale
    if cap is not None:
        wanted = (wanted / cap).tanh() * cap
    with using(variant):
        logits = to_logits(products, 2090, scale=scale, cap=cap)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=2e-6, atol=5e-6)


@every_variant_and_triton
def test_nan_stays_and_infinite_logits_are_capped(variant: str) -> None:
    products = torch.tensor([[math.nan, math.inf, -math.inf, 1e38, 0.0]]).bfloat16()
    with using(variant):
        logits = to_logits(products, 5, cap=30.0)[0]
        assert to_logits(products[:0], 5, cap=30.0).shape == (0, 5)
    assert logits[0].isnan()
    assert logits[1:].tolist() == [30.0, -30.0, 30.0, 0.0]


def test_float32_without_a_factor_is_not_copied() -> None:
    products = torch.randn(2, 7)
    with using(TRITON):
        assert to_logits(products, 5).data_ptr() == products.data_ptr()
