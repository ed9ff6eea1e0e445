"""The Mamba 2 layer (Dao and Gu, 2024): projections, gate and norm around the recurrence.

One product computes a token's gate, the inputs x of its heads, the maps B and C, and the time
steps. The attention backend computes the convolution over x, B and C and the recurrence, which have
states. Heads and groups (heads with common B and C) are divided among the shards. If there are
fewer groups than shards, several shards compute the same group.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.state_backend import MambaKind, StateInputs
from longshore.worker.kernels.gated_norm import gated_norm
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kernels.state_step import StateWeights
from longshore.worker.layers.linear import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    stacked,
)
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.models.mamba2_config import MambaShape
from longshore.worker.ranks.parallel import Parallel


def mamba_kind(shape: MambaShape, num_shards: int) -> MambaKind:
    """The kind of a shard's Mamba layers."""
    own = shape.shard(num_shards)
    return MambaKind(
        num_heads=own.num_heads,
        head_dim=own.head_dim,
        num_groups=own.num_groups,
        state_size=own.state_size,
        conv_width=own.conv_width,
    )


class Mamba2Mixer:
    """Replaces attention in a decoder layer.

    weights: of this shard's channels and heads. A decay is stored as log(-decay).
    """

    def __init__(
        self, shape: MambaShape, hidden_size: int, eps: float, placement: Placement
    ) -> None:
        self._shape = shape
        parallel = placement.parallel
        groups = local_groups(parallel, shape.num_groups)
        self._heads = Columns(shape.num_heads, parallel.share(shape.num_heads))
        width = Columns(shape.width, parallel.share(shape.width, shape.head_dim))
        state_size = shape.state_size
        maps = Columns(
            shape.num_groups * state_size,
            slice(groups.start * state_size, groups.stop * state_size),
        )
        self._convolved = (width, maps, maps)
        columns = (width, *self._convolved, self._heads)
        self.project = ColumnParallelLinear(
            hidden_size, columns, bias=shape.proj_bias, placement=placement
        )
        num_channels = sum(column.num_local for column in self._convolved)
        self._widths = (width.num_local, num_channels, self._heads.num_local)
        decay, skip, dt_bias = (float32_weights(placement, self._heads.num_local) for _ in range(3))
        self.weights = StateWeights(
            conv_weight=float32_weights(placement, shape.conv_width, num_channels),
            conv_bias=float32_weights(placement, num_channels) if shape.conv_bias else None,
            decay=decay,
            skip=skip,
            dt_bias=dt_bias,
        )
        self.norm: GatedGroupNorm | None = None
        if shape.has_norm:
            self.norm = GatedGroupNorm(shape, groups, width, eps, placement)
        self.out = RowParallelLinear(
            shape.width, hidden_size, bias=shape.out_bias, placement=placement
        )
        self._multipliers: Tensor | None = None
        if shape.multipliers:
            self._multipliers = _of_columns(shape.multipliers, columns, placement)
        placement.when_loaded(self._take_exponential)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, hidden_size) -> the same shape. layer: index among the layers of this rank. There
        are no positions, so `rotation` is unused."""
        projected = self.project(x)
        if self._multipliers is not None:
            projected.mul_(self._multipliers)
        gate, convolved, dt = projected.split(self._widths, dim=1)
        y = attention.forward(layer, StateInputs(convolved, dt, self.weights))
        if self.norm is None:
            return self.out(y.mul_(F.silu(gate.float())).to(gate.dtype))
        return self.out(self.norm(y, gate))

    def _take_exponential(self) -> None:
        self.weights.decay.exp_().neg_()

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        weights = self.weights
        tensors = {
            **self.project.checkpoint_tensors([f"{name}.in_proj"]),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
            f"{name}.conv1d.weight": stacked(weights.conv_weight.T.unsqueeze(1), self._convolved),
        }
        if self.norm is not None:
            tensors[f"{name}.norm.weight"] = self.norm.stored()
        if weights.conv_bias is not None:
            tensors[f"{name}.conv1d.bias"] = stacked(weights.conv_bias, self._convolved)
        for key, target in (
            ("A_log", weights.decay),
            ("D", weights.skip),
            ("dt_bias", weights.dt_bias),
        ):
            part = (target, (self._heads.local,))
            tensors[f"{name}.{key}"] = StoredTensor((self._heads.size,), (part,))
        return tensors


class GatedGroupNorm:
    """RMS normalisation over the heads of each group, before or after a product with silu(gate), in
    float32.

    weight: (local width,) float32.
    """

    def __init__(
        self, shape: MambaShape, groups: slice, width: Columns, eps: float, placement: Placement
    ) -> None:
        self._parallel = placement.parallel
        self._groups, self._num_groups = groups, shape.num_groups
        self._group_width = shape.width // shape.num_groups
        self._width = width
        self._eps, self._is_norm_first = eps, shape.is_norm_first
        self.weight = float32_weights(placement, width.num_local)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x: (n, local width) float32, overwritten; gate: (n, local width) -> gate's dtype."""
        if self._parallel.num_shards <= self._num_groups:
            num_local = self._groups.stop - self._groups.start
            return gated_norm(
                x, gate, self.weight, num_local, self._eps, is_norm_first=self._is_norm_first
            )
        factor = F.silu(gate.float())
        if not self._is_norm_first:
            x.mul_(factor)
        squares = self._sum_over_shards(x.square().sum(1, keepdim=True))
        x.mul_(squares.div_(self._group_width).add_(self._eps).rsqrt_()).mul_(self.weight)
        if self._is_norm_first:
            x.mul_(factor)
        return x.to(gate.dtype)

    def _sum_over_shards(self, squares: Tensor) -> Tensor:
        """squares: (n, 1), the sum over this shard's part of its group."""
        of_all = squares.new_zeros(len(squares), self._num_groups)
        of_all[:, self._groups] = squares
        return self._parallel.all_reduce(of_all)[:, self._groups]

    def stored(self) -> StoredTensor:
        return StoredTensor((self._width.size,), ((self.weight, (self._width.local,)),))


def _of_columns(
    multipliers: Sequence[float], columns: Sequence[Columns], placement: Placement
) -> Tensor:
    """(local outputs of all maps,) float32: the multiplier of each map."""
    parts = [
        torch.full((column.num_local,), multiplier, device=placement.device)
        for multiplier, column in zip(multipliers, columns, strict=True)
    ]
    return torch.cat(parts).float()


def local_groups(parallel: Parallel, num_groups: int) -> slice:
    """The groups that this shard's heads belong to."""
    if num_groups >= parallel.num_shards:
        return parallel.share(num_groups)
    group = parallel.shard * num_groups // parallel.num_shards
    return slice(group, group + 1)


def float32_weights(placement: Placement, *shape: int) -> Tensor:
    """Memory for small weights, in float32 because their error accumulates over many tokens."""
    return torch.empty(shape, dtype=torch.float32, device=placement.device)
