"""The shape of a dense decoder, read from its config.json by hand, and how it is cut among ranks.

Whatever would change the computation and is not implemented is refused here by name, before a
weight is read: a model that loads and answers wrongly is worse than one that does not load.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import RopeConfig, max_supported_len, read_rope_config

_NOT_COMPUTED: Final[dict[str, tuple[object, str]]] = {
    # key: (value under which it changes nothing, what it would mean)
    "quantization_config": (None, "quantised weights are not supported"),
    "compression_config": (None, "compressed weights are not supported"),
    "attention_chunk_size": (None, "chunked local attention is not supported"),
    "attn_logit_softcapping": (None, "capped attention scores are not supported"),
    "final_logit_softcapping": (None, "capped logits are not supported"),
    "num_local_experts": (0, "mixtures of experts are not supported"),
    "num_experts": (0, "mixtures of experts are not supported"),
    "use_qk_norm": (False, "normalised queries and keys are not part of this family"),
    "embedding_multiplier": (1.0, "scaled embeddings are not part of this family"),
    "residual_multiplier": (1.0, "scaled residuals are not part of this family"),
    "attention_multiplier": (None, "another attention scale is not part of this family"),
    "logits_scaling": (1.0, "scaled logits are not part of this family"),
    "logit_scale": (1.0, "scaled logits are not part of this family"),
    "is_encoder_decoder": (False, "encoder-decoder models are not supported"),
    "add_cross_attention": (False, "cross attention is not supported"),
}
_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """Sizes in elements, lengths in tokens. A family subclasses it; see docs/models.md.

    model_type:  what config.json may say instead of an architecture.
    model:       `package.module:Class` of the Decoder that computes it, imported when it is needed:
                 settings are read in processes that have no tensor library.
    rotary_dim:  leading elements of a head that positions turn; the rest pass.
    logit_scale: multiplies the logits.
    dtype:       the checkpoint's own, "float32" when it does not say.
    """

    model_type: ClassVar[str]
    model: ClassVar[str]

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
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    logit_scale: float = 1.0

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

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        """Raise UnsupportedModel unless `num_shards` tensor parallel ranks and `num_stages`
        pipeline stages can share the model evenly. KV heads may also be fewer than shards, if
        whole groups of shards can hold copies of one."""
        uneven = [
            f"{name}={size}"
            for name, size in (
                ("num_attention_heads", self.num_heads),
                ("intermediate_size", self.intermediate_size),
            )
            if size % num_shards
        ]
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
    has_partial_rotary: bool = False,
    rope_aliases: Mapping[str, str] | None = None,
    computed: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of DecoderConfig that all dense families spell alike, as keyword arguments.

    rms_norm_eps, max_position_embeddings: the family's own values where the file says nothing.
    head_dim:           the same; None is hidden_size / num_attention_heads.
    window:             sliding window of the attention, in tokens; None has none.
    has_partial_rotary: the family turns a part of each head.
    rope_aliases:       other names of rope types in this family.
    computed:           keys of settings refused elsewhere that the family computes itself.
    """
    for key in _NOT_COMPUTED.keys() - set(computed):
        fields.refuse_unless_neutral(key, *_NOT_COMPUTED[key])
    _refuse_other_layers(fields)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{fields.source}: hidden_act={activation!r}; the MLP computes silu only. "
            "Use a checkpoint with hidden_act='silu'."
        )
    max_len = fields.integer("max_position_embeddings", max_position_embeddings)
    _refuse_window(fields, window, max_len)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    head_dim = _head_dim(fields, num_heads, head_dim)
    rotary_dim = _rotary_dim(fields, head_dim, has_partial_rotary)
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
        "rope": read_rope_config(
            fields, max_position_embeddings=max_len, rotary_dim=rotary_dim, aliases=rope_aliases
        ),
        "max_position_embeddings": max_len,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", False),
        "dtype": _checkpoint_dtype(fields),
    }


def sliding_window(fields: JsonFields, default: int | None = None) -> int | None:
    """`sliding_window`, in tokens; null is none. default: what its absence means."""
    if "sliding_window" not in fields.values:
        return default
    return fields.integer("sliding_window", 0) or None


def _refuse_window(fields: JsonFields, window: int | None, max_len: int) -> None:
    if window is not None and window < max_len:
        raise UnsupportedModel(
            f"{fields.source}: sliding_window={window} is less than "
            f"max_position_embeddings={max_len}, and sliding window attention is not supported. "
            "Use a checkpoint without a window, or, for requests that fit the window, set "
            f"max_position_embeddings to {window} in config.json."
        )


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


def _rotary_dim(fields: JsonFields, head_dim: int, has_partial_rotary: bool) -> int:
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


def _checkpoint_dtype(fields: JsonFields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{fields.source}: dtype={dtype!r}; weights are computed in {', '.join(_DTYPES)} only."
        )
    return dtype


def _refuse_other_layers(fields: JsonFields) -> None:
    layer_types = fields.values.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple):
        raise fields.wrong("layer_types", "a list")
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise UnsupportedModel(
            f"{fields.source}: layer_types has {', '.join(others)}; every layer here is "
            "full_attention. Use a checkpoint of another architecture."
        )
