"""The shape of a Llama model, read from its config.json by hand.

Whatever would change the computation and is not implemented is refused here by name, before a
weight is read: a model that loads and answers wrongly is worse than one that does not load.
"""

from dataclasses import dataclass
from typing import Final

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import RopeConfig, max_supported_len, read_rope_config

_NOT_COMPUTED: Final[dict[str, tuple[object, str]]] = {
    # key: (value under which it changes nothing, what it would mean)
    "quantization_config": (None, "quantised weights are not supported"),
    "compression_config": (None, "compressed weights are not supported"),
    "sliding_window": (None, "sliding window attention is not supported"),
    "attention_chunk_size": (None, "chunked local attention is not supported"),
    "attn_logit_softcapping": (None, "capped attention scores are not supported"),
    "final_logit_softcapping": (None, "capped logits are not supported"),
    "num_local_experts": (0, "mixtures of experts are not supported"),
    "num_experts": (0, "mixtures of experts are not supported"),
    "use_qk_norm": (False, "normalised queries and keys are not supported"),
    "embedding_multiplier": (1.0, "scaled embeddings are not supported"),
    "residual_multiplier": (1.0, "scaled residuals are not supported"),
    "attention_multiplier": (None, "another attention scale is not supported"),
    "logits_scaling": (1.0, "scaled logits are not supported"),
    "is_encoder_decoder": (False, "encoder-decoder models are not supported"),
    "add_cross_attention": (False, "cross attention is not supported"),
}
_DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes in elements, lengths in tokens.

    dtype: the checkpoint's own, "float32" when it does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str

    @property
    def max_supported_len(self) -> int:
        """Longest request, in tokens, for which positions are well defined."""
        return max_supported_len(self.rope, self.max_position_embeddings)


def read_llama_config(config: JsonFields) -> LlamaConfig:
    """Raises UnsupportedModel or BrokenCheckpoint naming file, key and value."""
    for key, (neutral, why) in _NOT_COMPUTED.items():
        config.refuse_unless_neutral(key, neutral, why)
    _refuse_other_layers(config)
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{config.source}: hidden_act={activation!r}; the MLP computes silu only. "
            "Use a checkpoint with hidden_act='silu'."
        )
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    max_position_embeddings = config.integer("max_position_embeddings", 2048)
    return LlamaConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        rms_norm_eps=config.real("rms_norm_eps", 1e-6),
        rope=read_rope_config(config, max_position_embeddings=max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        dtype=_checkpoint_dtype(config),
    )


def _head_dim(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if config.values.get("head_dim") is None and hidden_size % num_heads:
        raise config.wrong("hidden_size", f"a multiple of num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.wrong("head_dim", "even: rotary positions turn pairs of elements")
    return head_dim


def _checkpoint_dtype(config: JsonFields) -> str:
    dtype = config.text("dtype", config.text("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{config.source}: dtype={dtype!r}; weights are computed in {', '.join(_DTYPES)} only."
        )
    return dtype


def _refuse_other_layers(config: JsonFields) -> None:
    layer_types = config.values.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple):
        raise config.wrong("layer_types", "a list")
    others = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if others:
        raise UnsupportedModel(
            f"{config.source}: layer_types has {', '.join(others)}; every layer here is "
            "full_attention. Use a checkpoint of another architecture."
        )
