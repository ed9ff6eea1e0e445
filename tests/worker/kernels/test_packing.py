"""Quantised matrices in panels: the values of every format to the last bit, in every instruction
set, and products with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels import packing
from longshore.worker.kernels.embedding import embed_part, look_up
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.packing import Packing, QuantisedRows, values_of
from tests.worker.kernels.variants import NATIVE, using

FORMS = [
    packing.Q4_0,
    packing.Q4_1,
    packing.Q5_0,
    packing.Q5_1,
    packing.Q8_0,
    packing.Q4_K,
    packing.Q5_K,
    packing.Q6_K,
    packing.MXFP4,
    packing.INT4,
    packing.INT4.grouped(128),
    packing.INT8,
    packing.INT8.grouped(96),
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.name}-{form.span}")
every_variant = pytest.mark.parametrize(
    "variant",
    list(NATIVE) or [pytest.param("", marks=pytest.mark.skip(reason="kernels are not built"))],
)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def quantised(form: Packing, num_rows: int, num_records: int, seed: int = 0) -> QuantisedRows:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        1 << form.bits, (num_rows, num_records * form.span), generator=generator
    ).to(torch.uint8)
    if form.name == "fp8":
        codes[codes & 127 == 127] = 0  # no number
    header = []
    for dtype, count in form.fields:
        shape = (num_rows, num_records, count)
        if dtype.is_floating_point:
            header.append((torch.randn(shape, generator=generator) / 64).to(dtype))
        else:  # factors of few bits, or exponents around that of 1
            numbers = torch.randint(64, shape, generator=generator)
            header.append((numbers + (96 if form.name == "MXFP4" else 0)).to(dtype))
    return QuantisedRows(form, codes, tuple(header))


def packed(rows: QuantisedRows, dtype: torch.dtype, *, rounds_inputs: bool = False) -> PackedMatrix:
    shape = rows.codes.shape
    matrix = PackedMatrix.quantised(rows.packing, *shape, dtype, rounds_inputs=rounds_inputs)
    matrix.fill(0, rows)
    return matrix


def rounded(x: Tensor) -> Tensor:
    """What a product with rounded inputs takes for x, in float64."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127) / largest
    numbers = torch.where(largest > 0, (blocks * factor).round(), 0.0)
    return (numbers.double() * (largest / 127)).flatten(-2)


def inputs(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_rows, num_columns, generator=generator).to(dtype)


def product_of_all(matrix: PackedMatrix, x: Tensor, bias: Tensor) -> Tensor:
    """x: 130 or more rows. Those computed alone, or with a few others, have the same bits."""
    together = matrix.product(x, bias)
    count = len(x)
    for first, last in ((0, 1), (5, 8), (3, 17), (95, 128), (count - 1, count)):
        assert torch.equal(matrix.product(x[first:last], bias), together[first:last])
    return together


def check_close(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """To the product in float64 of what `found` was computed from."""
    weight = weight.double()
    exact = torch.nn.functional.linear(x.double(), weight, bias.double())
    atol = float((x.double().abs() @ weight.abs().T).max()) * 2**-20
    rtol = 2**-8 if found.dtype == torch.bfloat16 else 2**-20
    torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=atol)


@every_form
@every_variant
@both_dtypes
def test_a_matrix_has_the_values_of_its_format(
    form: Packing, variant: str, dtype: torch.dtype
) -> None:
    """Products with the identity have one term, so they are the values."""
    rows = quantised(form, 70, 2)
    wanted = values_of(rows).to(dtype)
    with using(variant, num_threads=2):
        matrix = packed(rows, dtype)
        identity = torch.eye(rows.codes.shape[1], dtype=dtype)
        assert torch.equal(matrix.product(identity).T, wanted)
        assert torch.equal(matrix.product(identity[3:4])[0], wanted[:, 3])
        order = torch.tensor([69, 0, 31, 32, 31], dtype=torch.int32)
        assert torch.equal(look_up(order, matrix), wanted[order])


@every_form
@every_variant
@both_dtypes
def test_a_product_has_the_bits_of_the_plain_matrix_and_those_of_each_row_alone(
    form: Packing, variant: str, dtype: torch.dtype
) -> None:
    rows = quantised(form, 70, 3)
    weight, bias = values_of(rows).to(dtype), inputs(1, 70, dtype)[0]
    x = inputs(530, rows.codes.shape[1], dtype)
    with using(variant, num_threads=2) as kernels:
        matrix = packed(rows, dtype)
        together = product_of_all(matrix, x, bias)
        if dtype == torch.float32 or (kernels is not None and kernels.multiplies_bfloat16):
            assert torch.equal(PackedMatrix.plain(weight).product(x, bias), together)
    check_close(together, x, weight, bias)


@every_form
@every_variant
@both_dtypes
def test_a_product_of_rounded_inputs_has_their_values_and_the_bits_of_each_row_alone(
    form: Packing, variant: str, dtype: torch.dtype
) -> None:
    rows = quantised(form, 70, 3)
    weight, bias = values_of(rows), inputs(1, 70, dtype)[0]
    x = inputs(230, rows.codes.shape[1], dtype)
    x[5, 32:64] = 0
    x[6] = 0
    with using(variant, num_threads=2):
        together = product_of_all(packed(rows, dtype, rounds_inputs=True), x, bias)
    check_close(together, rounded(x), weight, bias)


@every_variant
def test_what_is_not_finite_spoils_its_row_of_rounded_inputs(variant: str) -> None:
    rows = quantised(packing.Q4_K, 40, 1)
    x = inputs(4, 256, torch.float32)
    x[1, 7], x[2, 255] = torch.nan, -torch.inf
    with using(variant):
        found = packed(rows, torch.float32, rounds_inputs=True).product(x).isfinite()
    assert found.all(1).tolist() == [True, False, False, True]
    assert not found[1:3].any()


@given(
    num_rows=st.integers(0, 40),
    num_outputs=st.integers(1, 100),
    num_records=st.integers(1, 4),
    form=st.sampled_from(FORMS),
    rounds=st.booleans(),
    seed=st.integers(0, 9),
)
@pytest.mark.skipif(not NATIVE, reason="kernels are not built")
def test_any_shape_is_multiplied(
    num_rows: int, num_outputs: int, num_records: int, form: Packing, rounds: bool, seed: int
) -> None:
    rows = quantised(form, num_outputs, num_records, seed)
    x = inputs(num_rows, rows.codes.shape[1], torch.float32)
    product = packed(rows, torch.float32, rounds_inputs=rounds).product(x)
    exact = (rounded(x) if rounds else x.double()) @ values_of(rows).double().T
    assert product.shape == exact.shape
    torch.testing.assert_close(product.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not NATIVE, reason="kernels are not built")
def test_results_can_be_a_part_of_wider_lines() -> None:
    rows = quantised(packing.Q4_K, 40, 1)
    x, lines = inputs(3, 256, torch.float32), torch.full((3, 50), torch.nan)
    matrix = packed(rows, torch.float32)
    matrix.product(x, out=lines[:, 5:45])
    assert torch.equal(lines[:, 5:45], matrix.product(x))
    assert lines[:, :5].isnan().all()
    assert lines[:, 45:].isnan().all()


@pytest.mark.skipif(not NATIVE, reason="kernels are not built")
def test_a_rank_looks_up_its_own_tokens_of_a_quantised_table() -> None:
    rows = quantised(packing.Q8_0, 40, 2)
    wanted = values_of(rows)
    parts = [packed(rows.rows(torch.arange(first, first + 20)), torch.float32) for first in (0, 20)]
    token_ids = torch.tensor([0, 39, 20, 19])
    found = [embed_part(token_ids, part, 20 * i, 20) for i, part in enumerate(parts)]
    assert torch.equal(found[0] + found[1], wanted[token_ids])


@every_form
def test_panels_have_the_size_that_is_planned(form: Packing) -> None:
    matrix = packed(quantised(form, 33, 2), torch.float32)
    assert matrix.panels.nbytes == form.num_bytes(33, 2 * form.span)
    assert matrix.panels.nbytes == 64 * 2 * form.record_bytes
