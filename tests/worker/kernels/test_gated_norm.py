"""The gated norm of Mamba layers: every variant against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.kernels.gated_norm import gated_norm
from tests.worker.kernels.variants import TRITON, using

EPS = 1e-5


@pytest.mark.parametrize("variant", ["torch", TRITON])
@given(
    rows=st.integers(0, 4),
    num_groups=st.integers(1, 3),
    group_size=st.integers(1, 70) | st.just(600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_groups_of_any_size_are_gated_and_normalised(
    variant: str, rows: int, num_groups: int, group_size: int, dtype: torch.dtype
) -> None:
    size = num_groups * group_size
    x, weight = torch.randn(rows, size), torch.randn(size)
    gate = torch.randn(rows, size + 5).to(dtype)[:, :size]
    groups = (x.double() * F.silu(gate.double())).unflatten(1, (num_groups, group_size))
    normal = groups / (groups.square().mean(2, keepdim=True) + EPS).sqrt()
    wanted = normal.flatten(1) * weight.double()
    with using(variant):
        got = gated_norm(x, gate, weight, num_groups, EPS)
    assert got.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
