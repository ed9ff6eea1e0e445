"""The choice of experts: every instruction set and Triton against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels.graph import capture
from longshore.worker.kernels.native import native
from longshore.worker.layers.moe_router import Router, Routing
from longshore.worker.layers.placement import Placement
from tests.worker.kernels.variants import NATIVE, TRITON, using

every_set = pytest.mark.parametrize("variant", NATIVE)
every_set_and_triton = pytest.mark.parametrize("variant", [*NATIVE, TRITON])


def make_router(routing: Routing, size: int, *, seed: int = 0) -> Router:
    router = Router(size, routing, Placement(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(seed)
    for weight in (router.weight, router.bias, router.correction):
        if weight is not None:
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return router


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    has_correction = draw(st.booleans())
    num_groups = draw(st.integers(1, 4))
    per_group = draw(st.integers(2 if has_correction else 1, 6))
    top_k_groups = draw(st.integers(1, num_groups))
    return Routing(
        num_experts=num_groups * per_group,
        top_k=draw(st.integers(1, min(5, top_k_groups * per_group))),
        scoring=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        has_bias=draw(st.booleans()),
        has_correction=has_correction,
    )


def least_gap(router: Router, x: Tensor) -> float:
    """The smallest difference between the merits of two experts, or of two groups, of one token."""
    routing = router.routing
    scores = F.linear(x.double(), router.weight.double())
    if router.bias is not None:
        scores += router.bias
    merits = scores.softmax(1) if routing.scoring == "softmax" else scores.sigmoid()
    if router.correction is not None:
        merits += router.correction
    num_best = 1 if router.correction is None else 2
    groups = merits.view(len(x), routing.num_groups, -1).topk(num_best).values.sum(2)
    gaps = [values.sort(1).values.diff().flatten() for values in (merits, groups)]
    return min(torch.cat(gaps).tolist(), default=1.0)


@every_set_and_triton
@given(
    routing=routings(),
    num_tokens=st.integers(1, 11),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_experts_and_weights_are_those_of_plain_torch(
    variant: str,
    routing: Routing,
    num_tokens: int,
    size: int,
    dtype: torch.dtype,
    num_threads: int,
    seed: int,
) -> None:
    router = make_router(routing, size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(num_tokens, size, generator=generator) / size**0.5).to(dtype)
    assume(least_gap(router, x) > 2e-6)  # of nearly equal ones, rounding chooses
    with using("torch"):
        wanted = router(x)
    with using(variant, num_threads=num_threads):
        got = router(x)
    torch.testing.assert_close(got.weights, wanted.weights, rtol=2e-5, atol=1e-6)
    assert torch.equal(got.experts, wanted.experts)


@every_set
def test_a_token_has_the_same_bits_alone_and_among_others(variant: str) -> None:
    router = make_router(Routing(num_experts=10, top_k=3, renormalise=True), 70)
    x = torch.randn(30, 2, 70)[:, 1]
    with using(variant, num_threads=3):
        together = router(x)
        for token in (0, 1, 3, 29):
            alone = router(x[token : token + 1])
            assert torch.equal(alone.weights[0], together.weights[token])
            assert torch.equal(alone.experts[0], together.experts[token])


@every_set_and_triton
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_correction", [False, True])
def test_nan_reaches_the_weights_of_valid_experts(
    variant: str, scoring: str, has_correction: bool
) -> None:
    routing = Routing(
        num_experts=8,
        top_k=3,
        scoring=scoring,  # type: ignore[arg-type]
        num_groups=4,
        top_k_groups=2,
        has_correction=has_correction,
    )
    x = torch.randn(3, 20)
    x[1, 5] = torch.nan
    with using(variant):
        routed = make_router(routing, 20)(x)
    assert routed.weights.isnan().any(1).tolist() == [False, True, False]
    assert all(len(set(chosen)) == 3 for chosen in routed.experts.tolist())
    assert 0 <= int(routed.experts.min()) <= int(routed.experts.max()) < 8


@every_set_and_triton
def test_equal_experts_are_chosen_in_their_order(variant: str) -> None:
    router = make_router(Routing(num_experts=6, top_k=3, scoring="sigmoid"), 4)
    router.weight.zero_()
    router.weight[4] = 1.0
    with using(variant):
        assert router(torch.ones(1, 4)).experts.tolist() == [[4, 0, 1]]


def test_many_experts_are_routed_in_triton() -> None:
    """As in DeepSeek-V3, with a number of experts that is no power of two, and no tokens."""
    routing = Routing(
        num_experts=264,
        top_k=9,
        scoring="sigmoid",
        renormalise=True,
        scale=2.5,
        num_groups=8,
        top_k_groups=3,
        has_correction=True,
    )
    router, x = make_router(routing, 40), torch.randn(20, 40).half()
    with using("torch"):
        wanted = router(x)
    with using(TRITON):
        got, nothing = router(x), router(x[:0])
    assert torch.equal(got.experts, wanted.experts)
    torch.testing.assert_close(got.weights, wanted.weights)
    assert nothing.weights.shape == nothing.experts.shape == (0, 9)


@pytest.mark.req("FEA-08")
@pytest.mark.parametrize("variant", ["torch", *NATIVE, TRITON])
def test_the_choice_is_left_in_memory_that_keeps_its_address(variant: str) -> None:
    router = make_router(Routing(num_experts=9, top_k=3), 20)
    x = torch.randn(6, 20)
    with using(variant):
        wanted = router(x)
        router.chosen = torch.full((8, 3), -1)
        address = router.chosen.data_ptr()
        for num_tokens in (6, 2, 0):
            router.chosen.fill_(-1)
            routed = router(x[:num_tokens])
            assert torch.equal(routed.weights, wanted.weights[:num_tokens])
            assert torch.equal(routed.experts, wanted.experts[:num_tokens])
            assert torch.equal(router.chosen[:num_tokens], wanted.experts[:num_tokens])
            assert (router.chosen[num_tokens:] == -1).all()
        assert router.chosen.data_ptr() == address


@pytest.mark.req("FEA-08")
@every_set
def test_a_replay_leaves_the_choice_for_other_tokens(variant: str) -> None:
    router = make_router(Routing(num_experts=9, top_k=2), 20)
    x, others = torch.zeros(12, 20), torch.randn(5, 20)
    with using(variant):
        kernels = native()
        assert kernels is not None
        wanted = router(others).experts
        router.chosen = torch.full((12, 2), -1)
        _, graph = capture(kernels, lambda: router(x), 12, ())
        x[:5] = others
        graph.replay(5, ())
    assert torch.equal(router.chosen[:5], wanted)


@every_set
def test_a_replay_routes_other_tokens(variant: str) -> None:
    router = make_router(Routing(num_experts=9, top_k=2), 20)
    x, others = torch.zeros(12, 20), torch.randn(5, 20)
    with using(variant, num_threads=2):
        kernels = native()
        assert kernels is not None
        routed, graph = capture(kernels, lambda: router(x), 12, ())
        x[:5] = others
        graph.replay(5, ())
        wanted = router(others)
        assert torch.equal(routed.weights[:5], wanted.weights)
        assert torch.equal(routed.experts[:5], wanted.experts)


@every_set_and_triton
def test_wrong_shapes_and_dtypes_are_rejected(variant: str) -> None:
    router = make_router(Routing(num_experts=4, top_k=2), 8)
    with using(variant):
        for wrong in (torch.zeros(3, 7), torch.zeros(8, 3).t(), torch.zeros(8)):
            with pytest.raises(ValueError, match=r"must be \(n, 8\)"):
                router(wrong)
        router.weight = router.weight.half()
        with pytest.raises(ValueError, match=r"contiguous torch.float32, not torch.float16"):
            router(torch.zeros(3, 8))
