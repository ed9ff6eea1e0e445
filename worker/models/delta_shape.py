"""The sizes of gated DeltaNet layers (Yang, Kautz and Hatamizadeh, 2024), from config.json."""

from dataclasses import dataclass, replace

from longshore.protocol.kv_cache_spec import Channels, StateSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mamba2_config import state_spec
from longshore.worker.models.tensor_shapes import Shapes, linear


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """The sizes of a layer, of the whole model or of one shard.

    num_heads:  number of value heads. Those that share a key head are adjacent.
    conv_width: tokens that the causal convolution covers, the newest included.
    is_fused:   whether the checkpoint has the projections in two tensors, grouped by key heads, and
                not in four.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_fused: bool

    @property
    def heads_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_heads // self.num_key_heads

    @property
    def value_width(self) -> int:
        """Elements of all value heads of a token."""
        return self.num_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """The convolution runs over queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    def tensor_shapes(self, name: str, size: int) -> Shapes:
        """The tensors of a layer. size: of the hidden states."""
        heads, channels, width = self.num_heads, self.conv_channels, self.value_width
        names = ("qkvz", "ba") if self.is_fused else ("qkv", "z", "b", "a")
        rows = (channels + width, 2 * heads) if self.is_fused else (channels, width, heads, heads)
        shapes: Shapes = {
            **linear(f"{name}.out_proj", size, width),
            f"{name}.conv1d.weight": (channels, 1, self.conv_width),
            f"{name}.A_log": (heads,),
            f"{name}.dt_bias": (heads,),
            f"{name}.norm.weight": (self.value_dim,),
        }
        for part, number in zip(names, rows, strict=True):
            shapes |= linear(f"{name}.in_proj_{part}", number, size)
        return shapes

    def shard(self, num_shards: int) -> "DeltaShape":
        """The sizes on each of `num_shards` ranks. If there are fewer key heads than ranks, several
        ranks compute the same one."""
        return replace(
            self,
            num_heads=self.num_heads // num_shards,
            num_key_heads=max(1, self.num_key_heads // num_shards),
        )

    def check_split(self, num_shards: int) -> None:
        """Raise UnsupportedModel unless value heads and key heads divide evenly among `num_shards`
        ranks."""
        if self.num_heads % num_shards or (
            self.num_key_heads % num_shards and num_shards % self.num_key_heads
        ):
            raise UnsupportedModel(
                f"tensor_parallel_size={num_shards} cannot cut linear_num_value_heads="
                f"{self.num_heads} and linear_num_key_heads={self.num_key_heads} into equal parts. "
                "Use a size that divides the value heads, and divides the key heads or is a "
                "multiple of them."
            )

    def spec(self, sizes: CacheSizes) -> StateSpec:
        """What a rank caches of one layer: the state, and the last inputs of the convolution."""
        own = self.shard(sizes.num_shards)
        state = (own.num_heads, own.key_dim, own.value_dim)
        keys: Channels = ("group", own.key_dim)
        channels: tuple[Channels, ...] = (keys, keys, ("head", own.value_dim))
        return state_spec(state, (own.conv_width - 1, own.conv_channels), channels, sizes)


def read_delta_shape(fields: JsonFields, *, is_fused: bool) -> DeltaShape:
    """Raises BrokenCheckpoint."""
    shape = DeltaShape(
        num_heads=fields.count("linear_num_value_heads", 32),
        num_key_heads=fields.count("linear_num_key_heads", 16),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_width=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        is_fused=is_fused,
    )
    if shape.num_heads % shape.num_key_heads:
        raise fields.wrong(
            "linear_num_key_heads", f"a divisor of linear_num_value_heads={shape.num_heads}"
        )
    return shape
