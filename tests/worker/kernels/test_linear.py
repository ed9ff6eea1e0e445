"""Products with packed matrices: correct, and independent of the other rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.kernels.linear import PackedMatrix, supports
from tests.worker.kernels.variants import NATIVE, using

MULTIPLIES = [name for name in ("avx512bf16", "amx") if name in NATIVE]

pytestmark = pytest.mark.parametrize(
    "variant",
    MULTIPLIES or [pytest.param("", marks=pytest.mark.skip(reason="no products of bfloat16"))],
)


def bfloat16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@given(
    num_rows=st.integers(0, 30) | st.sampled_from([191, 193, 400]),
    num_columns=st.integers(1, 40).map(lambda pairs: 2 * pairs),
    num_outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 3]),
)
def test_a_product_is_torchs_but_for_the_order_of_its_sums(
    variant: str,
    num_rows: int,
    num_columns: int,
    num_outputs: int,
    has_bias: bool,
    num_threads: int,
) -> None:
    weight, x = bfloat16(num_outputs, num_columns, seed=1), bfloat16(num_rows, num_columns, seed=2)
    bias = bfloat16(num_outputs, seed=3) if has_bias else None
    with using(variant, num_threads=num_threads):
        y = PackedMatrix.plain(weight).product(x, bias)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert y.shape == (num_rows, num_outputs)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=num_columns * 2**-20)


def test_a_row_has_the_same_bits_alone_and_among_others(variant: str) -> None:
    weight, x = bfloat16(70, 96, seed=4), bfloat16(250, 96, seed=5)
    with using(variant, num_threads=2):
        matrix = PackedMatrix.plain(weight)
        together = matrix.product(x)
        for row in (0, 11, 12, 191, 249):
            assert torch.equal(matrix.product(x[row : row + 1])[0], together[row])
        assert torch.equal(matrix.product(x[3:17]), together[3:17])


def test_rows_may_lie_apart_and_columns_too(variant: str) -> None:
    weight, wide = bfloat16(40, 16, seed=6), bfloat16(9, 51, seed=7)
    with using(variant):
        matrix = PackedMatrix.plain(weight)
        for part in (wide[:, 2:18], wide[:, 3:19], wide[:, ::3][:, :16]):
            assert torch.equal(matrix.product(part), matrix.product(part.clone()))


def test_wrong_shapes_and_dtypes_are_rejected(variant: str) -> None:
    with using(variant):
        matrix = PackedMatrix.plain(bfloat16(4, 6, seed=8))
        for wrong in (bfloat16(2, 8, seed=9), torch.zeros(2, 6), bfloat16(6, seed=9)):
            with pytest.raises(ValueError, match=r"needs torch.bfloat16 \(n, 6\)"):
                matrix.product(wrong)
        for wrong in (bfloat16(6, seed=9), torch.zeros(4)):
            with pytest.raises(ValueError, match=r"needs torch.bfloat16 \(4,\)"):
                matrix.product(bfloat16(2, 6, seed=8), wrong)


def test_only_matrices_of_whole_pairs_in_bfloat16_are_packed(variant: str) -> None:
    with using("generic"):
        assert not supports(bfloat16(4, 6, seed=1))
    with using(variant):
        assert not supports(torch.zeros(4, 6))
        assert not supports(bfloat16(4, 5, seed=1))
