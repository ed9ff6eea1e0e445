"""The base class of model configs: sizes read from config.json, and the division among ranks.

Settings that would change the computation but are not implemented are rejected here, before weights
are read: a model that loads and gives wrong output is worse than one that does not load.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from longshore.protocol.errors import shortened
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HeadShare,
    KVCacheSpec,
    SlidingWindowSpec,
)
from longshore.worker.attention.reach import Reach
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.loading.quantization_config import KEYS
from longshore.worker.loading.tensor_names import (
    CLASSIFIER,
    EMBEDDINGS,
    HEAD,
    NORM,
    kv_scale,
    renamed,
)
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import (
    DEFAULT_THETA,
    RopeConfig,
    max_supported_len,
    read_rope_config,
)
from longshore.worker.models.tensor_shapes import Shapes, gated_mlp, linear, norms

_NOT_COMPUTED: Final[dict[str, tuple[object, str]]] = {
    # key: (neutral value, reason for rejecting others)
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
_DEQUANTISED: Final = "bfloat16"

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Types of attention layers in `layer_types` of config.json.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes in elements, lengths in tokens. Each family has a subclass; see docs/models.md.

    model_type:  the `model_type` of config.json, used if it has no architecture.
    model:       `package.module:Class` of the DecoderModel that computes it. It is imported only
                 when it is needed, because processes without torch read settings too.
    stored_names: prefixes of our tensor names, and those that replace them in the checkpoint.
    default_block_size: tokens per KV block, unless --block-size sets another size.
    is_bidirectional: whether tokens attend to later ones. Then a prompt is computed in one step,
                 and no part of it can come from the prefix cache.
    rotary_dim:  leading elements of a head that are rotated; the rest is unchanged.
    rope:        rope of all layers, unless `rope_of` returns another.
    reaches:     window or chunk of each layer; empty: every layer has full attention.
    activation:  activation of the MLP.
    qkv_bias:    whether queries, keys and values, or each of them, have a bias.
    score_scale: factor on attention scores; None: head_dim ** -0.5.
    score_softcap, logit_softcap: c, if scores or logits are replaced by c * tanh(value / c).
    logit_scale: factor on the logits.
    has_head:    whether there is an output head; a model without one can only pool vectors.
    labels:      names of the labels of a classification head; empty: the model has none.
    label_tokens: the token against the only label and the one for it, if the head is made from
                 their rows of the output head; None: it is in the checkpoint.
    num_mtp_layers: layers for multi-token prediction after the last layer; only a drafter loads
                 one (worker/drafting/mtp.py).
    dtype:       the checkpoint's dtype, "float32" if config.json does not give it.
    """

    model_type: ClassVar[str]
    model: ClassVar[str]
    stored_names: ClassVar[Mapping[str, str]] = {}
    default_block_size: ClassVar[int] = 16
    is_bidirectional: ClassVar[bool] = False

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
    labels: tuple[str, ...] = ()
    label_tokens: tuple[int, int] | None = None
    num_mtp_layers: int = 0

    @classmethod
    @abstractmethod
    def read(cls, fields: JsonFields) -> "DecoderConfig":
        """Read the config of this family from config.json.

        Raises UnsupportedModel or BrokenCheckpoint naming file, key and value.
        """

    @property
    def max_supported_len(self) -> int:
        """Maximum tokens of a request for which positions are well defined."""
        return max_supported_len(self.rope, self.max_position_embeddings)

    @property
    def default_max_len(self) -> int:
        """Default of max_model_len, in tokens."""
        return self.max_supported_len

    @property
    def max_encoder_tokens(self) -> int:
        """Maximum encoder tokens per request; 0: the family has no encoder."""
        return 0

    @property
    def max_audio_samples(self) -> int:
        """Maximum audio samples per request; 0: the family has no audio input."""
        return 0

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of audio input in Hz; 0: the family has no audio input."""
        return 0

    def reach_of(self, layer: int) -> Reach:
        """layer: index in the whole model."""
        return self.reaches[layer] if self.reaches else Reach()

    def rope_of(self, layer: int) -> RopeConfig:
        """layer: index in the whole model."""
        return self.rope

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        """What a rank caches of a layer; `DecoderModel.attention_kind` says how it is computed.
        layer: index in the whole model."""
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
        """The specs of all cached layers of the model, in order. A family whose layers cache
        nothing, or several things, overrides this and `DecoderModel.cached_layers`."""
        return {
            cache_name(layer): self.cache_spec(layer, sizes) for layer in range(self.num_layers)
        }

    def tensor_shapes(self) -> Shapes:
        """All tensors that a checkpoint must have, by the family's names, with their shapes."""
        size = self.hidden_size
        shapes: Shapes = {EMBEDDINGS: (self.vocab_size, size), **self.norm_shapes()}
        needs_rows = self.label_tokens is not None  # of the output head
        if (self.has_head or needs_rows) and not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, size)
        if self.labels and not needs_rows:
            shapes |= self.classifier_shapes()
        for layer in range(self.num_layers):
            shapes |= self.layer_shapes(layer, f"model.layers.{layer}")
        return {renamed(name, self.stored_names): shape for name, shape in shapes.items()}

    def own_name(self, name: str) -> str:
        """Our name of a tensor of the checkpoint."""
        return renamed(name, {stored: own for own, stored in self.stored_names.items()})

    def with_names(self, names: AbstractSet[str]) -> Self:
        """The config of a checkpoint with these tensor names, for families that are stored in
        several ways. Empty: they are not known."""
        return self

    def norm_shapes(self) -> Shapes:
        """The final norm."""
        return {NORM: (self.hidden_size,)}

    def classifier_shapes(self) -> Shapes:
        return {CLASSIFIER: (len(self.labels), self.hidden_size)}

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        """The tensors of a layer. layer: index in the whole model; name: such as
        `model.layers.0`."""
        return {
            **norms(name, self.hidden_size, "input_layernorm", "post_attention_layernorm"),
            **self.attention_shapes(f"{name}.self_attn"),
            **self.mlp_shapes(layer, f"{name}.mlp"),
        }

    def attention_shapes(
        self, name: str, names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    ) -> Shapes:
        """names: of the four projections."""
        size, width = self.hidden_size, self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        biases = self.qkv_bias
        if isinstance(biases, bool):
            biases = (biases,) * 3
        q, k, v, out = (f"{name}.{part}" for part in names)
        return {
            **linear(q, width, size, bias=biases[0]),
            **linear(k, kv_width, size, bias=biases[1]),
            **linear(v, kv_width, size, bias=biases[2]),
            **linear(out, size, width, bias=self.out_bias),
        }

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        return gated_mlp(name, self.hidden_size, self.intermediate_size, bias=self.mlp_bias)

    def is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may have this tensor, by our name, although the model does not need
        it: it can be derived (rotary tables, a tied output head), or is a scale of the KV cache."""
        return (
            self.copy_of(name) is not None
            or name.endswith("rotary_emb.inv_freq")
            or kv_scale(name) is not None
        )

    def copy_of(self, name: str) -> str | None:
        """The tensor that a redundant one must be equal to: a tied output head may be stored."""
        return EMBEDDINGS if name == HEAD and self.tie_word_embeddings else None

    def cut_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallel shards divide into equal parts, by their key in
        config.json."""
        return {
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
        }

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        """Raise UnsupportedModel unless the model can be divided evenly among `num_shards` tensor
        parallel ranks, and has a layer for each of `num_stages` pipeline stages. There may be fewer
        KV heads than shards if each can be copied to the same number of shards."""
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
        """KV heads per rank with `num_shards` tensor parallel ranks."""
        return self.head_share(0, num_shards).count

    def head_share(self, shard: int, num_shards: int) -> HeadShare:
        """The KV heads of a tensor parallel rank, which its query heads read."""
        return HeadShare.of_shard(shard, num_shards, self.num_kv_heads)


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
    """The fields of DecoderConfig whose keys are the same in all families, as keyword arguments.

    rms_norm_eps, max_position_embeddings, rope_theta: the family's defaults.
    head_dim:           the family's default; None is hidden_size / num_attention_heads.
    window, chunk:      tokens that layers of these types attend to; None: the family has none.
    layer_type:         the type of each layer if the file has no `layer_types`.
    activations:        MLP activations that the family supports.
    activation_key:     the family's key for the activation.
    has_partial_rotary: the family may rotate a part of each head.
    rope_aliases:       other names of rope types in this family.
    computed:           keys of settings, rejected for other families, that this family supports.
    """
    reject_uncomputed(fields, computed)
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
        "num_layers": fields.count("num_hidden_layers"),
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


def reject_uncomputed(fields: JsonFields, computed: Collection[str] = ()) -> None:
    """Raise UnsupportedModel for settings that would change the computation but are not supported.
    computed: keys of settings that the family supports."""
    for key in _NOT_COMPUTED.keys() - set(computed):
        fields.reject_unless_neutral(key, *_NOT_COMPUTED[key])


def sliding_window(fields: JsonFields, default: int | None = None) -> int | None:
    """`sliding_window` in tokens; null is none. default: its value if absent."""
    if "sliding_window" not in fields.values:
        return default
    return fields.integer("sliding_window", 0) or None


def read_layer_types(fields: JsonFields, default: Callable[[int], str]) -> tuple[str, ...]:
    """`layer_types`, one per layer. default: the type of each layer if absent."""
    num_layers = fields.count("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(map(default, range(num_layers)))
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.wrong("layer_types", f"a list of num_hidden_layers={num_layers} names")
    return tuple(map(str, types))


def _reaches(
    fields: JsonFields, reaches: Mapping[str, Reach], layer_type: Callable[[int], str]
) -> tuple[Reach, ...]:
    """reaches: by layer type that the family supports."""
    types = read_layer_types(fields, layer_type)
    others = sorted(set(types) - reaches.keys())
    if others:
        raise UnsupportedModel(
            f"{fields.source}: layers of type {shortened(', '.join(others))} are not supported; "
            f"this family supports, with the sizes in the file, {', '.join(reaches)}. Check "
            "layer_types, sliding_window and attention_chunk_size, or use another checkpoint."
        )
    return tuple(reaches[kind] for kind in types)


def read_activation(fields: JsonFields, key: str, computed: Collection[str]) -> Activation:
    """The MLP's activation, under `key`. computed: those that the family supports; others raise
    UnsupportedModel."""
    name = fields.text(key, "silu")
    known = [name for name, activation in _ACTIVATIONS.items() if activation in computed]
    if name not in known:
        raise UnsupportedModel(
            f"{fields.source}: {key}={name!r} is not supported; the MLP of this family supports "
            f"{', '.join(known)}. Use another checkpoint."
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
        raise fields.wrong("head_dim", "even, because rotary positions rotate pairs of elements")
    return head_dim


def read_rotary_dim(fields: JsonFields, head_dim: int, has_partial_rotary: bool = False) -> int:
    key = "partial_rotary_factor"
    ropes = (fields.table("rope_scaling"), fields.table("rope_parameters"))
    holders = [holder for holder in (*ropes, fields) if holder is not None]
    if not has_partial_rotary:
        for holder in holders:
            holder.reject_unless_neutral(key, 1.0, "this family rotates whole heads")
        return head_dim
    holder = next((holder for holder in holders if holder.values.get(key) is not None), fields)
    rotary_dim = int(head_dim * holder.real(key, 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise holder.wrong(key, f"a factor that gives an even part of head_dim={head_dim}")
    return rotary_dim


def checkpoint_dtype(fields: JsonFields) -> str:
    """The name of the checkpoint's dtype. Raises UnsupportedModel if it is not supported. That of
    quantised weights may be absent, or be that of the stored numbers."""
    dtype = fields.text("dtype", fields.text("torch_dtype", ""))
    if dtype not in _DTYPES and fields.values.keys() & set(KEYS):
        return _DEQUANTISED
    dtype = dtype or "float32"
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{fields.source}: dtype={dtype!r} is not supported. Use a checkpoint in "
            f"{', '.join(_DTYPES)}."
        )
    return dtype
