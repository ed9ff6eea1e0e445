"""silu(gate) * up: every variant against float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.kernels.silu_and_mul import silu_and_mul
from tests.worker.kernels.variants import every_variant, using


@every_variant
@given(
    rows=st.integers(0, 4),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_threads=st.sampled_from([1, 3]),
)
def test_halves_of_any_length_are_multiplied(
    variant: str, rows: int, size: int, dtype: torch.dtype, num_threads: int
) -> None:
    gate_up = (4 * torch.randn(rows, 2 * size)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    with using(variant, num_threads=num_threads):
        actual = silu_and_mul(gate_up)
    assert actual.shape == (rows, size)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=tolerance
    )


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_far_from_zero_open_or_close_and_nan_stays(variant: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([-3e38, -1000.0, -100.0, 0.0, 100.0, 1000.0, 3e38, math.nan], dtype=dtype)
    with using(variant):
        actual = silu_and_mul(torch.cat((gates, torch.ones(8, dtype=dtype))).unsqueeze(0))[0]
    torch.testing.assert_close(actual[:4], torch.zeros(4, dtype=dtype), rtol=0, atol=1e-5)
    assert torch.equal(actual[4:7], gates[4:7])
    assert actual[7].isnan()


def test_what_is_not_two_halves_is_refused() -> None:
    for wrong in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(8, 2).t()):
        with pytest.raises(ValueError, match="must be"):
            silu_and_mul(wrong)
