"""Mamba 2 (Dao and Gu, 2024): state space layers only, without attention or positions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from longshore.protocol.errors import shortened
from longshore.protocol.kv_cache_spec import Channels, KVCacheSpec, StateSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.decoder_config import (
    DecoderConfig,
    checkpoint_dtype,
    reject_uncomputed,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import DEFAULT_THETA, DefaultRope
from longshore.worker.models.tensor_shapes import Shapes, linear, norms

STATE_BYTES: Final = 4
"""Bytes per element of a state. States are always float32, because rounding errors accumulate."""

DEFAULT_MAX_LEN: Final = 2048
"""Default of max_model_len; config files do not give the trained length."""

MAX_LEN: Final = 1 << 24
"""Maximum of max_model_len. States have no positions, but the width of block tables is limited."""

_NO_LIMITS: Final = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Values of `time_step_limit` that mean no limit, as transformers 4 and 5 write them."""


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """The sizes of a Mamba 2 layer, of the whole model or of one shard.

    num_groups: number of groups; heads of a group share B and C.
    conv_width: tokens that the causal convolution covers, the newest included.
    proj_bias, out_bias: whether the projections of the input and of the output have biases.
    has_norm:      whether the output is normalised; otherwise it is only gated.
    is_norm_first: whether it is normalised before it is gated.
    multipliers:   factors on what the input is projected to: gate, heads, B, C and time steps;
                   empty: there are none.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    proj_bias: bool
    out_bias: bool
    has_norm: bool = True
    is_norm_first: bool = False
    multipliers: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Elements of all heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """The convolution runs over the heads' inputs, B and C."""
        return self.width + 2 * self.num_groups * self.state_size

    def tensor_shapes(self, name: str, size: int) -> Shapes:
        """The tensors of a mixer. size: of the hidden states."""
        rows, heads = self.width + self.conv_channels + self.num_heads, (self.num_heads,)
        shapes: Shapes = {
            **linear(f"{name}.in_proj", rows, size, bias=self.proj_bias),
            **linear(f"{name}.out_proj", size, self.width, bias=self.out_bias),
            f"{name}.conv1d.weight": (self.conv_channels, 1, self.conv_width),
            **{f"{name}.{key}": heads for key in ("A_log", "D", "dt_bias")},
        }
        if self.has_norm:
            shapes[f"{name}.norm.weight"] = (self.width,)
        if self.conv_bias:
            shapes[f"{name}.conv1d.bias"] = (self.conv_channels,)
        return shapes

    def shard(self, num_shards: int) -> "MambaShape":
        """The sizes on each of `num_shards` ranks. If there are fewer groups than ranks, several
        ranks compute the same group."""
        return replace(
            self,
            num_heads=self.num_heads // num_shards,
            num_groups=max(1, self.num_groups // num_shards),
        )

    def check_split(self, num_shards: int) -> None:
        """Raise UnsupportedModel unless heads and groups divide evenly among `num_shards` ranks."""
        if self.num_heads % num_shards or (
            self.num_groups % num_shards and num_shards % self.num_groups
        ):
            raise UnsupportedModel(
                f"tensor_parallel_size={num_shards} cannot cut the Mamba layers' {self.num_heads} "
                f"heads in {self.num_groups} groups into equal parts. Use a size that divides the "
                "heads, and divides the groups or is a multiple of them."
            )

    def spec(self, sizes: CacheSizes) -> StateSpec:
        """What a rank caches of one layer: the state, and the last inputs of the convolution."""
        own = self.shard(sizes.num_shards)
        state = (own.num_heads, own.head_dim, own.state_size)
        maps: Channels = ("group", own.state_size)
        channels: tuple[Channels, ...] = (("head", own.head_dim), maps, maps)
        return state_spec(state, (own.conv_width - 1, own.conv_channels), channels, sizes)


def state_spec(
    state: tuple[int, ...],
    kept_inputs: tuple[int, int],
    channels: tuple[Channels, ...],
    sizes: CacheSizes,
) -> StateSpec:
    """What a rank caches of a layer with these shapes of its state, and of the last inputs of its
    convolution. channels: see StateSpec."""
    return StateSpec(
        block_size=sizes.block_size,
        shapes=(state, kept_inputs),
        dtype_bytes=(STATE_BYTES, sizes.dtype_bytes),
        channels=channels,
    )


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """num_heads and head_dim are those of the Mamba layers.

    has_wide_residual: the residual stream is float32, whatever the model's dtype.
    """

    model_type = "mamba2"
    model = "longshore.worker.models.mamba2:Mamba2"
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.layers.": "backbone.layers.",
        "model.norm.": "backbone.norm_f.",
    }

    mamba: MambaShape
    has_wide_residual: bool

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        mixer = self.mamba.tensor_shapes(f"{name}.mixer", self.hidden_size)
        return norms(name, self.hidden_size, "norm") | mixer

    @classmethod
    def read(cls, fields: JsonFields) -> "Mamba2Config":
        reject_uncomputed(fields)
        hidden_size, bias = fields.integer("hidden_size"), fields.boolean("use_bias", False)
        mamba = MambaShape(
            num_heads=fields.integer("num_heads", 128),
            head_dim=fields.integer("head_dim", 64),
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("state_size", 128),
            conv_width=fields.integer("conv_kernel", 4, minimum=2),
            conv_bias=fields.boolean("use_conv_bias", True),
            proj_bias=bias,
            out_bias=bias,
        )
        check_mamba(fields, mamba)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=mamba.width,
            num_layers=fields.count("num_hidden_layers"),
            num_heads=mamba.num_heads,
            num_kv_heads=mamba.num_heads,
            head_dim=mamba.head_dim,
            rotary_dim=0,
            rms_norm_eps=fields.real("layer_norm_epsilon", 1e-5),
            rope=DefaultRope(DEFAULT_THETA),
            max_position_embeddings=fields.integer("max_position_embeddings", DEFAULT_MAX_LEN),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            dtype=checkpoint_dtype(fields),
            mamba=mamba,
            has_wide_residual=fields.boolean("residual_in_fp32", True),
        )

    @property
    def max_supported_len(self) -> int:
        return MAX_LEN

    @property
    def default_max_len(self) -> int:
        return self.max_position_embeddings

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        return self.mamba.spec(sizes)

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        self.mamba.check_split(num_shards)
        super().check_split(num_shards=num_shards, num_stages=num_stages)


def read_hybrid_mamba(fields: JsonFields, width: int | None = None) -> MambaShape:
    """The sizes of a hybrid's Mamba layers, from keys with the prefix `mamba_`. width: elements of
    all heads; None: `mamba_expand` * `hidden_size`."""
    num_heads, bias = fields.integer("mamba_n_heads", 128), fields.boolean("mamba_proj_bias", False)
    if width is None:
        width = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    is_derived = fields.values.get("mamba_d_head") in (None, "auto")
    mamba = MambaShape(
        num_heads=num_heads,
        head_dim=width // num_heads if is_derived else fields.integer("mamba_d_head"),
        num_groups=fields.integer("mamba_n_groups", 1),
        state_size=fields.integer("mamba_d_state", 256),
        conv_width=fields.integer("mamba_d_conv", 4, minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        proj_bias=bias,
        out_bias=bias,
    )
    if mamba.width != width:
        raise fields.wrong("mamba_d_head", f"{width} elements of all heads / {num_heads} heads")
    check_mamba(fields, mamba)
    return mamba


def check_mamba(fields: JsonFields, mamba: MambaShape) -> None:
    """Raise BrokenCheckpoint or UnsupportedModel if these Mamba layers are not supported."""
    if mamba.num_heads % mamba.num_groups:
        key = "n_groups" if "n_groups" in fields.values else "mamba_n_groups"
        raise fields.wrong(key, f"a divisor of the {mamba.num_heads} heads")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{fields.source}: hidden_act={activation!r} is not supported; Mamba layers support "
            "silu only. Use another checkpoint."
        )
    limit = fields.values.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise UnsupportedModel(
            f"{fields.source}: time_step_limit={shortened(repr(limit))} is not supported. "
            "Use a checkpoint without it."
        )
