"""All experts in one call: every instruction set and Triton against the experts one by one, in
float64."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels import packing
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.experts import (
    PackedExperts,
    compute,
    down_order,
    gate_order,
    pack_down,
    pack_gate_up,
    supports,
)
from longshore.worker.kernels.gate import Gate
from longshore.worker.kernels.graph import capture
from longshore.worker.kernels.linear import PackedMatrix
from longshore.worker.kernels.native import native
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.packing import Packing, values_of
from tests.worker.kernels.test_device_matrix import rounded_to_fp8
from tests.worker.kernels.test_packing import quantised, rounded
from tests.worker.kernels.variants import NATIVE, TRITON, using

COMPUTED = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name in NATIVE
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or name == "avx512bf16"
]
every_set = pytest.mark.parametrize(("variant", "dtype"), COMPUTED)
IN_TRITON = [
    pytest.param(TRITON, dtype, id=f"{TRITON}-{dtype}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
every_set_and_triton = pytest.mark.parametrize(("variant", "dtype"), [*COMPUTED, *IN_TRITON])

CLAMPED = Gate(activation="clamped_swiglu", alpha=1.5, limit=2.0, is_interleaved=True)
GATES = [
    Gate(activation="silu"),
    Gate(activation="gelu"),
    Gate(activation="gelu_tanh", is_interleaved=True),
    CLAMPED,
]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Experts, tokens, and the choice; some experts may not be chosen."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        num_experts: int = 5,
        size: int = 34,
        width: int = 22,
        num_tokens: int = 40,
        top_k: int = 2,
        gate: Gate = GATES[0],
        has_biases: bool = False,
        has_shared: bool = False,
        weighs_inputs: bool = False,
    ) -> None:
        self.gate, self.weighs_inputs = gate, weighs_inputs
        self.gate_up = random(num_experts, 2 * width, size, seed=1, dtype=dtype) / 4
        self.down = random(num_experts, size, width, seed=2, dtype=dtype) / 4
        self.gate_up_bias = random(num_experts, 2 * width, seed=3, dtype=dtype)
        self.down_bias = random(num_experts, size, seed=4, dtype=dtype)
        self.biases = (self.gate_up_bias, self.down_bias) if has_biases else (None, None)
        self.x = random(num_tokens, size, seed=5, dtype=dtype)
        self.shared = random(num_tokens, size, seed=6, dtype=dtype) if has_shared else None
        self.weights = random(num_tokens, top_k, seed=7).sigmoid()
        self.chosen = random(num_tokens, num_experts, seed=8).topk(top_k).indices
        self.chosen[num_tokens // 2 :] = self.chosen[:1]  # some have many rows

    def packed(self) -> Callable[..., Tensor]:
        """In the form that the variant multiplies."""
        if uses_triton(self.x):
            return partial(self._in_triton, self.gate_up, self.down)
        return PackedExperts(
            pack_gate_up(self.gate_up, self.gate),
            pack_down(self.down),
            self.gate,
            num_experts=len(self.down),
            width=self.down.shape[2],
            size=self.down.shape[1],
            gate_up_bias=self.biases[0],
            down_bias=self.biases[1],
            weighs_inputs=self.weighs_inputs,
        )

    def _in_triton(
        self, gate_up: Tensor | DeviceMatrix, down: Tensor | DeviceMatrix, x: Tensor, *more: Tensor
    ) -> Tensor:
        weights, chosen, shared = (*more, None)[:3]
        return compute(
            x,
            weights,
            chosen,
            shared,
            gate_up,
            down,
            self.gate,
            num_experts=len(self.gate_up),
            gate_up_bias=self.biases[0],
            down_bias=self.biases[1],
            weighs_inputs=self.weighs_inputs,
        )

    def compute(self, packed: Callable[..., Tensor], tokens: slice = slice(None)) -> Tensor:
        shared = None if self.shared is None else self.shared[tokens]
        return packed(self.x[tokens], self.weights[tokens], self.chosen[tokens], shared)

    def exact(self, take: Callable[[Tensor], Tensor] = Tensor.double) -> Tensor:
        """take: of the inputs of a product."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        if self.shared is not None:
            out += self.shared
        for token, (weights, experts) in enumerate(zip(self.weights, self.chosen, strict=True)):
            for weight, e in zip(weights.double(), experts.tolist(), strict=True):
                x = self.x[token].double() * (weight if self.weighs_inputs else 1)
                both = self.gate_up[e].double() @ take(x)
                if self.biases[0] is not None:
                    both += self.gate_up_bias[e]
                y = self.down[e].double() @ take(self.gate.reference(both.unsqueeze(0))[0])
                if self.biases[1] is not None:
                    y += self.down_bias[e]
                out[token] += y * (1 if self.weighs_inputs else weight)
        return out


@every_set_and_triton
@settings(max_examples=25)
@given(
    num_experts=st.integers(1, 6),
    size=st.integers(1, 40).map(lambda pairs: 2 * pairs),
    width=st.integers(1, 40).map(lambda pairs: 2 * pairs),
    num_tokens=st.sampled_from([0, 1, 2, 13, 60]),
    gate=st.sampled_from(GATES),
    has_biases=st.booleans(),
    has_shared=st.booleans(),
    weighs_inputs=st.booleans(),
    num_threads=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_each_token_gets_the_weighted_sum_of_its_experts(
    variant: str,
    dtype: torch.dtype,
    num_experts: int,
    num_threads: int,
    data: st.DataObject,
    **form: object,
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    case = Case(dtype, num_experts=num_experts, top_k=top_k, **form)  # type: ignore[arg-type]
    with using(variant, num_threads=num_threads):
        got = case.compute(case.packed())
    wanted = case.exact()
    rounding = 16 * torch.finfo(dtype).eps
    largest = float(wanted.abs().amax()) if len(wanted) else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=rounding * (1 + largest))


@every_set_and_triton
def test_a_token_has_the_same_bits_alone_and_among_others(variant: str, dtype: torch.dtype) -> None:
    case = Case(dtype, num_tokens=300, size=96, width=70)
    with using(variant, num_threads=3):
        packed = case.packed()
        together = case.compute(packed)
        for token in (0, 1, 150, 299):
            assert torch.equal(case.compute(packed, slice(token, token + 1))[0], together[token])
        assert torch.equal(case.compute(packed, slice(7, 40)), together[7:40])


@every_set_and_triton
def test_a_nan_stays_in_its_token_and_in_experts_that_are_chosen(
    variant: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, num_experts=3, num_tokens=9)
    case.chosen = torch.tensor([[0, 1]]).repeat(9, 1)
    case.gate_up[2] = torch.nan
    case.x[4, 0] = torch.nan
    with using(variant):
        got = case.compute(case.packed())
    assert got[4].isnan().all()
    assert not got[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


@every_set
def test_a_replay_computes_other_tokens_with_other_experts(
    variant: str, dtype: torch.dtype
) -> None:
    case = Case(dtype, num_tokens=24, has_biases=True)
    with using(variant, num_threads=2):
        packed, kernels = case.packed(), native()
        assert kernels is not None
        wanted = case.compute(packed)
        x, weights, chosen = case.x.clone(), case.weights.clone(), case.chosen.clone()
        result, graph = capture(kernels, lambda: packed(x, weights, chosen), 24, ())
        for place, values in ((x, case.x), (weights, case.weights), (chosen, case.chosen)):
            place[:7] = values[-7:]
        graph.replay(7, ())
        assert torch.equal(result[:7], wanted[-7:])


@every_set_and_triton
def test_wrong_shapes_and_dtypes_are_rejected(variant: str, dtype: torch.dtype) -> None:
    case = Case(dtype)
    with using(variant):
        packed = case.packed()
        x, weights, chosen = case.x, case.weights, case.chosen
        with pytest.raises(ValueError, match=r"x is torch\.float64|must be contiguous"):
            packed(x.double(), weights, chosen)
        with pytest.raises(ValueError, match=r"shared is .* the experts need .*\(40, 34\)"):
            packed(x, weights, chosen, x[:, :33])
        with pytest.raises(ValueError, match="weights are"):
            packed(x, weights[:, :1], chosen)
        with pytest.raises(ValueError, match="contiguous"):
            packed(x, weights, chosen.int())


@pytest.mark.parametrize("top_k", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_token_has_the_same_result_in_every_size_of_tile(top_k: int) -> None:
    """Up to 128 pairs per tile, and every number of tiles from none to several per expert."""
    case = Case(torch.float16, num_experts=8, num_tokens=260, top_k=top_k, size=40, width=70)
    wanted = case.exact()
    with using(TRITON):
        packed = case.packed()
        for count in (1, 15, 16, 17, 40, 130, 260):
            got = case.compute(packed, slice(0, count)).double()
            torch.testing.assert_close(got, wanted[:count], rtol=0, atol=0.02)


def test_more_experts_than_pairs_are_computed() -> None:
    case = Case(torch.float32, num_experts=300, num_tokens=3, top_k=9, has_shared=True)
    with using(TRITON):
        got = case.compute(case.packed())
    torch.testing.assert_close(got.double(), case.exact(), rtol=0, atol=1e-4)


def test_matrices_that_do_not_fit_each_other_are_rejected() -> None:
    case = Case(torch.float32)
    with using(TRITON):
        with pytest.raises(ValueError, match=r"gate_up \(5, 44, 30\) does not fit"):
            case._in_triton(case.gate_up[:, :, :30], case.down, case.x, case.weights, case.chosen)
        with pytest.raises(ValueError, match=r"must be contiguous torch\.float32"):
            case._in_triton(case.gate_up, case.down.half(), case.x, case.weights, case.chosen)


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_quantised_experts_are_multiplied(
    variant: str, rounds_inputs: bool, weighs_inputs: bool
) -> None:
    case = Case(torch.float32, size=64, width=96, num_tokens=30, weighs_inputs=weighs_inputs)
    orders = gate_order(96, case.gate), down_order(64)
    matrices = []
    for floats, order, form in zip(
        (case.gate_up, case.down), orders, (packing.Q4_0, packing.Q8_0), strict=True
    ):
        experts = [quantised(form, floats.shape[1], floats.shape[2] // 32, e) for e in range(5)]
        for expert, rows in zip(floats, experts, strict=True):
            expert.copy_(values_of(rows))
        matrix = PackedMatrix.quantised(
            form, 5 * len(order), floats.shape[2], torch.float32, rounds_inputs=rounds_inputs
        )
        for e, rows in enumerate(experts):
            matrix.fill(e * len(order), rows.rows(order))
        matrices.append(matrix)
    assert all((order >= 0).all() for order in orders)
    with using(variant, num_threads=2):
        packed = PackedExperts(
            *matrices, case.gate, num_experts=5, width=96, size=64, weighs_inputs=weighs_inputs
        )
        together = case.compute(packed)
        assert torch.equal(case.compute(packed, slice(3, 5)), together[3:5])
    take = rounded if rounds_inputs else Tensor.double
    wanted = case.exact(take)
    torch.testing.assert_close(together.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [3, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("forms", [(packing.Q6_K, packing.Q4_1), (packing.MXFP4, None)], ids=str)
@pytest.mark.parametrize("gate", [GATES[0], CLAMPED], ids=["halves", "interleaved"])
def test_quantised_experts_are_multiplied_in_triton(
    gate: Gate, forms: tuple[Packing | None, ...], num_tokens: int
) -> None:
    """Those of one matrix may be floats."""
    size = 256
    case = Case(
        torch.float32, size=size, width=96, num_tokens=num_tokens, gate=gate, has_biases=True
    )
    matrices: list[Tensor | DeviceMatrix] = []
    for floats, form in zip((case.gate_up, case.down), forms, strict=True):
        if form is None:
            matrices.append(floats)
            continue
        lines = floats.flatten(0, 1)
        rows = quantised(form, len(lines), lines.shape[1] // form.span)
        rows.header[0].div_(4) if form.fields[0][0].is_floating_point else rows.header[0].sub_(40)
        lines.copy_(values_of(rows))
        matrix = DeviceMatrix(form, *lines.shape, torch.float32, torch.device("cpu"))
        matrix.fill(0, rows)
        matrices.append(matrix)
    with using(TRITON):
        got = case._in_triton(*matrices, case.x, case.weights, case.chosen)
        plain = case._in_triton(case.gate_up, case.down, case.x, case.weights, case.chosen)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("num_tokens", [3, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("gate", "weighs_inputs"), [(GATES[0], True), (CLAMPED, False)], ids=["halves", "interleaved"]
)
def test_experts_in_fp8_are_multiplied_by_rounded_inputs_in_triton(
    gate: Gate, weighs_inputs: bool, num_tokens: int
) -> None:
    case = Case(
        torch.float32,
        size=256,
        width=96,
        num_tokens=num_tokens,
        gate=gate,
        has_biases=True,
        has_shared=True,
        weighs_inputs=weighs_inputs,
    )
    matrices = []
    for floats, span in ((case.gate_up, 128), (case.down, 32)):
        lines = floats.flatten(0, 1)
        rows = quantised(packing.FP8.grouped(span), len(lines), lines.shape[1] // span)
        rows.header[0].div_(16)
        lines.copy_(values_of(rows))
        device = torch.device("cpu")
        matrix = DeviceMatrix(rows.packing, *lines.shape, torch.float32, device, rounds_inputs=True)
        matrix.fill(0, rows)
        matrices.append(matrix)
    with using(TRITON):
        found = case.compute(partial(case._in_triton, *matrices)).double()
    exact = case.exact()
    wanted = case.exact(lambda x: rounded_to_fp8(x, 128 if len(x) == 256 else 32))
    # An element of what is between the matrices may be rounded to the next number.
    assert (found - wanted).norm() < 3e-3 * exact.norm()
    assert (found - exact).norm() > 1e-2 * exact.norm()


@pytest.mark.skipif("avx512bf16" not in NATIVE, reason="the processor has no such products")
def test_what_is_packed_is_what_a_kernel_multiplies() -> None:
    def both(size: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 2 * width, size, dtype=dtype), torch.zeros(
            2, size, width, dtype=dtype
        )

    with using("avx2"):
        assert supports(*both(3, 5, torch.float32))
        assert not supports(*both(4, 4, torch.bfloat16))
    with using("avx512bf16"):
        assert not supports(*both(4, 5, torch.bfloat16))
        assert not supports(*both(5, 4, torch.bfloat16))
        assert not supports(*both(4, 4, torch.float16))
    for variant in ("torch", "generic"):
        with using(variant):
            assert not supports(*both(4, 4, torch.float32))
