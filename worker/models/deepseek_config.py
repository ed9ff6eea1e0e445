"""DeepSeek-V2 and V3 (2024): latent attention; dense layers first, then mixtures of experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from longshore.protocol.kv_cache_spec import KVCacheSpec, MLAAttentionSpec
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.decoder_config import DecoderConfig, read_dense_fields
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import RopeConfig, YarnRope
from longshore.worker.models.tensor_shapes import Shapes, gated_mlp, linear, norms, split_experts

_SIZES: Final = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_NULLABLE: Final = ("q_lora_rank", "n_shared_experts")
"""Keys for which null means none, and absence the family's default."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """Sizes in elements.

    num_kv_heads:     1, the latents, which are not divided among shards.
    q_lora_rank:      width of the queries' down-projection; None: queries are projected directly
                      from hidden states.
    kv_lora_rank:     width of a token's latent, from which keys and values are projected.
    qk_nope_head_dim: part of a head's queries and keys without positions; head_dim is the rotated
                      rest.
    v_head_dim:       width of a head's values.
    rope_interleave:  the two rows of a rotary pair are adjacent in the checkpoint.
    first_k_dense_replace: number of leading dense layers.
    moe_layer_freq:   later layers whose index it does not divide are dense too.
    num_experts, top_k, num_groups, top_k_groups: see Routing in worker/layers/moe_router.py.
    expert_dim:       intermediate size of an expert.
    num_shared_experts: shared experts of that size, which compute every token.
    routed_scale:     factor on the weights of the chosen experts.
    renormalises:     the chosen weights are normalised to a sum of 1 before that.
    """

    model = "longshore.worker.models.deepseek:Deepseek"

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    top_k: int
    num_groups: int
    top_k_groups: int
    expert_dim: int
    num_shared_experts: int
    routed_scale: float
    renormalises: bool

    @property
    def qk_rope_head_dim(self) -> int:
        return self.head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts. layer: index in the whole model."""
        return layer < self.first_k_dense_replace or layer % self.moe_layer_freq != 0

    def attention_shapes(self, name: str, *names: Sequence[str]) -> Shapes:
        size, rank, latent = self.hidden_size, self.q_lora_rank, self.kv_lora_rank
        width = self.num_heads * self.qk_head_dim
        bias = bool(self.qkv_bias)
        cached = latent + self.qk_rope_head_dim
        values = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        shapes = {
            **linear(f"{name}.kv_a_proj_with_mqa", cached, size, bias=bias),
            **norms(name, latent, "kv_a_layernorm"),
            **linear(f"{name}.kv_b_proj", values, latent),
            **linear(f"{name}.o_proj", size, self.num_heads * self.v_head_dim, bias=self.out_bias),
        }
        if rank is None:
            return shapes | linear(f"{name}.q_proj", width, size)
        return {
            **shapes,
            **linear(f"{name}.q_a_proj", rank, size, bias=bias),
            **norms(name, rank, "q_a_layernorm"),
            **linear(f"{name}.q_b_proj", width, rank),
        }

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        if self.is_dense(layer):
            return super().mlp_shapes(layer, name)
        size, width = self.hidden_size, self.num_shared_experts * self.expert_dim
        shared = gated_mlp(f"{name}.shared_experts", size, width) if width else {}
        return split_experts(name, self.num_experts, size, self.expert_dim) | shared

    def is_redundant(self, name: str) -> bool:
        """Multi-token prediction layers, which follow the last layer, are redundant too."""
        end = self.num_layers + self.num_mtp_layers
        mtp = tuple(f"model.layers.{layer}." for layer in range(self.num_layers, end))
        return name.startswith(mtp) or super().is_redundant(name)

    def cut_sizes(self) -> dict[str, int]:
        return super().cut_sizes() | {"moe_intermediate_size": self.expert_dim}

    def cache_spec(self, layer: int, sizes: CacheSizes) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=sizes.block_size,
            head_size=self.kv_lora_rank + self.qk_rope_head_dim,
            dtype_bytes=sizes.dtype_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepseekConfig):
    """The router is a softmax; groups, if any, are rated by their best expert."""

    model_type = "deepseek_v2"

    @classmethod
    def read(cls, fields: JsonFields) -> "DeepseekV2Config":
        fields = fields.with_defaults(
            {
                **_SIZES,
                "max_position_embeddings": 2048,
                "n_routed_experts": 64,
                "moe_intermediate_size": 1407,
                "n_shared_experts": 2,
            },
            nullable=_NULLABLE,
        )
        fields.reject_unless_neutral("scoring_func", "softmax", "this family has no other router")
        fields.reject_unless_neutral(
            "norm_topk_prob", False, "renormalised experts are not part of this family"
        )
        fields.reject_unless_neutral("mlp_bias", False, "experts with biases are not supported")
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise UnsupportedModel(
                f"{fields.source}: topk_method={method!r} is not supported; this family supports "
                "'greedy' and 'group_limited_greedy'. Use another checkpoint."
            )
        return cls(
            **_read(fields, has_groups=method == "group_limited_greedy"),
            rope_interleave=True,
            renormalises=False,
        )


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekConfig):
    """The router is a sigmoid with a learned correction of the choice; groups are rated by their
    best two experts."""

    model_type = "deepseek_v3"

    def mlp_shapes(self, layer: int, name: str) -> Shapes:
        shapes = super().mlp_shapes(layer, name)
        if not self.is_dense(layer):
            shapes[f"{name}.gate.e_score_correction_bias"] = (self.num_experts,)
        return shapes

    @classmethod
    def read(cls, fields: JsonFields) -> "DeepseekV3Config":
        fields = fields.with_defaults(
            {
                **_SIZES,
                "max_position_embeddings": 4096,
                "first_k_dense_replace": 3,
                "n_routed_experts": 256,
                "moe_intermediate_size": 2048,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "n_group": 8,
                "topk_group": 4,
                "routed_scaling_factor": 2.5,
                "num_nextn_predict_layers": 1,
            },
            nullable=_NULLABLE,
        )
        for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            fields.reject_unless_neutral(key, value, "this family has no other router")
        return cls(
            **_read(fields, has_groups=True),
            rope_interleave=fields.boolean("rope_interleave", True),
            renormalises=fields.boolean("norm_topk_prob", True),
        )


def _read(fields: JsonFields, *, has_groups: bool) -> dict[str, Any]:
    """The fields that both versions have. has_groups: experts are chosen from the best groups."""
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    shape = read_dense_fields(fields, head_dim=rope_dim)
    if shape["head_dim"] != rope_dim:
        raise fields.wrong("head_dim", f"qk_rope_head_dim={rope_dim}, or absent")
    bias = fields.boolean("attention_bias", False)
    shape.update(
        num_kv_heads=1,  # whatever num_key_value_heads is: all heads share the latents
        qkv_bias=bias,
        out_bias=bias,
        q_lora_rank=fields.integer("q_lora_rank", 0, minimum=0) or None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        score_scale=_score_scale(shape["rope"], nope_dim + rope_dim),
        first_k_dense_replace=fields.integer("first_k_dense_replace", 0, minimum=0),
        moe_layer_freq=fields.integer("moe_layer_freq", 1),
        expert_dim=fields.integer("moe_intermediate_size"),
        num_shared_experts=fields.integer("n_shared_experts", 0, minimum=0),
        routed_scale=fields.real("routed_scaling_factor", 1.0),
        num_mtp_layers=fields.count("num_nextn_predict_layers", 0, minimum=0),
    )
    return shape | read_routing(fields, has_groups)


def read_routing(fields: JsonFields, has_groups: bool) -> dict[str, int]:
    """The numbers of experts and groups. has_groups: experts are chosen from the best groups."""
    num_experts, top_k = fields.count("n_routed_experts"), fields.integer("num_experts_per_tok")
    num_groups = fields.integer("n_group") if has_groups else 1
    top_k_groups = fields.integer("topk_group") if has_groups else 1
    if num_experts % num_groups:
        raise fields.wrong("n_group", f"a divisor of n_routed_experts={num_experts}")
    if top_k_groups > num_groups:
        raise fields.wrong("topk_group", f"at most n_group={num_groups}")
    if top_k > num_experts // num_groups * top_k_groups:
        raise fields.wrong(
            "num_experts_per_tok", "at most the number of experts in topk_group groups"
        )
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "num_groups": num_groups,
        "top_k_groups": top_k_groups,
    }


def _score_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """The factor on scores, which YaRN's temperature increases for stretched positions."""
    sharpness = 1.0
    if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
        sharpness = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
    return sharpness**2 / math.sqrt(qk_head_dim)
