"""Multi-head latent attention (DeepSeek-V2, 2024): projections around an attention backend."""

from typing import Final

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.latent_backend import LatentInputs, LatentProjections
from longshore.worker.kernels.latents import LatentNorm
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole
from longshore.worker.models.deepseek_config import DeepseekConfig

NORM_EPS: Final = 1e-6
"""Epsilon of the norms within the layer, independent of the model's."""


class LatentAttention:
    """Self-attention through a latent. One matrix computes the down-projections of queries and of
    the cached vector.

    Heads are divided among the shards; the projection to the latents is not, so every shard caches
    the same vectors. Rotary rows are reordered as the kernels need them: the halves
    of rotated pairs apart and, in the queries, the rotary parts of all heads first.
    """

    def __init__(self, config: DeepseekConfig, placement: Placement) -> None:
        self._config = config
        heads = placement.parallel.share(config.num_heads)
        self._heads = heads
        self.num_heads = heads.stop - heads.start
        queries = Columns.of_heads(heads, config.num_heads, config.qk_head_dim)
        cached = _all(config.kv_lora_rank + config.qk_rope_head_dim)
        rank = config.q_lora_rank
        self.down = ColumnParallelLinear(
            config.hidden_size,
            (queries if rank is None else _all(rank), cached),
            bias=config.qkv_bias,
            placement=placement,
        )
        if self.down.bias is not None and rank is None:
            self.down.bias[: queries.num_local].zero_()  # no checkpoint has a bias for q_proj
        self.q_norm: RMSNorm | None = None
        self.q_up: ColumnParallelLinear | None = None
        if rank is not None:
            self.q_norm = RMSNorm(rank, NORM_EPS, placement)
            self.q_up = ColumnParallelLinear(rank, (queries,), bias=False, placement=placement)
        self.latent_norm = RMSNorm(config.kv_lora_rank, NORM_EPS, placement)
        self.projections = LatentProjections(
            keys=placement.empty(self.num_heads, config.qk_nope_head_dim, config.kv_lora_rank),
            values=placement.empty(self.num_heads, config.kv_lora_rank, config.v_head_dim),
        )
        self.out = RowParallelLinear(
            config.num_heads * config.v_head_dim,
            config.hidden_size,
            bias=config.out_bias,
            placement=placement,
        )
        self._reorder()

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, hidden_size) -> the same shape. layer: index among the layers of this rank."""
        config = self._config
        latent_dim, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        down = self.down(x)
        q, vectors = down.tensor_split((down.shape[1] - latent_dim - rope_dim,), dim=1)
        if self.q_up is not None:
            assert self.q_norm is not None
            q = self.q_up(self.q_norm(q))
        q_rope, q_nope = (
            part.unflatten(1, (self.num_heads, -1))
            for part in q.tensor_split((self.num_heads * rope_dim,), dim=1)
        )
        norm = LatentNorm(self.latent_norm.weight, self.latent_norm.eps)
        return self.out(
            attention.forward(
                layer, LatentInputs(q_nope, q_rope, vectors, self.projections, norm, rotation)
            )
        )

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        q_name = "q_proj" if self.q_up is None else "q_a_proj"
        tensors = self.down.checkpoint_tensors([f"{name}.{q_name}", f"{name}.kv_a_proj_with_mqa"])
        tensors.pop(f"{name}.q_proj.bias", None)  # see __init__
        if self.q_up is not None:
            assert self.q_norm is not None
            tensors[f"{name}.q_a_layernorm.weight"] = whole(self.q_norm.weight)
            tensors |= self.q_up.checkpoint_tensors([f"{name}.q_b_proj"])
        return {
            **tensors,
            f"{name}.kv_a_layernorm.weight": whole(self.latent_norm.weight),
            f"{name}.kv_b_proj.weight": self._stored_projections(),
            **self.out.checkpoint_tensors(f"{name}.o_proj"),
        }

    def _stored_projections(self) -> StoredTensor:
        """Per head, the rows that project to its keys, then those that project to its values."""
        config = self._config
        key_dim, value_dim = config.qk_nope_head_dim, config.v_head_dim
        size = key_dim + value_dim
        parts: list[tuple[Tensor, tuple[slice, ...]]] = []
        for index, head in enumerate(range(self._heads.start, self._heads.stop)):
            keys = slice(head * size, head * size + key_dim)
            values = slice(keys.stop, keys.stop + value_dim)
            parts.append((self.projections.keys[index], (keys, slice(None))))
            parts.append((self.projections.values[index].t(), (values, slice(None))))
        return StoredTensor((config.num_heads * size, config.kv_lora_rank), parts)

    def _reorder(self) -> None:
        config = self._config
        rows = torch.arange(self.num_heads * config.qk_head_dim).view(self.num_heads, -1)
        nope, rope = rows.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=1)
        queries = torch.cat((self._halves(rope).flatten(), nope.flatten()))
        latents, rope = torch.arange(config.kv_lora_rank + config.qk_rope_head_dim).split(
            (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        cached = torch.cat((latents, self._halves(rope)))
        if self.q_up is not None:
            self.q_up.reorder(queries)
            queries = torch.arange(self.down.weight.stored.shape[0] - len(cached))
        self.down.reorder(torch.cat((queries, len(queries) + cached)))

    def _halves(self, rope: Tensor) -> Tensor:
        """(..., rope_dim) -> the same shape, the first elements of all pairs before the second."""
        if not self._config.rope_interleave:
            return rope
        return torch.cat((rope[..., 0::2], rope[..., 1::2]), dim=-1)


def _all(size: int) -> Columns:
    """Columns that every shard computes."""
    return Columns(size, slice(0, size))
