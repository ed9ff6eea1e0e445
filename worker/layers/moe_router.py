"""The router: which experts compute a token, and with which weights.

`Router(hidden_size, Routing(...), placement)(x)` gives `Routed(weights, experts)`, both (n, top_k).
`Routing` selects the method:

- Mixtral (Jiang et al., 2024), Qwen3: softmax over all experts, the best `top_k`, their weights
  renormalised or not. GPT-OSS: the same with a bias on the scores.
- Llama 4: the sigmoid of each chosen score.
- DeepSeek-V2 (2024): softmax; only experts of the best groups can be chosen, and a group is
  rated by its best expert; weights are scaled.
- DeepSeek-V3 (2024): sigmoid; a learned correction affects the choice but not the weights, and a
  group is rated by the sum of its best two experts.

Scores are always float32, because a rounded score may choose another expert.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import Native, kernels_for
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.route import route
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole


class Routed(NamedTuple):
    """weights: (n, top_k) float32; experts: (n, top_k) int64, distinct within a row."""

    weights: Tensor
    experts: Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How scores choose experts.

    scoring:        function that turns scores into weights, over all experts.
    renormalise:    whether the chosen weights are normalised to a sum of 1 (before `scale`).
    scale:          factor on the weights.
    num_groups:     number of groups of equal size, in order of experts; 1 means no groups.
    top_k_groups:   number of best groups from which experts are chosen.
    has_bias:       whether scores have a bias.
    has_correction: whether the choice, but not the weights, has a bias.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    has_bias: bool = False
    has_correction: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if the numbers of experts and groups are inconsistent."""
        if self.num_experts % self.num_groups or not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(
                f"top_k_groups={self.top_k_groups} of num_groups={self.num_groups} cannot be "
                f"chosen among {self.num_experts} experts: num_groups must divide the experts, and "
                "top_k_groups must be 1 to num_groups"
            )
        num_eligible = self.num_experts // self.num_groups * self.top_k_groups
        if not 1 <= self.top_k <= num_eligible:
            raise ValueError(
                f"top_k={self.top_k} must be 1 to {num_eligible}, the number of eligible experts"
            )
        if self.has_correction and self.num_experts == self.num_groups > 1:
            raise ValueError(
                "with a correction a group is rated by its best two experts, but groups have one"
            )

    def choose(self, scores: Tensor, correction: Tensor | None = None) -> Routed:
        """scores: (n, num_experts) float32, output of the gate; correction: (num_experts,)."""
        weights = scores.softmax(-1) if self.scoring == "softmax" else scores.sigmoid()
        eligible = weights if correction is None else weights + correction
        if self.top_k_groups < self.num_groups:
            eligible = self._of_best_groups(eligible, 1 if correction is None else 2)
        experts = eligible.topk(self.top_k, dim=-1).indices
        weights = weights.gather(1, experts)
        if self.renormalise:
            weights /= weights.sum(-1, keepdim=True) + 1e-20
        return Routed(weights if self.scale == 1.0 else weights.mul_(self.scale), experts)

    def _of_best_groups(self, eligible: Tensor, num_best: int) -> Tensor:
        """Set experts outside the best groups to -inf. Groups are rated by the sum of their best
        `num_best` experts."""
        grouped = eligible.view(len(eligible), self.num_groups, -1)
        quality = grouped.topk(num_best, dim=-1).values.sum(-1)
        best = quality.topk(self.top_k_groups, dim=-1).indices
        excluded = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(excluded.unsqueeze(-1), float("-inf")).flatten(1)


class Router:
    """Chooses the experts of each token. Every shard holds the whole router, because all shards
    must choose the same experts.

    weight: (num_experts, hidden_size); bias, correction: (num_experts,) or None; all float32.
    chosen: (max_tokens, top_k) int64, where each call leaves the experts of its tokens, at the same
            address every time; None: they are kept nowhere.
    """

    def __init__(self, hidden_size: int, routing: Routing, placement: Placement) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=placement.device)

        self.routing = routing
        self.weight = empty(routing.num_experts, hidden_size)
        self.bias = empty(routing.num_experts) if routing.has_bias else None
        self.correction = empty(routing.num_experts) if routing.has_correction else None
        self.chosen: Tensor | None = None

    def __call__(self, x: Tensor) -> Routed:
        """x: (n, hidden_size), in the model's dtype."""
        if uses_triton(x):
            return Routed(*self._route(None, x))
        if kernels := kernels_for(x):
            return Routed(*self._route(kernels, x))
        routed = self.routing.choose(F.linear(x.float(), self.weight, self.bias), self.correction)
        if self.chosen is not None:
            self.chosen[: len(x)].copy_(routed.experts)
        return routed

    def _route(self, kernels: Native | None, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.routing
        return route(
            kernels,
            x,
            self.weight,
            bias=self.bias,
            correction=self.correction,
            top_k=routing.top_k,
            num_groups=routing.num_groups,
            top_k_groups=routing.top_k_groups,
            scale=routing.scale,
            is_sigmoid=routing.scoring == "sigmoid",
            renormalises=routing.renormalise,
            chosen=None if self.chosen is None else self.chosen[: len(x)],
        )

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the gate, such as `model.layers.0.mlp.gate`."""
        tensors = {f"{name}.weight": whole(self.weight)}
        if self.bias is not None:
            tensors[f"{name}.bias"] = whole(self.bias)
        if self.correction is not None:
            tensors[f"{name}.e_score_correction_bias"] = whole(self.correction)
        return tensors
