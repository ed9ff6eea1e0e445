"""The choice of experts from their scores, one program per token. See `worker/kernels/route.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator


@triton.jit
def _as_merit(x):
    """Finite, so that -inf marks what is excluded. NaN becomes the best, so that it is noticed."""
    largest = 3.4028234663852886e38
    x = tl.where(x < -largest, -largest, x)
    return tl.where(x <= largest, x, largest)


@triton.jit
def _kernel(
    scores_ptr,
    correction_ptr,
    weights_ptr,
    chosen_ptr,
    num_groups,
    group_size,
    top_k_groups,
    scale,
    HAS_CORRECTION: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    RENORMALISES: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
    experts = groups[:, None] * group_size + places[None, :]
    is_inside = (groups[:, None] < num_groups) & (places[None, :] < group_size)
    line = scores_ptr + token * num_groups * group_size
    x = tl.load(line + experts, mask=is_inside, other=float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        lowest = -3.4028234663852886e38
        scores = tl.exp(x - tl.max(tl.where(x > lowest, x, lowest)))  # NaN stays in x
        scores = scores / tl.sum(scores)
    merits = scores
    if HAS_CORRECTION:
        merits += tl.load(correction_ptr + experts, mask=is_inside, other=0.0)
    merits = tl.where(is_inside, _as_merit(merits), float("-inf"))
    if HAS_GROUPS:
        qualities = tl.max(merits, axis=1)
        if HAS_CORRECTION:
            # Rated by the best two: by half their sum, which cannot overflow.
            first = tl.where(merits == qualities[:, None], experts, 2147483647)
            is_first = experts == tl.min(first, axis=1)[:, None]
            second = tl.max(tl.where(is_first, float("-inf"), merits), axis=1)
            qualities = 0.5 * qualities + 0.5 * second
        qualities = tl.where(groups < num_groups, qualities, float("-inf"))
        is_eligible = groups < 0
        for _ in range(top_k_groups):
            best = tl.min(tl.where(qualities == tl.max(qualities), groups, 2147483647))
            is_eligible |= groups == best
            qualities = tl.where(groups == best, float("-inf"), qualities)
        merits = tl.where(is_eligible[:, None], merits, float("-inf"))
    ranks = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for rank in range(TOP_K):
        best = tl.min(tl.where(merits == tl.max(merits), experts, 2147483647))
        weight = tl.sum(tl.where(experts == best, scores, 0.0))
        weights = tl.where(ranks == rank, weight, weights)
        chosen = tl.where(ranks == rank, best, chosen)
        merits = tl.where(experts == best, float("-inf"), merits)
    if RENORMALISES:
        weights = weights / (tl.sum(weights) + 1e-20)
    out = token * TOP_K + ranks
    tl.store(weights_ptr + out, weights * scale, mask=ranks < TOP_K)
    tl.store(chosen_ptr + out, chosen.to(tl.int64), mask=ranks < TOP_K)


def _fake(
    scores: Tensor,
    correction: Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    is_sigmoid: bool,
    renormalises: bool,
) -> tuple[Tensor, Tensor]:
    shape, device = (len(scores), top_k), scores.device
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )


@operator(
    "route(Tensor scores, Tensor? correction, int top_k, int num_groups, int top_k_groups, "
    "float scale, bool is_sigmoid, bool renormalises) -> (Tensor, Tensor)",
    fake=_fake,
)
def route(
    scores: Tensor,
    correction: Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    is_sigmoid: bool,
    renormalises: bool,
) -> tuple[Tensor, Tensor]:
    """scores: (n, num_experts) float32, contiguous. Returns weights, (n, top_k) float32, and
    experts, (n, top_k) int64."""
    chosen = torch.empty((len(scores), top_k), dtype=torch.int64, device=scores.device)
    settings = num_groups, top_k_groups, scale, is_sigmoid, renormalises
    return _launch(scores, correction, chosen, *settings), chosen


def _fake_into(scores: Tensor, correction: Tensor | None, chosen: Tensor, *_: object) -> Tensor:
    return torch.empty(chosen.shape, dtype=torch.float32, device=scores.device)


@operator(
    "route_into(Tensor scores, Tensor? correction, Tensor(a!) chosen, int num_groups, "
    "int top_k_groups, float scale, bool is_sigmoid, bool renormalises) -> Tensor",
    fake=_fake_into,
)
def route_into(
    scores: Tensor,
    correction: Tensor | None,
    chosen: Tensor,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    is_sigmoid: bool,
    renormalises: bool,
) -> Tensor:
    """Route as `route` does, but the experts are written to `chosen`, (n, top_k) int64,
    contiguous."""
    settings = num_groups, top_k_groups, scale, is_sigmoid, renormalises
    return _launch(scores, correction, chosen, *settings)


def _launch(
    scores: Tensor,
    correction: Tensor | None,
    chosen: Tensor,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    is_sigmoid: bool,
    renormalises: bool,
) -> Tensor:
    """Returns the weights."""
    num_tokens, num_experts = scores.shape
    top_k = chosen.shape[1]
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=scores.device)
    if num_tokens == 0:
        return weights
    group_size = num_experts // num_groups
    _kernel[(num_tokens,)](
        scores,
        correction,
        weights,
        chosen,
        num_groups,
        group_size,
        top_k_groups,
        scale,
        HAS_CORRECTION=correction is not None,
        HAS_GROUPS=top_k_groups < num_groups,
        IS_SIGMOID=is_sigmoid,
        RENORMALISES=renormalises,
        TOP_K=top_k,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_S=triton.next_power_of_2(group_size),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1 if num_experts <= 128 else 4,
    )
    return weights
