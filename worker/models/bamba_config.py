"""Bamba (IBM, Princeton, CMU and UIUC, 2024), and the base config of Mamba-attention hybrids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.mamba2_config import MambaShape, read_hybrid_mamba
from longshore.worker.models.tensor_shapes import Shapes, norms


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """attention_layers: indices of the attention layers; all others are Mamba layers."""

    mamba: MambaShape
    attention_layers: frozenset[int]

    def mixer_shapes(self, layer: int, name: str) -> Shapes:
        """The tensors of a layer's attention or Mamba mixer. name: of the layer."""
        if layer in self.attention_layers:
            return self.attention_shapes(f"{name}.self_attn")
        return self.mamba.tensor_shapes(f"{name}.mamba", self.hidden_size)

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        if layer in self.attention_layers:
            return super().cache_spec(layer, sizes)
        return self.mamba.spec(sizes)

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        self.mamba.check_split(num_shards)
        super().check_split(num_shards=num_shards, num_stages=num_stages)


@dataclass(frozen=True, kw_only=True)
class BambaConfig(HybridConfig):
    """By default, rotary positions apply to half of every attention head."""

    model_type = "bamba"
    model = "longshore.worker.models.bamba:Bamba"
    stored_names: ClassVar[Mapping[str, str]] = {"model.norm.": "model.final_layernorm."}

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        return {
            **norms(name, self.hidden_size, "input_layernorm", "pre_ff_layernorm"),
            **self.mixer_shapes(layer, name),
            **self.mlp_shapes(layer, f"{name}.feed_forward"),
        }

    @classmethod
    def read(cls, fields: JsonFields) -> "BambaConfig":
        bias = fields.boolean("attention_bias", False)
        values: dict[str, Any] = {"partial_rotary_factor": 0.5, **fields.values}
        shape = read_dense_fields(
            JsonFields(values, fields.source),
            rms_norm_eps=1e-5,
            max_position_embeddings=262_144,
            has_partial_rotary=True,
        )
        return cls(
            **shape,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
            mamba=read_hybrid_mamba(fields),
            attention_layers=read_layer_indices(fields, "attn_layer_indices") or frozenset(),
        )


def read_layer_indices(fields: JsonFields, key: str) -> frozenset[int] | None:
    """Layers, counted from 0; None if there is no such key. Raises BrokenCheckpoint."""
    layers, num_layers = fields.values.get(key), fields.count("num_hidden_layers")
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(
        type(layer) is int and 0 <= layer < num_layers for layer in layers
    ):
        raise fields.wrong(key, f"a list of numbers below num_hidden_layers={num_layers}")
    return frozenset(layers)
