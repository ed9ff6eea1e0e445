"""Routing: the scores of all experts in float32, and the choice for each token. On a CPU it is one
call, on a GPU torch's product and one launch. `worker/layers/moe_router.py` describes the choice
and has the reference in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import ROUTE, Native, empty, num_threads


def route(
    kernels: Native | None,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    scale: float,
    is_sigmoid: bool,
    renormalises: bool,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """kernels: those of the CPU; None computes with Triton.
    x: (n, size), float32 or bfloat16, or float16 with Triton; weight: (num_experts, size) float32,
    contiguous; bias, correction: (num_experts,) float32. The settings: see Routing.
    chosen: (n, top_k) int64, contiguous, memory for the experts; None: new memory.

    Returns weights, (n, top_k) float32, and experts, (n, top_k) int64, best first. Among equal
    scores the lowest expert comes first; NaN counts as the highest score. Raises ValueError for
    arguments of a wrong shape or dtype.
    """
    num_experts, size = weight.shape
    for tensor in (weight, bias, correction):
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise ValueError(
                f"weight, bias and correction must be contiguous torch.float32, not {tensor.dtype}"
            )
    if x.shape[1:] != (size,) or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} with strides {x.stride()} must be (n, {size}), contiguous within "
            "each line"
        )
    if kernels is None:
        from longshore.worker.kernels.gpu import route as gpu

        # Not in TF32, which torch uses only if told to: a rounded score may choose another expert.
        scores = F.linear(x.float(), weight, bias)
        settings = num_groups, top_k_groups, scale, is_sigmoid, renormalises
        if chosen is not None:
            return gpu.route_into(scores, correction, chosen, *settings), chosen
        routed: tuple[Tensor, Tensor] = gpu.route(scores, correction, top_k, *settings)
        return routed
    num_tokens = len(x)
    scores = empty((num_tokens, 3, num_experts), torch.float32)
    weights = empty((num_tokens, top_k), torch.float32)
    if chosen is None:
        chosen = empty((num_tokens, top_k), torch.int64)
    kernels.run(
        "route",
        x.dtype,
        ROUTE.pack(
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if correction is None else correction.data_ptr(),
            scores.data_ptr(),
            weights.data_ptr(),
            chosen.data_ptr(),
            num_tokens,
            num_experts,
            size,
            x.stride(0),
            top_k,
            num_groups,
            top_k_groups,
            scale,
            is_sigmoid,
            renormalises,
            num_threads(num_tokens * weight.nbytes),
        ),
    )
    return weights, chosen
