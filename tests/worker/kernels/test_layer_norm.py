"""Layer normalisation after adding to a residual: every variant against float64."""

import pytest
import torch
import torch.nn.functional as F

from longshore.worker.kernels.layer_norm import add_layer_norm
from tests.worker.kernels.variants import TRITON, using

every_variant = pytest.mark.parametrize("variant", ["torch", TRITON])  # there is no native kernel


@every_variant
@pytest.mark.parametrize("size", [1, 37, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_residual_becomes_the_sum_that_is_normalised(
    variant: str, size: int, dtype: torch.dtype
) -> None:
    """Values far from zero, whose variance is small."""
    x, residual = (torch.randn(3, size + 5).to(dtype)[:, :size], torch.randn(3, size).to(dtype) + 9)
    weight, bias = torch.randn(2, size).to(dtype)
    total = residual + x
    wanted = F.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5)
    with using(variant):
        normal = add_layer_norm(x, residual, weight, bias, 1e-5)
        nothing = add_layer_norm(x[:0], residual[:0], weight, bias, 1e-5)
    assert torch.equal(residual, total)
    assert normal.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(normal.double(), wanted, rtol=tolerance, atol=tolerance)
    assert nothing.shape == (0, size)
