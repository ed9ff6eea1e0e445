"""The gated DeltaNet layer (Yang, Kautz and Hatamizadeh, 2024): projections, norm and gate around
the recurrence.

One product computes a token's queries, keys and values, the gates of its outputs, and of each value
head the correction rate and the decay. The attention backend computes the convolution over queries,
keys and values and the recurrence, which have states. Value heads are divided among the shards, and
so are key heads. If there are fewer key heads than shards, several shards compute the same one.
"""

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.delta_backend import DeltaInputs, DeltaKind
from longshore.worker.kernels.delta_step import DeltaWeights
from longshore.worker.kernels.gated_norm import gated_norm
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.linear import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    stacked,
)
from longshore.worker.layers.mamba2 import float32_weights, local_groups
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole
from longshore.worker.models.delta_shape import DeltaShape

_Part: TypeAlias = tuple[Tensor, tuple[slice, ...]]
"""A part of a StoredTensor."""


def delta_kind(shape: DeltaShape, num_shards: int) -> DeltaKind:
    """The kind of a shard's gated DeltaNet layers."""
    own = shape.shard(num_shards)
    return DeltaKind(
        num_heads=own.num_heads,
        num_key_heads=own.num_key_heads,
        key_dim=own.key_dim,
        value_dim=own.value_dim,
        conv_width=own.conv_width,
    )


class GatedDeltaNet:
    """Replaces attention in a decoder layer.

    weights: of this shard's channels and heads. A decay is stored as log(-decay).
    norm:    (value_dim,) float32, which all heads share; it is applied before the gate.
    """

    def __init__(
        self, shape: DeltaShape, hidden_size: int, eps: float, placement: Placement
    ) -> None:
        self._shape, self._eps = shape, eps
        parallel = placement.parallel
        self._key_heads = local_groups(parallel, shape.num_key_heads)
        self._heads = Columns(shape.num_heads, parallel.share(shape.num_heads))
        keys = Columns.of_heads(self._key_heads, shape.num_key_heads, shape.key_dim)
        values = Columns.of_heads(self._heads.local, shape.num_heads, shape.value_dim)
        self._convolved, self._values = (keys, keys, values), values
        columns = (*self._convolved, values, self._heads, self._heads)
        self.project = ColumnParallelLinear(hidden_size, columns, bias=False, placement=placement)
        self._widths = [column.num_local for column in columns]
        self._num_channels = sum(self._widths[:3])
        decay, dt_bias = (float32_weights(placement, self._heads.num_local) for _ in range(2))
        self.weights = DeltaWeights(
            conv_weight=float32_weights(placement, shape.conv_width, self._num_channels),
            decay=decay,
            dt_bias=dt_bias,
        )
        self.norm = float32_weights(placement, shape.value_dim)
        self.out = RowParallelLinear(
            shape.num_heads * shape.value_dim, hidden_size, bias=False, placement=placement
        )
        placement.when_loaded(self._take_exponential)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, hidden_size) -> the same shape. layer: index among the layers of this rank. There
        are no positions, so `rotation` is unused."""
        channels, gate, beta, dt = self.project(x).split(
            [self._num_channels, *self._widths[3:]], dim=1
        )
        y = attention.forward(layer, DeltaInputs(channels, dt, beta, self.weights))
        num_heads = self._heads.num_local
        return self.out(gated_norm(y, gate, self.norm, num_heads, self._eps, is_norm_first=True))

    def _take_exponential(self) -> None:
        self.weights.decay.exp_().neg_()

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        weights, heads = self.weights, (self._heads,)
        channels = weights.conv_weight.T.unsqueeze(1)
        return {
            **(self._fused(name) if self._shape.is_fused else self._split(name)),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
            f"{name}.conv1d.weight": stacked(channels, self._convolved),
            f"{name}.A_log": stacked(weights.decay, heads),
            f"{name}.dt_bias": stacked(weights.dt_bias, heads),
            f"{name}.norm.weight": whole(self.norm),
        }

    def _split(self, name: str) -> StoredTensors:
        """The checkpoint has the maps one after the other, in four tensors."""
        rows = self.project.weight.stored
        qkv, gate, beta, dt = rows.split([self._num_channels, *self._widths[3:]])
        return {
            f"{name}.in_proj_qkv.weight": stacked(qkv, self._convolved),
            f"{name}.in_proj_z.weight": stacked(gate, (self._values,)),
            f"{name}.in_proj_b.weight": stacked(beta, (self._heads,)),
            f"{name}.in_proj_a.weight": stacked(dt, (self._heads,)),
        }

    def _fused(self, name: str) -> StoredTensors:
        """The checkpoint has, for each key head, its query, its key, and the values and gates of
        its value heads; and in another tensor what else these have."""
        shape, rows = self._shape, self.project.weight.stored
        q, k, v, gate, beta, dt = rows.split(self._widths)
        key, value, group = shape.key_dim, shape.value_dim, shape.heads_per_key
        sizes = [2 * key + 2 * group * value, 2 * group]
        qkvz = [
            *self._key_parts(q, 0, sizes[0]),
            *self._key_parts(k, key, sizes[0]),
            *self._value_parts(v, value, 2 * key, sizes[0]),
            *self._value_parts(gate, value, 2 * key + group * value, sizes[0]),
        ]
        ba = [*self._value_parts(beta, 1, 0, sizes[1]), *self._value_parts(dt, 1, group, sizes[1])]
        shapes = [(shape.num_key_heads * size, rows.shape[1]) for size in sizes]
        return {
            f"{name}.in_proj_qkvz.weight": StoredTensor(shapes[0], qkvz),
            f"{name}.in_proj_ba.weight": StoredTensor(shapes[1], ba),
        }

    def _key_parts(self, local: Tensor, offset: int, size: int) -> Iterator[_Part]:
        """The rows of each local key head. offset: in the rows of a key head, `size` in all."""
        heads = range(self._key_heads.start, self._key_heads.stop)
        for head, target in zip(heads, local.split(self._shape.key_dim), strict=True):
            first = head * size + offset
            yield target, (slice(first, first + len(target)),)

    def _value_parts(self, local: Tensor, width: int, offset: int, size: int) -> Iterator[_Part]:
        """The same of each local value head, which has `width` rows."""
        heads = range(self._heads.local.start, self._heads.local.stop)
        for head, target in zip(heads, local.split(width), strict=True):
            key_head, nth = divmod(head, self._shape.heads_per_key)
            first = key_head * size + offset + nth * width
            yield target, (slice(first, first + width),)
