"""Quantised matrices on a GPU, in Triton's interpreter: the values of every format to the last bit,
and products with them."""

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.embedding import embed_part, look_up
from longshore.worker.kernels.operators import operator_names
from longshore.worker.kernels.packing import FP8, Q4_0, Packing, QuantisedRows, values_of
from tests.worker.kernels.test_packing import FORMS, check_close, inputs, quantised
from tests.worker.kernels.variants import in_triton

every_form = pytest.mark.parametrize(
    "form", [*FORMS, FP8.grouped(128)], ids=lambda form: f"{form.name}-{form.span}"
)
OTHER_DTYPES = torch.float32, torch.float16


def on_device(
    rows: QuantisedRows, dtype: torch.dtype, *, rounds_inputs: bool = False
) -> DeviceMatrix:
    """Filled in two parts."""
    count, num_columns = rows.codes.shape
    matrix = DeviceMatrix(
        rows.packing,
        count,
        num_columns,
        dtype,
        torch.device("cpu"),
        rounds_inputs=rounds_inputs,
    )
    half = torch.arange(count // 2)
    matrix.fill(0, rows.rows(half))
    matrix.fill(len(half), rows.rows(torch.arange(len(half), count)))
    return matrix


@every_form
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DTYPES)],
    ids=str,
)
def test_a_matrix_has_the_values_of_its_format(form: Packing, dtype: torch.dtype) -> None:
    rows = quantised(form, 35, 2)
    if form.name == "MXFP4" and dtype == torch.float16:  # which has no such large numbers
        rows.header[0].clamp_(96, 127)
    wanted = values_of(rows).to(dtype)
    matrix = on_device(rows, dtype)
    identity = torch.eye(rows.codes.shape[1], dtype=dtype)
    with in_triton():
        assert torch.equal(matrix.product(identity).T, wanted)
    order = torch.tensor([34, 0, 31, 17, 31], dtype=torch.int32)
    assert torch.equal(look_up(order, matrix), wanted[order])
    assert "packed_linear" in operator_names()


@every_form
@pytest.mark.parametrize("num_rows", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_products_are_those_in_float64(form: Packing, num_rows: int) -> None:
    """Of sizes that are no multiple of a tile's."""
    rows, dtype = quantised(form, 70, 3), torch.bfloat16
    size = rows.codes.shape[1]
    x, bias = inputs(num_rows, 2 * size, dtype)[:, :size], inputs(1, 70, dtype)[0]
    matrix, memory = on_device(rows, dtype), torch.zeros(num_rows, 80, dtype=dtype)
    with in_triton():
        found = matrix.product(x, bias, out=memory[:, 5:75])
        assert torch.equal(matrix.product(x), matrix.product(x, torch.zeros_like(bias)))
    assert found.data_ptr() == memory[:, 5:].data_ptr()
    assert not memory[:, :5].any()
    assert not memory[:, 75:].any()
    check_close(found, x, values_of(rows).to(dtype), bias)


def rounded_to_fp8(x: Tensor, span: int) -> Tensor:
    """What a product with FP8 takes for x, in float64."""
    spans = x.float().unflatten(-1, (-1, span))
    scales = spans.abs().amax(-1, keepdim=True) / 448
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (spans / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * scales).flatten(-2)


@pytest.mark.parametrize(
    ("span", "num_records", "num_rows"),
    [(128, 3, 3), (32, 5, 40), (96, 2, 17), (256, 1, 130)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rounded_inputs_are_multiplied_as_their_values(
    span: int, num_records: int, num_rows: int, dtype: torch.dtype
) -> None:
    rows = quantised(FP8.grouped(span), 70, num_records)
    x = inputs(num_rows, 2 * rows.codes.shape[1], dtype)[:, ::2]
    x[1], x[2, 1] = 0, 1000
    bias = inputs(1, 70, dtype)[0]
    matrix = on_device(rows, dtype, rounds_inputs=True)
    with in_triton():
        found = matrix.product(x, bias)
        assert matrix.product(x[:0]).shape == (0, 70)
    check_close(found, rounded_to_fp8(x, span), values_of(rows), bias)
    assert torch.equal(matrix.rows(torch.arange(70)), values_of(rows).to(dtype))


def test_only_a_matrix_in_fp8_rounds_its_inputs() -> None:
    assert not on_device(quantised(Q4_0, 10, 2), torch.float32, rounds_inputs=True).rounds_inputs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_have_larger_tiles(dtype: torch.dtype) -> None:
    rows = quantised(Q4_0, 150, 5)
    x, bias = inputs(140, rows.codes.shape[1], dtype), inputs(1, 150, dtype)[0]
    matrix = on_device(rows, dtype)
    with in_triton():
        found = matrix.product(x, bias)
        assert matrix.product(x[:0], bias).shape == (0, 150)
    check_close(found, x, values_of(rows).to(dtype), bias)


def test_ranks_look_up_their_part_of_a_table() -> None:
    rows = quantised(Q4_0, 10, 2)
    matrix, wanted = on_device(rows, torch.float32), values_of(rows)
    with in_triton():
        found = embed_part(torch.tensor([19, 20, 29, 30]), matrix, first=20, num_tokens=10)
    assert torch.equal(found, torch.stack([0 * wanted[0], wanted[0], wanted[9], 0 * wanted[0]]))


def test_wrong_arguments_are_rejected() -> None:
    matrix = on_device(quantised(Q4_0, 10, 2), torch.float32)
    for x in (torch.zeros(2, 32), torch.zeros(2, 64).bfloat16()):
        with pytest.raises(ValueError, match=r"the matrix needs torch.float32 \(n, 64\)"):
            matrix.product(x)
    for bias in (torch.zeros(9), torch.zeros(10).half()):
        with pytest.raises(ValueError, match=r"the bias is .* the matrix needs"):
            matrix.product(torch.zeros(2, 64), bias)
