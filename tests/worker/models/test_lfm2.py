"""LFM2: published files, the pages of small states, and what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.protocol.kv_cache_spec import FullAttentionSpec, StateSpec
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, block_bytes, plan_groups
from longshore.worker.models.families import read_model_config
from longshore.worker.models.rope_config import DefaultRope

SIZES = CacheSizes(block_size=16, dtype_bytes=2)
LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12_288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_use_swiglu": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128_000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
    "use_pos_enc": True,
    "vocab_size": 65_536,
}
LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv"
                    for layer in range(24)],
    "max_position_embeddings": 128_000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65_536,
}  # fmt: skip


def read(folder: Path, published: dict[str, Any], **settings: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(published | settings))
    return read_model_config(folder)


def test_the_published_dense_model(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_1_2B)
    assert config.intermediate_size == 8192, "two thirds of block_ff_dim"
    assert config.tie_word_embeddings
    assert config.rope == DefaultRope(1e6)
    assert config.rms_norm_eps == 1e-5
    specs = config.cache_specs(SIZES)
    kinds = [isinstance(spec, FullAttentionSpec) for spec in specs.values()]
    assert [layer for layer, attends in enumerate(kinds) if attends] == [2, 5, 8, 10, 12, 14]
    assert specs["model.layers.0"] == StateSpec(
        block_size=16, shapes=((2048, 0), (2, 2048)), dtype_bytes=(4, 2), channels=(("head", 1),)
    )
    shapes = config.tensor_shapes()
    assert shapes["model.embedding_norm.weight"] == (2048,)
    assert shapes["model.layers.0.conv.conv.weight"] == (2048, 1, 3)
    assert shapes["model.layers.0.conv.in_proj.weight"] == (6144, 2048)
    assert shapes["model.layers.2.self_attn.q_layernorm.weight"] == (64,)
    assert shapes["model.layers.2.feed_forward.w3.weight"] == (8192, 2048)
    assert "lm_head.weight" not in shapes


def test_the_published_mixture(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_8B_A1B)
    shapes = config.tensor_shapes()
    assert shapes["model.layers.1.feed_forward.w1.weight"] == (7168, 2048)
    assert shapes["model.layers.2.feed_forward.experts.31.w2.weight"] == (2048, 1792)
    assert shapes["model.layers.2.feed_forward.expert_bias"] == (32,)


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_a_state_of_the_published_model_is_one_block(num_shards: int, tmp_path: Path) -> None:
    """Its 10 convolutions keep 80 KiB; 16 tokens of attention take 192 KiB."""
    sizes = CacheSizes(block_size=16, dtype_bytes=2, num_shards=num_shards)
    specs = read(tmp_path, LFM2_1_2B).cache_specs(sizes)
    groups = plan_groups(specs, max_model_len=4096, max_num_batched_tokens=512)
    (state,) = (group.spec for group in groups if isinstance(group.spec, StateSpec))
    assert state.num_pages == 1
    assert state.state_size_bytes * 10 == (80 << 10) // num_shards
    assert block_bytes(groups) == (192 << 10) // num_shards


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12_288),
        ({"block_ffn_dim_multiplier": 1.3}, 10_752),
        ({"block_ff_dim": None, "intermediate_size": 1000, "block_multiple_of": 7}, 672),
    ],
)
def test_the_width_of_the_mlp_is_derived_as_in_transformers(
    settings: dict[str, Any], width: int, tmp_path: Path
) -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    config = {key: value for key, value in (LFM2_1_2B | settings).items() if value is not None}
    assert Lfm2MLP(Lfm2Config(**config)).w1.out_features == width
    assert read(tmp_path, LFM2_1_2B, **settings).intermediate_size == width


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layer_types": ["conv"] * 15 + ["sliding_attention"]}, "sliding_attention"),
        ({"conv_dim": 1024}, "conv_dim=1024"),
        ({"block_use_swiglu": False}, "block_use_swiglu"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"num_experts": 8}, "num_experts"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, LFM2_1_2B, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"full_attn_idxs": 2}, "full_attn_idxs=2"),
        ({"full_attn_idxs": [16]}, "full_attn_idxs"),
        ({"layer_types": ["conv"]}, "layer_types"),
        ({"conv_L_cache": 1}, "conv_L_cache=1"),
    ],
)
def test_what_makes_no_sense_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, LFM2_1_2B, **settings)


def test_shards_must_divide_the_channels(tmp_path: Path) -> None:
    config = read(tmp_path, LFM2_1_2B, hidden_size=2064, head_dim=64, conv_dim=2064,
                  conv_dim_out=2064, block_dim=2064)  # fmt: skip
    with pytest.raises(UnsupportedModel, match="hidden_size=2064"):
        config.check_split(num_shards=32)
