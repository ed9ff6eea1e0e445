"""The kernels of a step other than attention, against float64. They are called through their
wrappers, so what a wrapper computes in plain torch is checked as well."""

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory, worst_error
from benchmarks.gpu.results import Run
from longshore.worker.kernels import experts
from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.gate import SILU, Gate
from longshore.worker.kernels.rms_norm import add_rms_norm, rms_norm
from longshore.worker.kernels.rotary import Rotation, rotary_
from longshore.worker.kernels.write_kv import write_kv
from longshore.worker.kv_cache.fp8 import FP8, KVScales
from longshore.worker.layers.moe_router import Router, Routing
from longshore.worker.layers.placement import Placement

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
EPS: Final = 1e-6

CLAMPED: Final = Gate(activation="clamped_swiglu", alpha=1.702, limit=7.0, is_interleaved=True)
GATES: Final = (
    SILU,
    Gate(activation="gelu"),
    Gate(activation="gelu_tanh", is_interleaved=True),
    CLAMPED,
)
ROUTINGS: Final = {
    "Mixtral": Routing(num_experts=8, top_k=2, renormalise=True),
    "Qwen3": Routing(num_experts=128, top_k=8, renormalise=True),
    "GPT-OSS": Routing(num_experts=32, top_k=4, renormalise=True, has_bias=True),
    "Llama 4": Routing(num_experts=16, top_k=1, scoring="sigmoid"),
    "DeepSeek-V3": Routing(
        num_experts=256,
        top_k=8,
        scoring="sigmoid",
        renormalise=True,
        scale=2.5,
        num_groups=8,
        top_k_groups=4,
        has_correction=True,
    ),
}
MIXTURES: Final[dict[str, dict[str, Any]]] = {  # size, width, experts, per token
    "edges": {"shape": (72, 40, 5, 2), "gate": GATES[2], "has_shared": True},
    "biased": {"shape": (72, 40, 5, 3), "gate": CLAMPED, "has_biases": True},
    "weighed inputs": {"shape": (64, 48, 4, 1), "weighs_inputs": True},
}
REAL_MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "Mixtral": {"shape": (4096, 14_336, 8, 2)},
    "Qwen3 30B": {"shape": (2048, 768, 128, 8)},
    "GPT-OSS": {"shape": (2880, 2880, 32, 4), "gate": CLAMPED, "has_biases": True},
}


def check(run: Run) -> None:
    rows = (1, 3) if run.is_dry else (1, 3, 128, 1000, 8192)
    sizes = (40,) if run.is_dry else (40, 1024, 2880, 4096, 5120, 16_384)
    tokens = (1, 13) if run.is_dry else (1, 2, 13, 60, 120, 250, 512, 4096)
    vocabs = (300,) if run.is_dry else (300, 32_000, 151_936)
    names = list(ROUTINGS)[:1] if run.is_dry else list(ROUTINGS)
    mixtures = MIXTURES if run.is_dry else MIXTURES | REAL_MIXTURES
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        draw = partial(_draw, run.device, dtype)
        run.check(f"RMS norm, {name}", partial(_check_norms, draw, rows, sizes))
        run.check(f"gates, {name}", partial(_check_gates, draw, rows, sizes))
        run.check(f"rotary and KV write, {name}", partial(_check_rotary, draw, run.is_dry))
        for routing in names:
            run.check(
                f"router of {routing}, {name}",
                partial(_check_router, draw, ROUTINGS[routing], tokens, 40 if run.is_dry else 2048),
            )
        for mixture, about in mixtures.items():
            run.check(f"experts, {mixture}, {name}", partial(_check_experts, draw, tokens, **about))
    run.check("argmax", partial(_check_argmax, partial(_draw, run.device), rows, vocabs))


def _draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _check_norms(draw: Any, rows: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    for num_rows in rows:
        for size in sizes:
            x, residual, weight = draw(num_rows, size), draw(num_rows, size), draw(size)
            for scale in (weight, weight.float()):
                _assert_normal(x, scale, partial(rms_norm, x, scale, EPS))
                added, total = residual.clone(), residual + x
                _assert_normal(total, scale, partial(add_rms_norm, x, added, scale, EPS))
                assert_near(added, residual.double() + x.double())
                with poisoned_memory():
                    added = rms_norm(x, scale, EPS, added=residual)
                assert_near(added, normal_in_float64(x, scale) + residual.double())
                _check_sandwich(x, residual, weight)


def _check_sandwich(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """A norm before the sum and one after it, as in Gemma."""
    total = residual.clone()
    with poisoned_memory():
        normal = add_rms_norm(x, total, weight, EPS, first_weight=weight)
    assert_near(total, residual.double() + normal_in_float64(x, weight))
    assert_near(normal, normal_in_float64(total, weight))


def _assert_normal(x: Tensor, weight: Tensor, normalise: Any) -> None:
    with poisoned_memory():
        assert_near(normalise(), normal_in_float64(x, weight))


def normal_in_float64(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the norm in float64."""
    wide = x.double()
    return weight * wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()


def _check_gates(draw: Any, rows: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    for gate in GATES:
        for num_rows in rows:
            for size in sizes:
                gate_up = draw(num_rows, 2 * size)
                with poisoned_memory():
                    assert_near(gate(gate_up), gate.reference(gate_up.double()))


def _check_rotary(draw: Any, is_dry: bool) -> None:
    """Queries, keys and values are views of one product. Some tokens are not stored."""
    for num_tokens, num_heads, head_dim, num_pairs in (
        (5, 4, 16, 8),
        (5, 4, 80, 40),
        *(() if is_dry else ((300, 32, 128, 64), (1000, 16, 256, 32))),
    ):
        for is_fp8 in (False, True):
            for has_norm in (False, True):
                _check_rotated(draw, num_tokens, num_heads, head_dim, num_pairs, is_fp8, has_norm)


def _check_rotated(
    draw: Any,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    num_pairs: int,
    is_fp8: bool,
    has_norm: bool,
) -> None:
    num_kv_heads, block_size = 2, 16
    product = draw(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    device, dtype = product.device, product.dtype
    heads = (num_heads, num_kv_heads, num_kv_heads)
    angles = draw(4096, num_pairs).float()
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(4096, (num_tokens,), device=device)
    slots = torch.randperm(2 * num_tokens + block_size, device=device)[:num_tokens]
    slots[1] = -1
    norm = draw(head_dim) if has_norm else None
    rotation = Rotation(positions, table, norm, norm, EPS)
    q, k, v = product.clone().split(heads, dim=1)
    exact = [rotated_in_float64(x, positions, table, norm) for x in (q, k)]
    num_blocks = -(-(2 * num_tokens + block_size) // block_size)
    cache = torch.zeros(
        (num_blocks, num_kv_heads, 2, block_size, head_dim),
        dtype=FP8 if is_fp8 else dtype,
        device=device,
    )
    keys, values = cache.unbind(2)
    scales = KVScales(0.5, 2.0) if is_fp8 else KVScales()
    write_kv(q, k, v, keys, values, slots, scales, rotation)
    assert_near(q, exact[0])
    stored = slots >= 0
    places = slots[stored] // block_size, slots[stored] % block_size
    for got, wanted, scale in ((keys, exact[1], scales.keys), (values, v.double(), scales.values)):
        found = got.double()[places[0], :, places[1]] * scale
        if is_fp8:
            error = worst_error(found, wanted[stored])
            assert error < 1 / 16, f"the worst error is {error:.2e}"  # of one rounding in e4m3
        else:
            assert_near(found, wanted[stored], dtype)
    number_stored = int((cache.double() != 0).any(-1).any(2).any(1).sum())
    assert number_stored == int(stored.sum()), f"{number_stored} tokens are stored"
    q, k, v = product.clone().split(heads, dim=1)
    rotary_(q, k, rotation)
    for got, wanted in zip((q, k), exact, strict=True):
        assert_near(got, wanted)


def rotated_in_float64(x: Tensor, positions: Tensor, table: Tensor, norm: Tensor | None) -> Tensor:
    """Rotate in float64: (n, heads, head_dim)."""
    wide = x.double()
    if norm is not None:
        wide = norm * wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    cos, sin = table.double()[positions].unsqueeze(1).unbind(2)
    num_pairs = table.shape[2]
    first, second, rest = wide.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _check_router(draw: Any, routing: Routing, tokens: tuple[int, ...], size: int) -> None:
    """Of experts whose scores are nearly equal, rounding chooses; these tokens are few."""
    x = draw(1, size)
    router = Router(size, routing, Placement(x.dtype, x.device))
    for tensor in (router.weight, router.bias, router.correction):
        if tensor is not None:
            tensor.normal_()
    for num_tokens in tokens:
        x = (draw(num_tokens, size).float() / size**0.5).to(x.dtype)
        bias = None if router.bias is None else router.bias.double()
        scores = F.linear(x.double(), router.weight.double(), bias)
        exact = routing.choose(scores, router.correction)
        with poisoned_memory():
            got = router(x)
        same = (got.experts == exact.experts).all(-1)
        assert same.double().mean() >= 0.99, f"{int((~same).sum())} tokens have other experts"
        assert_near(got.weights[same], exact.weights[same])
        router.chosen = torch.full((num_tokens + 1, routing.top_k), -1, device=x.device)
        with poisoned_memory():
            kept = router(x)
        assert torch.equal(kept.weights, got.weights)
        assert torch.equal(router.chosen[:-1], got.experts), "other experts are kept"
        assert (router.chosen[-1] == -1).all(), "experts of more tokens are written"
        router.chosen = None


def _check_experts(
    draw: Any,
    tokens: tuple[int, ...],
    *,
    shape: tuple[int, int, int, int],
    gate: Gate = SILU,
    has_biases: bool = False,
    has_shared: bool = False,
    weighs_inputs: bool = False,
) -> None:
    size, width, num_experts, top_k = shape
    gate_up = draw(num_experts, 2 * width, size).mul_(size**-0.5)
    down = draw(num_experts, size, width).mul_(width**-0.5)
    biases = (draw(num_experts, 2 * width), draw(num_experts, size)) if has_biases else (None, None)
    for num_tokens in tokens:
        x, shared = draw(num_tokens, size), draw(num_tokens, size) if has_shared else None
        weights = draw(num_tokens, top_k).float().sigmoid()
        chosen = draw(num_tokens, num_experts).float().topk(top_k).indices
        chosen[num_tokens // 2 :] = chosen[:1]  # some have many tokens
        exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        if shared is not None:
            exact += shared
        for expert in range(num_experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            weight = weights.double()[token, place, None]
            given = x.double()[token] * (weight if weighs_inputs else 1)
            bias_up, bias_down = (
                None if bias is None else bias[expert].double() for bias in biases
            )
            hidden = gate.reference(F.linear(given, gate_up[expert].double(), bias_up))
            out = F.linear(hidden, down[expert].double(), bias_down)
            exact.index_add_(0, token, out * (1 if weighs_inputs else weight))
        with poisoned_memory():
            got = experts.compute(
                x,
                weights,
                chosen,
                shared,
                gate_up,
                down,
                gate,
                num_experts=num_experts,
                gate_up_bias=biases[0],
                down_bias=biases[1],
                weighs_inputs=weighs_inputs,
            )
        assert_near(got, exact)


def _check_argmax(draw: Any, rows: tuple[int, ...], vocabs: tuple[int, ...]) -> None:
    for num_rows in rows[:-1]:
        for vocab_size in vocabs:
            logits = draw(torch.float32, num_rows, vocab_size + 5)[:, :vocab_size]
            logits[-1, 7] = float("-inf")
            with poisoned_memory():
                best, num_non_finite = argmax(logits)
            assert torch.equal(best, logits.argmax(-1))
            assert num_non_finite.tolist() == [0] * (num_rows - 1) + [1]
