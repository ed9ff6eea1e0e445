"""Root mean square normalisation: every variant against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels.rms_norm import add_rms_norm, rms_norm
from tests.worker.kernels.variants import every_variant_and_triton, using

EPS = 1e-5
SIZES = st.integers(1, 70) | st.sampled_from([128, 1000])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def expected(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """With a tolerance for rounding twice to the dtype, before and after the weight."""
    tolerance = 4 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@every_variant_and_triton
@given(rows=st.integers(0, 5), size=SIZES, dtype=DTYPES)
def test_lines_of_any_length_are_normalised(
    variant: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    wanted = expected(x, weight)
    with using(variant):
        assert_close(rms_norm(x, weight, EPS), wanted)


@every_variant_and_triton
@given(rows=st.integers(1, 5), size=SIZES, dtype=DTYPES)
def test_the_residual_becomes_the_sum_that_is_normalised(
    variant: str, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    total = x + residual
    with using(variant):
        normal = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert_close(normal, expected(total, weight))


@every_variant_and_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@given(rows=st.integers(1, 5), size=SIZES, has_residual=st.booleans())
def test_a_wider_weight_multiplies_what_is_not_rounded_yet(
    variant: str, dtype: torch.dtype, rows: int, size: int, has_residual: bool
) -> None:
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size)
    total = x + residual if has_residual else x
    wanted = expected(total, weight)
    with using(variant):
        if has_residual:
            actual = add_rms_norm(x, residual, weight, EPS)
        else:
            actual = rms_norm(x, weight, EPS)
    assert actual.dtype == dtype
    once = 1.01 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), wanted, rtol=once, atol=1e-6)


@every_variant_and_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_wide_weights", [False, True])
def test_two_norms_and_the_sum_between_them_are_those_of_three_calls(
    variant: str, dtype: torch.dtype, has_wide_weights: bool
) -> None:
    x, residual = torch.randn(2, 3, 300).to(dtype)
    first, second = torch.randn(2, 300).to(torch.float32 if has_wide_weights else dtype)
    with using("torch"):
        wanted_residual = residual + rms_norm(x, first, EPS)
        wanted = rms_norm(wanted_residual, second, EPS)
    with using(variant):
        actual = add_rms_norm(x, residual, second, EPS, first_weight=first)
    tolerance = 4 * torch.finfo(dtype).eps
    for one, other in ((residual, wanted_residual), (actual, wanted)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@every_variant_and_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_is_added_to_the_result(variant: str, dtype: torch.dtype) -> None:
    x, added = torch.randn(2, 3, 300).to(dtype)
    weight = torch.randn(300).to(dtype)
    before = added.clone()
    with using("torch"):
        wanted = added + rms_norm(x, weight, EPS)
    with using(variant):
        actual = rms_norm(x, weight, EPS, added=added)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(added, before)


@every_variant_and_triton
def test_a_part_of_wider_lines_and_heads_of_lines_are_normalised(variant: str) -> None:
    wide = torch.randn(7, 100)
    part, heads = wide[:, 20:84], wide[:, :96].view(7, 3, 32)
    with using(variant):
        assert_close(rms_norm(part, torch.ones(64), EPS), expected(part, torch.ones(64)))
        assert_close(rms_norm(heads, torch.ones(32), EPS), expected(heads, torch.ones(32)))


@every_variant_and_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_line_depends_neither_on_its_neighbours_nor_on_the_threads(
    variant: str, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(300, 515).to(dtype), torch.randn(515).to(dtype)
    x[17, 3] = torch.nan
    with using(variant, num_threads=3):
        together = rms_norm(x, weight, EPS)
    with using(variant):
        alone = torch.cat([rms_norm(line, weight, EPS) for line in x.split(1)])
    assert torch.equal(together[17].isnan(), torch.ones(515, dtype=torch.bool))
    torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
    assert together.isnan().sum() == 515


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"must be torch.float32 or torch.float32 \(8,\)"):
        rms_norm(x, torch.ones(7), EPS)
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16"):
        rms_norm(x, torch.ones(8).bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"weight is torch.float64"):
        rms_norm(x, torch.ones(8).double(), EPS)
    with pytest.raises(ValueError, match=r"the residual, torch.float32"):
        add_rms_norm(x, torch.zeros(3, 8), torch.ones(8), EPS)
    with pytest.raises(ValueError, match=r"the weight is torch.float32 \(7,\)"):
        add_rms_norm(x, x.clone(), torch.ones(8), EPS, first_weight=torch.ones(7))
