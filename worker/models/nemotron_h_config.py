"""Nemotron-H (NVIDIA, 2025): layers of Mamba 2, attention without positions, MLPs or mixtures of
experts, in the order that config.json gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from longshore.protocol.errors import shortened
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, cache_name
from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.deepseek_config import read_routing
from longshore.worker.models.json_fields import MAX_COUNT, JsonFields
from longshore.worker.models.mamba2_config import MambaShape, check_mamba
from longshore.worker.models.tensor_shapes import Shapes, linear, mlp, norms
from longshore.worker.ranks.stages import layers_of_stage

LayerKind: TypeAlias = Literal["mamba", "attention", "mlp", "moe"]

_PATTERN: Final[dict[str, LayerKind]] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Characters of `hybrid_override_pattern`."""
_TYPES: Final[dict[str, LayerKind]] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
"""Names of `layers_block_type`, as written by transformers 4 and 5."""
_NEUTRAL: Final[dict[str, tuple[object, str]]] = {
    # key: (the only value that is supported, reason for rejecting others)
    "attention_bias": (False, "this family's attention has no biases"),
    "mamba_proj_bias": (False, "use_bias says whether Mamba layers have biases"),
    "mamba_hidden_act": ("silu", "Mamba layers support silu only"),
    "mlp_hidden_act": ("relu2", "this family's MLPs and experts support relu2 only"),
    "n_shared_experts": (1, "this family has one shared expert"),
    "residual_in_fp32": (False, "residuals have the model's dtype in this family"),
    "sliding_window": (None, "this family has no windows"),
    "tie_word_embeddings": (False, "this family has an output head of its own"),
}
MLP_NAMES: Final = ("up_proj", "down_proj")
_DRAFTER: Final = "mtp."
"""How the names of layers for multi-token prediction begin; they are not loaded."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixtures of experts. num_groups, top_k_groups, renormalise, scale: see Routing.

    expert_width, shared_width: intermediate sizes of an expert and of the shared expert.
    latent_size: size of what experts read and write, to and from which hidden states are projected;
                 None: they read and write hidden states.
    """

    num_experts: int
    top_k: int
    num_groups: int
    top_k_groups: int
    renormalise: bool
    scale: float
    expert_width: int
    shared_width: int
    latent_size: int | None

    def tensor_shapes(self, name: str, size: int, *, bias: bool) -> Shapes:
        """The tensors of a layer. size: of the hidden states; bias: of all maps but those of the
        router and of the experts."""
        inner = self.latent_size or size
        shapes: Shapes = {
            **linear(f"{name}.gate", self.num_experts, size),
            f"{name}.gate.e_score_correction_bias": (self.num_experts,),
            **mlp(f"{name}.shared_experts", size, self.shared_width, MLP_NAMES, bias=bias),
        }
        if self.latent_size:
            shapes |= linear(f"{name}.fc1_latent_proj", inner, size, bias=bias)
            shapes |= linear(f"{name}.fc2_latent_proj", size, inner, bias=bias)
        for expert in range(self.num_experts):
            module = f"{name}.experts.{expert}"
            shapes |= mlp(module, inner, self.expert_width, MLP_NAMES, bias=False)
        return shapes


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(DecoderConfig):
    """kinds: of each layer. mixture: of layers of the kind "moe"; None: there are none."""

    model_type = "nemotron_h"
    model = "longshore.worker.models.nemotron_h:NemotronH"
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.layers.": "backbone.layers.",
        "model.norm.": "backbone.norm_f.",
    }

    kinds: tuple[LayerKind, ...]
    mamba: MambaShape
    mixture: Mixture | None

    def is_cached(self, layer: int) -> bool:
        return self.kinds[layer] in ("mamba", "attention")

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        if self.kinds[layer] == "mamba":
            return self.mamba.spec(sizes)
        return super().cache_spec(layer, sizes)

    def cache_specs(self, sizes: CacheSizes) -> dict[str, KVCacheSpec]:
        return {
            cache_name(layer): self.cache_spec(layer, sizes)
            for layer in range(self.num_layers)
            if self.is_cached(layer)
        }

    def cut_sizes(self) -> dict[str, int]:
        sizes = {"num_attention_heads": self.num_heads}
        if "mlp" in self.kinds:
            sizes["intermediate_size"] = self.intermediate_size
        if self.mixture is not None:
            sizes["moe_intermediate_size"] = self.mixture.expert_width
            sizes["moe_shared_expert_intermediate_size"] = self.mixture.shared_width
        return sizes

    def check_split(self, *, num_shards: int, num_stages: int = 1) -> None:
        self.mamba.check_split(num_shards)
        super().check_split(num_shards=num_shards, num_stages=num_stages)
        for stage in range(num_stages):
            layers = layers_of_stage(self.num_layers, stage, num_stages)
            if not any(map(self.is_cached, layers)):
                raise UnsupportedModel(
                    f"pipeline_parallel_size={num_stages}: stage {stage} would have layers "
                    f"{layers.start} to {layers.stop - 1}, which are all MLPs or mixtures and "
                    "store nothing. Use fewer stages."
                )

    def layer_shapes(self, layer: int, name: str) -> Shapes:
        size, mixer = self.hidden_size, f"{name}.mixer"
        shapes = norms(name, size, "norm")
        match self.kinds[layer]:
            case "mamba":
                return shapes | self.mamba.tensor_shapes(mixer, size)
            case "attention":
                return shapes | self.attention_shapes(mixer)
            case "mlp":
                bias = self.mlp_bias
                return shapes | mlp(mixer, size, self.intermediate_size, MLP_NAMES, bias=bias)
            case "moe":
                assert self.mixture is not None
                return shapes | self.mixture.tensor_shapes(mixer, size, bias=self.mlp_bias)

    def is_redundant(self, name: str) -> bool:
        return name.startswith(_DRAFTER) or super().is_redundant(name)

    @classmethod
    def read(cls, fields: JsonFields) -> "NemotronHConfig":
        for key, (neutral, why) in _NEUTRAL.items():
            fields.reject_unless_neutral(key, neutral, why)
        kinds = _read_kinds(fields)
        dense = fields.with_defaults(
            {
                "intermediate_size": 21_504,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            nullable=["num_key_value_heads"],
        )
        values = {
            **dense.values,
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": fields.values.get("layer_norm_epsilon"),
            # There are no positions, whatever the file says of them.
            **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), None),
            "partial_rotary_factor": None,
        }
        shape = read_dense_fields(
            JsonFields(values, fields.source),
            rms_norm_eps=1e-5,
            max_position_embeddings=4096,
            computed=("layer_types", "num_local_experts"),
        )
        fields.reject_unless_neutral(
            "attention_head_dim", shape["head_dim"], "head_dim says another size"
        )
        return cls(
            **shape,
            mlp_bias=fields.boolean("mlp_bias", False),
            kinds=kinds,
            mamba=_read_mamba(fields),
            mixture=_read_mixture(fields) if "moe" in kinds else None,
        )


def _read_kinds(fields: JsonFields) -> tuple[LayerKind, ...]:
    """From `layers_block_type` or `hybrid_override_pattern`; `num_hidden_layers` may be absent."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if fields.values.get(key) is not None), keys[0])
    given, known = fields.values.get(key), _PATTERN if key == keys[2] else _TYPES
    if given is None:
        given = ["linear_attention", "moe", "full_attention", "mlp"]
    if not isinstance(given, str if known is _PATTERN else list) or not 0 < len(given) <= MAX_COUNT:
        raise fields.wrong(key, f"the kind of each of up to {MAX_COUNT:,} layers")
    if others := sorted({str(each) for each in given} - known.keys()):
        raise UnsupportedModel(
            f"{fields.source}: {key} has layers of type {shortened(', '.join(others))}, which are "
            f"not supported; this family supports {', '.join(known)}. Use another checkpoint."
        )
    if fields.integer("num_hidden_layers", len(given)) != len(given):
        raise fields.wrong("num_hidden_layers", f"{len(given)}, the number of layers in {key}")
    kinds = tuple(known[str(each)] for each in given)
    if not {"mamba", "attention"} & set(kinds):
        raise fields.wrong(key, "layers with at least one of Mamba or attention")
    return kinds


def _read_mamba(fields: JsonFields) -> MambaShape:
    bias = fields.boolean("use_bias", False)
    mamba = MambaShape(
        num_heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        num_groups=fields.integer("mamba_n_groups", fields.integer("n_groups", 8)),
        state_size=fields.integer("ssm_state_size", 128),
        conv_width=fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4), minimum=2),
        conv_bias=fields.boolean("mamba_conv_bias", fields.boolean("use_conv_bias", True)),
        proj_bias=bias,
        out_bias=bias,
    )
    check_mamba(fields, mamba)
    return mamba


def _read_mixture(fields: JsonFields) -> Mixture:
    defaults = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return Mixture(
        **read_routing(fields.with_defaults(defaults), has_groups=True),
        renormalise=fields.boolean("norm_topk_prob", True),
        scale=fields.real("routed_scaling_factor", 1.0),
        expert_width=fields.integer("moe_intermediate_size", 7688),
        shared_width=fields.integer("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.integer("moe_latent_size", 0) or None,
    )
