"""Products of one row with a matrix, in Triton's interpreter, against float64."""

import pytest
import torch
import torch.nn.functional as F

from longshore.worker.kernels.one_row import linear
from longshore.worker.kernels.operators import operator_names
from tests.worker.kernels.variants import in_triton


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_lines", "size"), [(5, 40), (9, 2100), (1, 1024), (4, 4096)])
def test_products_are_those_in_float64(num_lines: int, size: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(count, 2 * size).to(dtype)[:, :size] for count in (1, num_lines))
    bias = torch.randn(num_lines).to(dtype)
    exact = x.double() @ weight.double().T
    for given, wanted in ((None, exact), (bias, exact + bias.double())):
        with in_triton():
            got = linear(x, weight, given)
        assert got.dtype == dtype
        error = (got.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert (error < (1e-2 if dtype == torch.bfloat16 else 2e-3)).all()
    assert "one_row" in operator_names()


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(0, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)], ids=str
)
def test_other_products_are_those_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_rows, 64).to(dtype), torch.randn(9, 64).to(dtype)
    with in_triton():
        assert torch.equal(linear(x, weight), F.linear(x, weight))
