"""The shape of a dense decoder, read from its config.json by hand, and how it is cut among ranks.

Whatever would change the computation and is not implemented is refused here by name, before a
weight is read: a model that loads and answers wrongly is worse than one that does not load.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from longshore.worker.attention.reach import Reach
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import (
    DEFAULT_THETA,
    RopeConfig,
    max_supported_len,
    read_rope_config,
)

_NOT_COMPUTED: Final[dict[str, tuple[object, str]]] = {
    # key: (value under which it changes nothing, what it would mean)
    "quantization_config": (None, "quantised weights are not supported"),
    "compression_config": (None, "compressed weights are not supported"),
    "attention_chunk_size": (None, "chunked local attention is not part of this family"),
    "attn_logit_softcapping": (None, "capped attention scores are not part of this family"),
    "final_logit_softcapping": (None, "capped logits are not part of this family"),
    "num_local_experts": (0, "mixtures of experts are not supported"),
    "num_experts": (0, "mixtures of experts are not supported"),
    "use_qk_norm": (False, "normalised queries and keys are not part of this family"),
    "embedding_multiplier": (1.0, "scaled embeddings are not part of this family"),
    "residual_multiplier": (1.0, "scaled residuals are not part of this family"),
    "attention_multiplier": (None, "another attention scale is not part of this family"),
    "logits_scaling": (1.0, "scaled logits are not part of this family"),
    "logit_scale": (1.0, "scaled logits are not part of this family"),
    "is_causal": (True, "attention to later tokens is not supported"),
    "is_encoder_decoder": (False, "encoder-decoder models are not supported"),
    "add_cross_attention": (False, "cross attention is not supported"),
}
_DTYPES: Final = ("float32", "bfloat16", "float16")

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# What `layer_types` of a config.json calls the layers that attend.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes in elements, lengths in tokens. A family subclasses it; see docs/models.md.

    model_type:  what config.json may say instead of an architecture.
    model:       `package.module:Class` of the DecoderModel that computes it. It is imported only
                 when it is needed, because processes without torch read settings too.
    default_block_size: tokens per KV block, unless --block-size sets another size.
    rotary_dim:  leading elements of a head that positions turn; the rest pass.
    rope:        of all layers, or of those for which `rope_of` names no other.
    reaches:     of each layer; empty: every layer attends to everything.
    activation:  of the gates of the MLP.
    qkv_bias:    of queries, keys and values, or of each of them.
    score_scale: of the attention's scores; None: head_dim ** -0.5.
    score_softcap, logit_softcap: c, if scores or logits are c * tanh(value / c) of what they were.
    logit_scale: multiplies the logits.
    has_head:    whether there are logits; a model without gives vectors alone.
    dtype:       the checkpoint's own, "float32" when it does not say.
    """

    model_type: ClassVar[str]
    model: ClassVar[str]
    default_block_size: ClassVar[int] = 16

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool | tuple[bool, bool, bool] = False
    out_bias: bool = False
    mlp_bias: bool = False
    reaches: tuple[Reach, ...] = ()
    activation: Activation = "silu"
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    has_head: bool = True

    @classmethod
    @abstractmethod
    def read(cls, fields: JsonFields) -> "DecoderConfig":
        """What a config.json of this family describes.

        Raises UnsupportedModel or BrokenCheckpoint naming file, key and value.
        """

    @property
    def max_supported_len(self) -> int:
        """Longest request, in tokens, for which positions are well defined."""
        return max_supported_len(self.rope, self.max_position_embeddings)

    @property
    def default_max_len(self) -> int:
        """Of a request, in tokens, unless somebody asks for another."""
        return self.max_supported_len

    @property
    def max_encoder_tokens(self) -> int:
        """That the encoder makes of what a request brings; 0: the family has no encoder."""
        return 0

    @property
    def max_audio_samples(self) -> int:
        """That a request may bring; 0: the family takes no sound."""
        return 0

    @property
    def sampling_rate(self) -> int:
        """Of that sound, in Hz; 0: the family takes none."""
        return 0

    def reach_of(self, layer: int) -> Reach:
        """layer: of the whole model, from 0."""
        return self.reaches[layer] if self.reaches else Reach()

    def rope_of(self, layer: int) -> RopeConfig:
        """layer: of the whole model, from 0."""
        return self.rope

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        """What a rank keeps of a layer of the model, counted from its first. What is computed from
        it says `DecoderModel.attention_kind`."""
        reach = self.reach_of(layer)
        shape = {
            "block_size": sizes.block_size,
            "num_kv_heads": self.num_local_kv_heads(sizes.num_shards),
            "head_size": self.head_dim,
            "dtype_bytes": sizes.dtype_bytes,
        }
        if reach.window is not None:
            return SlidingWindowSpec(**shape, sliding_window=reach.window)
        if reach.chunk is not None:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=reach.chunk)
        return FullAttentionSpec(**shape)

    def cache_specs(self, sizes: CacheSizes) -> dict[str, KVCacheSpec]:
        """Of all layers of the model, in order; a family whose layers keep nothing, or several
        things, overrides this and `DecoderModel.cached_layers`."""
        return {
            cache_name(layer): self.cache_spec(layer, sizes) for layer in range(self.num_layers)
        }

    def cut_sizes(self) -> dict[str, int]:
        """What tensor parallel shards cut into equal parts, by its key in config.json."""
        return {
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
        }

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        """Raise UnsupportedModel unless `num_shards` tensor parallel ranks and `num_stages`
        pipeline stages can share the model evenly. KV heads may also be fewer than shards, if
        whole groups of shards can hold copies of one."""
        uneven = [f"{name}={size}" for name, size in self.cut_sizes().items() if size % num_shards]
        if self.num_kv_heads % num_shards and num_shards % self.num_kv_heads:
            uneven.append(f"num_key_value_heads={self.num_kv_heads}")
        if uneven:
            raise UnsupportedModel(
                f"tensor_parallel_size={num_shards} cannot cut {', '.join(uneven)} of this model "
                "into equal parts. Use a size that divides them."
            )
        if self.num_layers < num_stages:
            raise UnsupportedModel(
                f"pipeline_parallel_size={num_stages} is more than the {self.num_layers} layers of "
                "this model; a stage would be empty. Use fewer stages."
            )

    def num_local_kv_heads(self, num_shards: int) -> int:
        """KV heads that each of `num_shards` ranks holds."""
        return max(1, self.num_kv_heads // num_shards)


def read_dense_fields(
    fields: JsonFields,
    *,
    rms_norm_eps: float = 1e-6,
    max_position_embeddings: int = 2048,
    head_dim: int | None = None,
    window: int | None = None,
    chunk: int | None = None,
    layer_type: Callable[[int], str] = lambda _: FULL,
    activations: Collection[str] = ("silu",),
    activation_key: str = "hidden_act",
    has_partial_rotary: bool = False,
    rope_aliases: Mapping[str, str] | None = None,
    rope_theta: float = DEFAULT_THETA,
    computed: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of DecoderConfig that all dense families spell alike, as keyword arguments.

    rms_norm_eps, max_position_embeddings, rope_theta: the family's own values where the file says
                        nothing.
    head_dim:           the same; None is hidden_size / num_attention_heads.
    window, chunk:      tokens that layers of these types reach; None: the family has none of them.
    layer_type:         the type of each layer, where the file has no `layer_types`.
    activations:        of its MLP that the family computes.
    activation_key:     what the family calls that activation.
    has_partial_rotary: the family turns a part of each head.
    rope_aliases:       other names of rope types in this family.
    computed:           keys of settings refused elsewhere that the family computes itself.
    """
    refuse_uncomputed(fields, computed)
    max_len = fields.integer("max_position_embeddings", max_position_embeddings)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = _head_dim(fields, num_heads, head_dim)
    rotary_dim = read_rotary_dim(fields, head_dim, has_partial_rotary)
    rope = read_rope_config(
        fields,
        max_position_embeddings=max_len,
        rotary_dim=rotary_dim,
        aliases=rope_aliases,
        default_theta=rope_theta,
    )
    served = max_supported_len(rope, max_len)
    reaches = {FULL: Reach()}
    if window is not None:
        reaches[SLIDING] = Reach(window=window) if window < served else Reach()
    if chunk is not None:
        reaches[CHUNKED] = Reach(chunk=chunk) if chunk < served else Reach()
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "rms_norm_eps": fields.real("rms_norm_eps", rms_norm_eps),
        "rope": rope,
        "reaches": () if "layer_types" in computed else _reaches(fields, reaches, layer_type),
        "activation": read_activation(fields, activation_key, activations),
        "max_position_embeddings": max_len,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "dtype": checkpoint_dtype(fields),
    }


def refuse_uncomputed(fields: JsonFields, computed: Collection[str] = ()) -> None:
    """Raise UnsupportedModel for settings that would change what is computed. computed: keys of
    those that the family computes itself."""
    for key in _NOT_COMPUTED.keys() - set(computed):
        fields.refuse_unless_neutral(key, *_NOT_COMPUTED[key])


def sliding_window(fields: JsonFields, default: int | None = None) -> int | None:
    """`sliding_window`, in tokens; null is none. default: what its absence means."""
    if "sliding_window" not in fields.values:
        return default
    return fields.integer("sliding_window", 0) or None


def read_layer_types(fields: JsonFields, default: Callable[[int], str]) -> tuple[str, ...]:
    """`layer_types`, one per layer. default: of each layer, where the file does not say."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(map(default, range(num_layers)))
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers={num_layers} names")
    return tuple(map(str, types))


def _reaches(
    fields: JsonFields, reaches: Mapping[str, Reach], layer_type: Callable[[int], str]
) -> tuple[Reach, ...]:
    """reaches: by the types of layers that the family computes."""
    types = read_layer_types(fields, layer_type)
    others = sorted(set(types) - reaches.keys())
    if others:
        raise UnsupportedModel(
            f"{fields.source}: layers are {', '.join(others)}, but this family computes, with the "
            f"sizes that the file gives, {', '.join(reaches)} only. Check layer_types, "
            "sliding_window and attention_chunk_size, or use another checkpoint."
        )
    return tuple(reaches[kind] for kind in types)


def read_activation(fields: JsonFields, key: str, computed: Collection[str]) -> Activation:
    """The MLP's, under `key`. computed: those that the family computes; others raise
    UnsupportedModel."""
    name = fields.text(key, "silu")
    known = [name for name, activation in _ACTIVATIONS.items() if activation in computed]
    if name not in known:
        raise UnsupportedModel(
            f"{fields.source}: {key}={name!r}; the MLP of this family computes "
            f"{', '.join(known)} only. Use another checkpoint."
        )
    return _ACTIVATIONS[name]


def _head_dim(fields: JsonFields, num_heads: int, default: int | None) -> int:
    hidden_size = fields.integer("hidden_size")
    if default is None:
        if fields.values.get("head_dim") is None and hidden_size % num_heads:
            raise fields.wrong("hidden_size", f"a multiple of num_attention_heads={num_heads}")
        default = hidden_size // num_heads
    head_dim = fields.integer("head_dim", default)
    if head_dim % 2:
        raise fields.wrong("head_dim", "even: rotary positions turn pairs of elements")
    return head_dim


def read_rotary_dim(fields: JsonFields, head_dim: int, has_partial_rotary: bool = False) -> int:
    key = "partial_rotary_factor"
    ropes = (fields.table("rope_scaling"), fields.table("rope_parameters"))
    places = [place for place in (*ropes, fields) if place is not None]
    if not has_partial_rotary:
        for place in places:
            place.refuse_unless_neutral(key, 1.0, "this family turns whole heads")
        return head_dim
    place = next((place for place in places if place.values.get(key) is not None), fields)
    rotary_dim = int(head_dim * place.real(key, 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise place.wrong(key, f"a part of head_dim={head_dim} that holds whole pairs")
    return rotary_dim


def checkpoint_dtype(fields: JsonFields) -> str:
    """The checkpoint's own dtype, by name. Raises UnsupportedModel for what is not computed."""
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{fields.source}: dtype={dtype!r}; weights are computed in {', '.join(_DTYPES)} only."
        )
    return dtype
