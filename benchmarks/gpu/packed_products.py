"""Products with matrices in the formats of quantised files: near those in float64, and how long
they take beside the product with the dequantised matrix."""

from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory
from benchmarks.gpu.results import Run
from benchmarks.gpu.timing import graph_seconds
from longshore.worker.kernels import experts, packing
from longshore.worker.kernels.device_matrix import HAS_FP8, DeviceMatrix
from longshore.worker.kernels.gate import Gate
from longshore.worker.kernels.packing import Packing, QuantisedRows

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
FORMS: Final = (
    packing.INT4.grouped(128),
    packing.INT8.grouped(128),
    packing.FP8.grouped(128),
    packing.MXFP4,
    packing.Q4_0,
    packing.Q4_1,
    packing.Q4_K,
    packing.Q6_K,
    packing.Q8_0,
)
MEASURED: Final = ("int4", "int8", "fp8", "MXFP4", "Q4_K")
SHAPE: Final = (12_288, 4096)
"""Of an 8B model's gate, for example."""
NUM_COPIES: Final = 4
"""Of a matrix: more than a cache holds."""


def check(run: Run) -> None:
    for form in FORMS:
        for dtype in DTYPES[:1] if run.is_dry else DTYPES:
            name = str(dtype).removeprefix("torch.")
            run.check(
                f"products of {form.name}, {name}",
                partial(_check, form, dtype, run.is_dry, run.device),
            )
        run.check(f"experts of {form.name}", partial(_check_experts, form, run.is_dry, run.device))
    if run.is_dry or torch.cuda.get_device_capability(run.device) >= HAS_FP8:
        run.check("products of fp8 with fp8", partial(_check_rounded, run.is_dry, run.device))


def measure(run: Run) -> None:
    num_rows, num_columns = (64, 256) if run.is_dry else SHAPE
    device = torch.device(run.device)
    has_fp8 = run.is_dry or torch.cuda.get_device_capability(device) >= HAS_FP8
    measured = [(form, False) for form in FORMS if form.name in MEASURED]
    measured += [(form, True) for form in FORMS if form.name == "fp8" and has_fp8]
    for form, rounds_inputs in measured:
        shape = num_rows, num_columns
        matrices = [
            _random(form, *shape, torch.bfloat16, device, rounds_inputs=rounds_inputs)
            for _ in range(NUM_COPIES)
        ]
        floats = [matrix.rows(torch.arange(num_rows, device=device)) for matrix in matrices]
        for count in (1, 2) if run.is_dry else (1, 16, 64, 512, 4096):
            x = torch.randn(count, num_columns, device=device, dtype=torch.bfloat16)
            packed_s = graph_seconds([partial(each.product, x) for each in matrices], device)
            plain_s = graph_seconds([partial(F.linear, x, each) for each in floats], device)
            run.figure(
                f"{count} rows{' in fp8' * rounds_inputs} times {form.name}, beside bfloat16",
                packed_s * 1e6,
                "us",
                floor=plain_s * 1e6,
            )


def _check(form: Packing, dtype: torch.dtype, is_dry: bool, device: str) -> None:
    num_columns = form.span * (2 if is_dry else 5)
    matrix = _random(form, 70, num_columns, dtype, torch.device(device))
    weight = matrix.rows(torch.arange(70, device=device)).double()
    for count in (1, 17) if is_dry else (1, 17, 64, 300):
        x, bias = (
            torch.randn(shape, device=device).to(dtype) for shape in ((count, num_columns), (70,))
        )
        exact = F.linear(x.double(), weight)
        with poisoned_memory():
            assert_near(matrix.product(x), exact)
            assert_near(matrix.product(x, bias), exact + bias.double())


def _check_rounded(is_dry: bool, device: str) -> None:
    """Products, and experts, whose relative error is a few percent: inputs have four bits."""
    form, num_experts = packing.FP8.grouped(128), 4
    dtype = torch.float32 if is_dry else torch.bfloat16
    make = partial(_random, form, dtype=dtype, device=torch.device(device), rounds_inputs=True)
    matrix, gate_up, down = (
        make(70, 640),
        make(num_experts * 512, 128),
        make(num_experts * 128, 256),
    )
    for count in (3,) if is_dry else (1, 17, 60, 120, 500):
        x = torch.randn(count, 640, device=device).to(dtype)
        weight = matrix.rows(torch.arange(70, device=device))
        with poisoned_memory():
            _assert_rounded(matrix.product(x), F.linear(x.double(), weight.double()))
        weights, chosen = torch.randn(count, num_experts, device=device).sigmoid().topk(2)
        compute = partial(
            experts.compute,
            *(x[:, :128], weights, chosen, None),
            gate=Gate(activation="silu"),
            num_experts=num_experts,
        )
        floats = [
            each.rows(torch.arange(each.num_rows, device=device)).unflatten(0, (num_experts, -1))
            for each in (gate_up, down)
        ]
        plain = compute(gate_up=floats[0], down=floats[1])
        with poisoned_memory():
            _assert_rounded(compute(gate_up=gate_up, down=down), plain.double())


def _assert_rounded(found: Tensor, exact: Tensor) -> None:
    error = float((found.double() - exact).norm() / exact.norm())
    assert 0.005 < error < 0.1, error


def _check_experts(form: Packing, is_dry: bool, device: str) -> None:
    """Near those with the dequantised matrices, in every size of tile."""
    dtype = torch.float32 if is_dry else torch.bfloat16
    num_experts, size, width, gate = 4, 2 * form.span, max(form.span, 64), Gate(activation="silu")
    of = dtype, torch.device(device)
    gate_up = _random(form, num_experts * 2 * width, size, *of)
    down = _random(form, num_experts * size, width, *of)
    floats = [
        matrix.rows(torch.arange(matrix.num_rows, device=device)).unflatten(0, (num_experts, -1))
        for matrix in (gate_up, down)
    ]
    for count in (3,) if is_dry else (1, 60, 120, 500):
        x = torch.randn(count, size, device=device).to(dtype)
        weights, chosen = torch.randn(count, num_experts, device=device).sigmoid().topk(2)
        compute = partial(experts.compute, x, weights, chosen, None)
        plain = compute(*floats, gate, num_experts=num_experts)
        with poisoned_memory():
            assert_near(compute(gate_up, down, gate, num_experts=num_experts), plain.double())


def _random(
    form: Packing,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rounds_inputs: bool = False,
) -> DeviceMatrix:
    def drawn(field: Tensor) -> Tensor:
        if field.dtype.is_floating_point:
            return (torch.randn(field.shape) / 64).to(field.dtype)
        return torch.randint(110, 125, field.shape).to(field.dtype)

    rows = QuantisedRows.zeros(form, num_rows, num_columns)
    codes = torch.randint(1 << form.bits, rows.codes.shape, dtype=torch.uint8)
    if form.name == "fp8":
        codes[codes & 127 == 127] = 0  # no number
    matrix = DeviceMatrix(form, num_rows, num_columns, dtype, device, rounds_inputs=rounds_inputs)
    matrix.fill(0, QuantisedRows(form, codes, tuple(map(drawn, rows.header))))
    return matrix
