"""Self-attention layers: projections, norms and rotary positions around an attention backend."""

from collections.abc import Sequence
from typing import Final, TypeAlias

from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs, AttentionStep
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kernels.wide_norm import WholeHeads, sums_of_squares, wide_norm
from longshore.worker.layers.linear import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    stacked,
)
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import OffsetRMSNorm
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole
from longshore.worker.models.decoder_config import DecoderConfig

SPLIT_QKV: Final = ("q_proj", "k_proj", "v_proj")

Prepared: TypeAlias = tuple[Tensor, Tensor, Rotation | None]


class SelfAttention:
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions; q, k and v are one
    product.

    Query heads and KV heads are divided among the shards. If there are fewer KV heads than shards,
    several shards hold copies of one KV head.

    qkv_names: checkpoint names of the three projections, or of the one that stacks them.
    out_name:  checkpoint name of the output projection.
    """

    def __init__(
        self,
        config: DecoderConfig,
        placement: Placement,
        *,
        qkv_names: Sequence[str] = SPLIT_QKV,
        out_name: str = "o_proj",
        in_features: int | None = None,
    ) -> None:
        """in_features: width of x; None: hidden_size."""
        self._qkv_names = qkv_names
        self._out_name = out_name
        self.head_dim = config.head_dim
        self.queries = Columns.of_heads(
            placement.parallel.share(config.num_heads), config.num_heads, config.head_dim
        )
        share = config.head_share(placement.parallel.shard, placement.parallel.num_shards)
        self.keys = Columns.of_heads(
            slice(share.first, share.first + share.count),
            config.num_kv_heads,
            config.head_dim,
        )
        self._heads = [column.num_local // config.head_dim for column in self.columns()]
        self.qkv = ColumnParallelLinear(
            config.hidden_size if in_features is None else in_features,
            self.columns(),
            bias=config.qkv_bias,
            placement=placement,
        )
        self.out = RowParallelLinear(
            self.queries.size, config.hidden_size, bias=config.out_bias, placement=placement
        )

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, in_features) -> (n, hidden_size). layer: index among the layers of this rank."""
        q, k, v = self.split_heads(self.qkv(x))
        q, k, to_rotate = self.prepare(q, k, rotation)
        return self.out(attention.forward(layer, AttentionInputs(q, k, v, to_rotate)))

    def columns(self) -> tuple[Columns, ...]:
        """What the product of the input consists of."""
        return (self.queries, self.keys, self.keys)

    def split_heads(self, product: Tensor) -> tuple[Tensor, ...]:
        """Of each of the columns, the heads: (n, local heads, head_dim)."""
        return product.view(len(product), -1, self.head_dim).split(self._heads, dim=1)

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        """Families override this to do more than to rotate.

        q, k: (n, local heads, head_dim), views of one product that may be overwritten. Returns
        queries and keys, and what the attention backend does to them first, in one pass with the
        write of the keys if it can.
        """
        return q, k, rotation

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.qkv_tensors(name),
            **self.out.checkpoint_tensors(f"{name}.{self._out_name}"),
        }

    def qkv_tensors(self, name: str) -> StoredTensors:
        """The tensors of the projections of the input."""
        return self.qkv.checkpoint_tensors([f"{name}.{part}" for part in self._qkv_names])


class NoPEAttention(SelfAttention):
    """Self-attention without positions (NoPE): queries and keys are not rotated."""

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        return q, k, None


class HeadNormAttention(SelfAttention):
    """Each head of queries and keys is normalised separately; all heads share the weights.

    q_norm, k_norm: (head_dim,). norm_names: their checkpoint names.
    """

    def __init__(
        self,
        config: DecoderConfig,
        placement: Placement,
        *,
        out_name: str = "o_proj",
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        super().__init__(config, placement, out_name=out_name)
        self._norm_names = norm_names
        self._eps = config.rms_norm_eps
        self.q_norm = placement.empty(config.head_dim)
        self.k_norm = placement.empty(config.head_dim)

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        return q, k, rotation.with_norms(self.q_norm, self.k_norm, self._eps)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        q_norm, k_norm = self._norm_names
        return {
            **super().checkpoint_tensors(name),
            f"{name}.{q_norm}.weight": whole(self.q_norm),
            f"{name}.{k_norm}.weight": whole(self.k_norm),
        }


class OffsetHeadNormAttention(SelfAttention):
    """HeadNormAttention with the norms of Gemma. q_norm, k_norm: over head_dim."""

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.q_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps, placement)
        self.k_norm = OffsetRMSNorm(config.head_dim, config.rms_norm_eps, placement)

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        norms = self.q_norm.weight, self.k_norm.weight
        return q, k, rotation.with_norms(*norms, self.q_norm.eps)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **super().checkpoint_tensors(name),
            f"{name}.q_norm.weight": whole(self.q_norm.weight),
            f"{name}.k_norm.weight": whole(self.k_norm.weight),
        }


class GatedAttention(OffsetHeadNormAttention):
    """OffsetHeadNormAttention whose result is multiplied by the sigmoid of a gate, of each element.

    The checkpoint's query projection gives the query and the gate of each head, one after the
    other. Here, the queries of all heads come first, then their gates.
    """

    def columns(self) -> tuple[Columns, ...]:
        return (self.queries, self.queries, self.keys, self.keys)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        q, gate, k, v = self.split_heads(self.qkv(x))
        q, k, to_rotate = self.prepare(q, k, rotation)
        y = attention.forward(layer, AttentionInputs(q, k, v, to_rotate))
        return self.out(y.mul_(gate.flatten(1).sigmoid()))

    def qkv_tensors(self, name: str) -> StoredTensors:
        tensors = self._stored_heads(self.qkv.weight.stored, name, "weight")
        if self.qkv.bias is not None:
            tensors |= self._stored_heads(self.qkv.bias, name, "bias")
        return tensors

    def _stored_heads(self, local: Tensor, name: str, kind: str) -> StoredTensors:
        queries, keys, size = self.queries, self.keys, self.head_dim
        q, gate, k, v = local.split([column.num_local for column in self.columns()])
        first, parts = 2 * queries.local.start, []
        for head in zip(q.split(size), gate.split(size), strict=True):
            for half in head:
                parts.append((half, (slice(first, first + size),)))
                first += size
        return {
            f"{name}.q_proj.{kind}": StoredTensor((2 * queries.size, *local.shape[1:]), parts),
            f"{name}.k_proj.{kind}": stacked(k, (keys,)),
            f"{name}.v_proj.{kind}": stacked(v, (keys,)),
        }


class WideNormAttention(SelfAttention):
    """All query heads of a token are normalised together, and so are all its key heads.

    q_norm, k_norm: (local heads * head_dim,).
    """

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self._eps = config.rms_norm_eps
        self._parallel = placement.parallel
        # A KV head counts once for each shard that holds a copy.
        self._sizes = (self.queries.size, self.keys.num_local * placement.parallel.num_shards)
        self.q_norm = placement.empty(self.queries.num_local)
        self.k_norm = placement.empty(self.keys.num_local)

    def prepare(self, q: Tensor, k: Tensor, rotation: Rotation) -> Prepared:
        whole = None
        q_wide, k_wide = q.flatten(1), k.flatten(1)
        if self._parallel.num_shards > 1:
            squares = self._parallel.all_reduce(sums_of_squares(q_wide, k_wide))
            whole = WholeHeads(squares, *self._sizes)
        q_wide, k_wide = wide_norm(q_wide, k_wide, self.q_norm, self.k_norm, self._eps, whole)
        return q_wide.view(q.shape), k_wide.view(k.shape), rotation

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        q_part, k_part = (self.q_norm, (self.queries.local,)), (self.k_norm, (self.keys.local,))
        return {
            **super().checkpoint_tensors(name),
            f"{name}.q_norm.weight": StoredTensor((self.queries.size,), (q_part,)),
            f"{name}.k_norm.weight": StoredTensor((self.keys.size,), (k_part,)),
        }
