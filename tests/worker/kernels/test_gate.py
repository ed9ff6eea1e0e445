"""Gates of feed-forward layers: every variant against float64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels.gate import Gate
from tests.worker.kernels.variants import every_variant_and_triton, using

ALPHA, LIMIT = 1.7, 3.0


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (gate * ALPHA).sigmoid() * (up + 1)


GATES: dict[str, tuple[Gate, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (Gate(activation="silu"), lambda gate, up: F.silu(gate) * up),
    "gelu": (Gate(activation="gelu"), lambda gate, up: F.gelu(gate) * up),
    "gelu_tanh": (
        Gate(activation="gelu_tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ),
    "clamped": (Gate(activation="clamped_swiglu", alpha=ALPHA, limit=LIMIT), clamped_swiglu),
}


def check(
    actual: Tensor, gate: Tensor, up: Tensor, formula: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """gate, up: in float64."""
    wanted = formula(gate, up)
    rounding = 8 * torch.finfo(actual.dtype).eps
    # A gate itself is off by 1.1e-6 at most in float32, and multiplied by the other half.
    allowed = rounding * wanted.abs() + max(rounding, 2e-6) * (1 + up.abs())
    assert ((actual.double() - wanted).abs() <= allowed).all()


every_gate = pytest.mark.parametrize(("gate", "formula"), GATES.values(), ids=GATES.keys())
floats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@every_variant_and_triton
@every_gate
@given(
    rows=st.integers(0, 4),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_threads=st.sampled_from([1, 3]),
)
def test_halves_of_any_length_are_multiplied(
    variant: str,
    gate: Gate,
    formula: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    size: int,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    gate_up = (4 * torch.randn(rows, 2 * size)).to(dtype)
    before = gate_up.clone()
    with using(variant, num_threads=num_threads):
        actual = gate(gate_up)
    assert actual.shape == (rows, size)
    check(actual, *gate_up.double().chunk(2, dim=1), formula)
    assert torch.equal(gate_up, before)


@every_variant_and_triton
@every_gate
@floats
def test_gates_far_from_zero_open_or_close_and_nan_stays(
    variant: str, gate: Gate, formula: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    gates = torch.tensor([-1e38, -1000.0, -100.0, 0.0, 100.0, 1000.0, 1e38, math.nan], dtype=dtype)
    ones = torch.ones(8, dtype=dtype)
    with using(variant):
        actual = gate(torch.cat((gates, ones)).unsqueeze(0))[0]
    torch.testing.assert_close(actual[:4], torch.zeros(4, dtype=dtype), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual[4:7], formula(gates, ones)[4:7])
    assert actual[7].isnan()


@every_variant_and_triton
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_parts_of_wider_lines_are_multiplied(variant: str, is_interleaved: bool) -> None:
    """Lines that a GPU divides among several programs."""
    gate = Gate(activation="silu", is_interleaved=is_interleaved)
    wide = torch.randn(3, 2600)
    with using(variant):
        actual = gate(wide[:, 7:2507])
    torch.testing.assert_close(actual, gate.reference(wide[:, 7:2507]))


@every_variant_and_triton
@floats
def test_gates_may_alternate_with_up_elements(variant: str, dtype: torch.dtype) -> None:
    apart = torch.randn(5, 46).to(dtype)
    in_turn = torch.stack(apart.chunk(2, dim=1), dim=2).flatten(1)
    for gate, formula in GATES.values():
        alternating = Gate(**vars(gate) | {"is_interleaved": True})
        with using(variant):
            actual = alternating(in_turn)
        check(actual, *apart.double().chunk(2, dim=1), formula)


def test_a_wrong_shape_of_gate_up_is_rejected() -> None:
    for wrong in (torch.zeros(2, 7), torch.zeros(8), torch.zeros(8, 2).t()):
        with pytest.raises(ValueError, match="must be"):
            Gate(activation="silu")(wrong)
