"""Falcon-H1 (TII, 2025): in every layer, attention and Mamba 2 side by side, with multipliers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mamba2_config import MambaShape, read_hybrid_mamba
from longshore.worker.models.tensor_shapes import Shapes, norms


def mamba_name(layer: int) -> str:
    """Cache name of the state of a layer, whose keys and values have the name of the layer."""
    return f"{cache_name(layer)}.mamba"


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Multipliers are factors on

    embedding_multiplier: embeddings,
    attention_in, attention_out, mamba_in, mamba_out: inputs and outputs of the two mixers,
    gate_multiplier, down_multiplier: the gates of the MLP, before the activation, and its outputs.

    Those on keys and logits are in score_scale and logit_scale.
    """

    model_type = "falcon_h1"
    model = "longshore.worker.models.falcon_h1:FalconH1"
    stored_names: ClassVar[Mapping[str, str]] = {"model.norm.": "model.final_layernorm."}

    mamba: MambaShape
    embedding_multiplier: float
    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float
    gate_multiplier: float
    down_multiplier: float

    def cache_specs(self, sizes: CacheSizes) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = {}
        for layer in range(self.num_layers):
            specs[cache_name(layer)] = self.cache_spec(layer, sizes)
            specs[mamba_name(layer)] = self.mamba.spec(sizes)
        return specs

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        self.mamba.check_split(num_shards)
        super().check_split(num_shards=num_shards, num_stages=num_stages)

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return {
            **norms(name, self.hidden_size, "input_layernorm", "pre_ff_layernorm"),
            **self.attention_shapes(f"{name}.self_attn"),
            **self.mamba.tensor_shapes(f"{name}.mamba", self.hidden_size),
            **self.mlp_shapes(layer, f"{name}.feed_forward"),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "FalconH1Config":
        why = "this family has attention, Mamba and an MLP in every layer"
        fields.reject_unless_neutral("attn_layer_indices", None, why)
        fields.reject_unless_neutral("mamba_use_mlp", True, why)
        bias = fields.boolean("attention_bias", False)
        shape = read_dense_fields(
            fields.with_defaults({"num_key_value_heads": 8}, nullable=["num_key_value_heads"]),
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            computed=("embedding_multiplier", "layer_types"),
        )
        gate, down = _factors(fields, "mlp_multipliers", 2)
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
            score_scale=fields.real("key_multiplier", 1.0) * shape["head_dim"] ** -0.5,
            logit_scale=fields.real("lm_head_multiplier", 1.0),
            mamba=_read_mamba(fields),
            embedding_multiplier=fields.real("embedding_multiplier", 1.0),
            attention_in=fields.real("attention_in_multiplier", 1.0),
            attention_out=fields.real("attention_out_multiplier", 1.0),
            mamba_in=fields.real("ssm_in_multiplier", 1.0),
            mamba_out=fields.real("ssm_out_multiplier", 1.0),
            gate_multiplier=gate,
            down_multiplier=down,
        )


def _read_mamba(fields: JsonFields) -> MambaShape:
    """The width is in the file, or, if that is null, derived from the hidden size."""
    key = "mamba_d_ssm"
    is_derived = key in fields.values and fields.values[key] is None
    mamba = read_hybrid_mamba(fields, None if is_derived else fields.integer(key, 1024))
    return replace(
        mamba,
        out_bias=fields.boolean("projectors_bias", False),
        has_norm=fields.boolean("mamba_rms_norm", False),
        is_norm_first=fields.boolean("mamba_norm_before_gate", True),
        multipliers=_factors(fields, "ssm_multipliers", 5),
    )


def _factors(fields: JsonFields, key: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.values.get(key) is None else fields.reals(key, count)
