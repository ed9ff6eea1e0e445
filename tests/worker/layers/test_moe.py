"""Mixtures of experts against a plain computation, token by token and expert by expert."""

import mmap
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.worker.kernels import huge_pages
from longshore.worker.kernels.gate import Gate
from longshore.worker.kernels.native import native
from longshore.worker.kernels.operators import num_launches
from longshore.worker.layers.moe import (
    ExpertForm,
    Experts,
    MixtureOfExperts,
    SplitExperts,
    StackedExperts,
)
from longshore.worker.layers.moe_matrices import ExpertMatrices
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.ranks.parallel import Parallel
from tests.worker.kernels.variants import TRITON, using
from tests.worker.live_memory import peak_bytes
from tests.worker.models.thread_ranks import on_every_rank

CPU = torch.device("cpu")
FORMS = {
    "split": ExpertForm(stored=SplitExperts(gate="w1", up="w3", down="w2")),
    "stacked": ExpertForm(stored=StackedExperts(), bias=True),
    "interleaved": ExpertForm(
        stored=StackedExperts(), gate=Gate(activation="silu", is_interleaved=True), bias=True
    ),
    "weighed inputs": ExpertForm(stored=StackedExperts(), weighs_inputs=True),
}


def fill(tensors: StoredTensors, checkpoint: dict[str, Tensor]) -> None:
    assert tensors.keys() == checkpoint.keys()
    for name, stored in tensors.items():
        assert stored.shape == tuple(checkpoint[name].shape)
        for place, index in stored.parts:
            place.copy_(checkpoint[name][index])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 0.5


class Reference:
    """The weights of a mixture as x @ W takes them, in float64, and what a checkpoint has of them.

    gate, up: (num_experts, size, width); down: (num_experts, width, size); biases likewise.
    """

    def __init__(self, routing: Routing, size: int, width: int, form: ExpertForm) -> None:
        self.routing, self.form = routing, form
        num = routing.num_experts
        self.router = random(num, size, seed=1) * 4
        self.gate, self.up = random(num, size, width, seed=2), random(num, size, width, seed=3)
        self.down = random(num, width, size, seed=4)
        biased = float(form.bias)
        self.gate_bias, self.up_bias = random(num, width) * biased, random(num, width) * -biased
        self.down_bias = random(num, size, seed=5) * biased

    def checkpoint(self) -> dict[str, Tensor]:
        router = {"m.gate.weight": self.router}
        match self.form.stored:
            case SplitExperts() as names:
                matrices = {names.gate: self.gate, names.up: self.up, names.down: self.down}
                return router | {
                    f"m.experts.{i}.{name}.weight": matrix.t()
                    for name, stacked in matrices.items()
                    for i, matrix in enumerate(stacked)
                }
            case StackedExperts():
                pair = torch.stack if self.form.gate.is_interleaved else torch.cat
                stored = router | {
                    "m.experts.gate_up_proj": pair([self.gate, self.up], -1).flatten(2),
                    "m.experts.down_proj": self.down,
                }
                if self.form.bias:
                    both = pair([self.gate_bias, self.up_bias], -1).flatten(1)
                    stored["m.experts.gate_up_proj_bias"] = both
                    stored["m.experts.down_proj_bias"] = self.down_bias
                return stored

    def __call__(self, x: Tensor) -> Tensor:
        out = []
        for token in x.float():
            routed = self.routing.choose((self.router @ token).unsqueeze(0))
            total = torch.zeros(x.shape[1])
            pairs = zip(routed.weights[0], routed.experts[0].tolist(), strict=True)
            for weight, expert in pairs:
                given = token * weight if self.form.weighs_inputs else token
                gate = given @ self.gate[expert] + self.gate_bias[expert]
                up = given @ self.up[expert] + self.up_bias[expert]
                answer = (F.silu(gate) * up) @ self.down[expert] + self.down_bias[expert]
                total += answer if self.form.weighs_inputs else answer * weight
            out.append(total)
        return torch.stack(out)


def mixture(reference: Reference, placement: Placement, **more: object) -> MixtureOfExperts:
    _, size, width = reference.gate.shape
    return MixtureOfExperts(size, width, reference.routing, reference.form, placement, **more)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@settings(max_examples=20)
@given(
    num_tokens=st.integers(1, 20),
    num_experts=st.integers(1, 9),
    num_shards=st.integers(1, 4),
    part=st.integers(1, 5),
    size=st.sampled_from([4, 6, 16]),
    data=st.data(),
)
def test_each_token_gets_the_output_of_its_experts_for_every_number_of_shards(
    form: ExpertForm,
    num_tokens: int,
    num_experts: int,
    num_shards: int,
    part: int,
    size: int,
    data: st.DataObject,
) -> None:
    """With lines that are and are not multiples of 16 bytes, and experts with and without
    tokens."""
    routing = Routing(
        num_experts=num_experts,
        top_k=data.draw(st.integers(1, num_experts)),
        renormalise=data.draw(st.booleans()),
    )
    reference = Reference(routing, size, part * num_shards, form)
    x = random(num_tokens, size, seed=9)

    def compute(places: list[Parallel]) -> Tensor:
        layer = mixture(reference, Placement(torch.float32, CPU, places[0]))
        fill(layer.checkpoint_tensors("m"), reference.checkpoint())
        return layer(x)

    for got in on_every_rank(num_shards, 1, compute):
        torch.testing.assert_close(got, reference(x))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_packed_matrices_give_the_same_products(
    form: ExpertForm, dtype: torch.dtype, num_tokens: int
) -> None:
    """Large enough for oneDNN's tiles where the processor has them."""
    routing = Routing(num_experts=5, top_k=2, renormalise=True)
    reference = Reference(routing, 512, 1024, form)
    for name, value in vars(reference).items():
        if isinstance(value, Tensor):
            vars(reference)[name] = (value / 8).to(dtype).float()
    placement = Placement(dtype, CPU)
    layer = mixture(reference, placement)
    fill(layer.checkpoint_tensors("m"), reference.checkpoint())
    placement.loaded()
    x = random(num_tokens, 512, seed=9).to(dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    wanted = reference(x)
    if dtype != torch.float32:
        tolerance = {"rtol": 0.0, "atol": 8 * torch.finfo(dtype).eps * float(wanted.abs().max())}
    torch.testing.assert_close(layer(x).float(), wanted, **tolerance)


@pytest.mark.skipif(
    native() is None or native().instruction_set == "generic", reason="nothing is packed"
)
def test_packing_experts_needs_a_second_copy_of_only_one_of_their_two_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huge_pages, "_arena", huge_pages._Arena())
    monkeypatch.setattr(huge_pages, "CHUNK", 0)  # each has its own memory
    monkeypatch.setattr(huge_pages, "HUGE_PAGE", mmap.PAGESIZE)
    placement = Placement(torch.float32, CPU)
    experts = Experts(16, 64, 128, FORMS["split"], placement)
    stacks = [experts.gate_up.all_stored, experts.down.all_stored]
    gate_up, down = (stack.nbytes for stack in stacks)

    def lay_out() -> None:
        stacks.clear()
        placement.loaded()

    peak = peak_bytes(lay_out, beside=stacks)
    assert 2 * gate_up + down <= peak < 1.1 * (2 * gate_up + down)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_shared_experts_compute_every_token_and_are_summed_with_the_others(num_shards: int) -> None:
    reference = Reference(Routing(num_experts=4, top_k=2), 8, 12, FORMS["split"])
    gate, up, down = random(6, 8), random(6, 8, seed=6), random(8, 6, seed=7)
    shared = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    stored = {f"m.shared_expert.{name}.weight": weight for name, weight in shared.items()}
    x = random(5, 8, seed=9)

    def compute(places: list[Parallel]) -> Tensor:
        placement = Placement(torch.float32, CPU, places[0])
        layer = mixture(reference, placement, shared_width=6, shared_name="shared_expert")
        fill(layer.checkpoint_tensors("m"), reference.checkpoint() | stored)
        return layer(x)

    wanted = reference(x) + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    for got in on_every_rank(num_shards, 1, compute):
        torch.testing.assert_close(got, wanted)


@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
def test_a_row_is_multiplied_by_the_matrix_of_its_expert_only(counts: list[int]) -> None:
    """Matrices of experts without rows are NaN, which must not reach the result."""
    matrices = ExpertMatrices(len(counts), 3, 8, Placement(torch.float32, CPU))
    for expert, count in enumerate(counts):
        matrices.stored(expert).copy_(random(3, 8, seed=expert) if count else torch.nan)
    x = random(sum(counts), 8, seed=9)
    got = matrices.product(x, torch.tensor(list(accumulate(counts)), dtype=torch.int32))
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    wanted = [matrices.stored(expert) @ row for expert, row in zip(experts, x, strict=True)]
    torch.testing.assert_close(got, torch.stack(wanted))


class Operators(TorchDispatchMode):
    """The names of the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view and func.namespace != "prim":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_mixture_on_a_gpu_never_waits_for_its_seven_launches(
    form: ExpertForm, dtype: torch.dtype
) -> None:
    """A fake tensor has no values, so it raises an error if the host reads one."""
    with using(TRITON), FakeTensorMode():
        reference = Reference(Routing(num_experts=5, top_k=2), 10, 6, form)
        placement = Placement(dtype, CPU)
        layer = mixture(reference, placement)
        placement.loaded()
        x = torch.empty(3, 10, dtype=dtype)
        with Operators() as operators:
            out = layer(x)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    widening = ["aten::_to_copy"] if dtype != torch.float32 else []
    assert operators.names == [*widening, "aten::mm", "longshore::route", "longshore::experts"]
    assert (num_launches("route"), num_launches("experts")) == (1, 4)


def choose_plainly(
    routing: Routing, scores: list[float], correction: list[float] | None
) -> dict[int, float]:
    """One token's experts and weights, from the definitions."""
    logits = torch.tensor(scores, dtype=torch.float64)
    weights = (logits.softmax(0) if routing.scoring == "softmax" else logits.sigmoid()).tolist()
    merit = (
        weights if correction is None else [w + c for w, c in zip(weights, correction, strict=True)]
    )
    per_group = routing.num_experts // routing.num_groups
    groups = [range(first, first + per_group) for first in range(0, routing.num_experts, per_group)]
    num_best = 1 if correction is None else 2
    groups.sort(key=lambda group: -sum(sorted((merit[e] for e in group), reverse=True)[:num_best]))
    eligible = [e for group in groups[: routing.top_k_groups] for e in group]
    chosen = sorted(eligible, key=lambda e: -merit[e])[: routing.top_k]
    total = sum(weights[e] for e in chosen) if routing.renormalise else 1.0
    return {e: weights[e] / total * routing.scale for e in chosen}


ROUTINGS: dict[str, Callable[..., Routing]] = {
    "softmax": lambda **common: Routing(**common),
    "sigmoid": lambda **common: Routing(scoring="sigmoid", **common),
    "grouped softmax": lambda **common: Routing(num_groups=4, top_k_groups=2, scale=16.0, **common),
    "corrected": lambda **common: Routing(scoring="sigmoid", has_correction=True, **common),
    "corrected, grouped": lambda **common: Routing(
        scoring="sigmoid", has_correction=True, num_groups=4, top_k_groups=3, scale=2.5, **common
    ),
}


@pytest.mark.parametrize("make", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("renormalise", [False, True])
@settings(max_examples=40)
@given(top_k=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_the_experts_chosen_and_their_weights_are_those_of_the_papers(
    make: Callable[..., Routing], renormalise: bool, top_k: int, seed: int
) -> None:
    routing = make(num_experts=8, top_k=top_k, renormalise=renormalise)
    scores = random(3, 8, seed=seed) * 6
    correction = random(8, seed=seed + 1) if routing.has_correction else None
    routed = routing.choose(scores, correction)
    for row, weights, experts in zip(
        scores.tolist(), routed.weights.tolist(), routed.experts.tolist(), strict=True
    ):
        wanted = choose_plainly(routing, row, None if correction is None else correction.tolist())
        assert dict(zip(experts, weights, strict=True)) == pytest.approx(wanted, rel=1e-4)


def test_a_correction_chooses_experts_of_negative_merit_inside_the_best_groups_only() -> None:
    """Excluded groups must not win with a zero in the place of their scores."""
    routing = Routing(num_experts=4, top_k=2, num_groups=2, scoring="sigmoid", has_correction=True)
    correction = torch.tensor([-3.0, -3.0, -4.0, -4.0])
    assert routing.choose(torch.zeros(1, 4), correction).experts.sort().values.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts": 4, "top_k": 5},
        {"num_experts": 4, "top_k": 0},
        {"num_experts": 8, "top_k": 3, "num_groups": 4, "top_k_groups": 1},
        {"num_experts": 6, "top_k": 1, "num_groups": 4},
        {"num_experts": 6, "top_k": 1, "num_groups": 2, "top_k_groups": 3},
        {"num_experts": 4, "top_k": 1, "num_groups": 4, "has_correction": True},
    ],
)
def test_inconsistent_numbers_of_experts_and_groups_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"cannot be chosen|must be 1 to [24],|groups have one"):
        Routing(**wrong)
