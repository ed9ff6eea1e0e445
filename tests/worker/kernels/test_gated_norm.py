"""The gated norm of layers with states: every variant against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.kernels.gated_norm import gated_norm
from tests.worker.kernels.variants import TRITON, using

EPS = 1e-5


@pytest.mark.parametrize("is_norm_first", [False, True], ids=["gate first", "norm first"])
@pytest.mark.parametrize("variant", ["torch", TRITON])
@given(
    rows=st.integers(0, 4),
    num_groups=st.integers(1, 3),
    group_size=st.integers(1, 70) | st.just(600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    is_shared=st.booleans(),
)
def test_groups_of_any_size_are_gated_and_normalised(
    variant: str,
    is_norm_first: bool,
    rows: int,
    num_groups: int,
    group_size: int,
    dtype: torch.dtype,
    is_shared: bool,
) -> None:
    size = num_groups * group_size
    x, weight = torch.randn(rows, size), torch.randn(group_size if is_shared else size)
    gate = torch.randn(rows, size + 5).to(dtype)[:, :size]
    factor = F.silu(gate.double())
    groups = (x if is_norm_first else x * factor).double().unflatten(1, (num_groups, group_size))
    normal = groups / (groups.square().mean(2, keepdim=True) + EPS).sqrt()
    wanted = (normal * weight.double().view(-1, group_size)).flatten(1)
    if is_norm_first:
        wanted *= factor
    with using(variant):
        got = gated_norm(x, gate, weight, num_groups, EPS, is_norm_first=is_norm_first)
    assert got.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
