"""Settings of Mamba layers: their meaning in config.json, and what is rejected."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from longshore.protocol.kv_cache_spec import FullAttentionSpec, StateSpec
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes, block_bytes, plan_groups
from longshore.worker.models.families import read_model_config

COMMON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4}
MAMBA2 = {**COMMON, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}
HYBRID = {
    **COMMON,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
FIELDS = {
    "Mamba2": MAMBA2,
    "Bamba": HYBRID,
    "GraniteMoeHybrid": HYBRID,
    "FalconH1": {**HYBRID, "mamba_d_ssm": 96},
}


def read(folder: Path, family: str, **settings: Any) -> Any:
    config = {"architectures": [f"{family}ForCausalLM"], **FIELDS[family], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_config(folder)


def test_a_state_is_float32_and_the_convolution_keeps_the_models_dtype(tmp_path: Path) -> None:
    config = read(tmp_path, "Mamba2", conv_kernel=3)
    spec = config.cache_spec(0, CacheSizes(block_size=32, dtype_bytes=2))
    channels = 8 * 16 + 2 * 2 * 16
    assert spec == StateSpec(
        block_size=32,
        shapes=((8, 16, 16), (2, channels)),
        dtype_bytes=(4, 2),
        channels=(("head", 16), ("group", 16), ("group", 16)),
    )
    assert spec.num_groups == 2


def test_shards_cut_heads_and_groups_or_copy_a_group(tmp_path: Path) -> None:
    config = read(tmp_path, "Mamba2")
    shapes = {
        num_shards: config.cache_spec(
            0, CacheSizes(block_size=16, dtype_bytes=4, num_shards=num_shards)
        ).shapes
        for num_shards in (1, 2, 4)
    }
    assert shapes[1] == ((8, 16, 16), (3, 128 + 64))
    assert shapes[2] == ((4, 16, 16), (3, 64 + 32))
    assert shapes[4] == ((2, 16, 16), (3, 32 + 32)), "two groups on four shards"


@pytest.mark.parametrize(("num_shards", "num_groups"), [(3, 2), (16, 2), (4, 6), (2, 3)])
def test_what_cannot_be_cut_is_rejected_by_name(
    tmp_path: Path, num_shards: int, num_groups: int
) -> None:
    config = read(tmp_path, "Mamba2", num_heads=12 if num_groups % 3 == 0 else 8,
                  n_groups=num_groups)  # fmt: skip
    with pytest.raises(UnsupportedModel, match=rf"size={num_shards} .* in {num_groups} groups"):
        config.check_split(num_shards=num_shards)


@pytest.mark.parametrize("unlimited", [None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]])
@pytest.mark.parametrize("family", FIELDS)
def test_a_limit_that_limits_nothing_is_none(family: str, unlimited: Any, tmp_path: Path) -> None:
    assert read(tmp_path, family, time_step_limit=unlimited) == read(tmp_path, family)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("Mamba2", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("Bamba", {"time_step_limit": [0.001, math.inf]}, "time_step_limit"),
        ("Mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("Bamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("Mamba2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("Mamba2", {"dtype": "float64"}, "dtype"),
        ("GraniteMoeHybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("FalconH1", {"time_step_limit": [0.01, math.inf]}, "time_step_limit"),
        ("FalconH1", {"attn_layer_indices": [1]}, "attn_layer_indices"),
        ("FalconH1", {"mamba_use_mlp": False}, "mamba_use_mlp"),
        ("FalconH1", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(
    family: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, family, **settings)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("Mamba2", {"n_groups": 3}, "n_groups=3"),
        ("Mamba2", {"conv_kernel": 1}, "conv_kernel=1"),
        ("Bamba", {"mamba_n_groups": 3}, "mamba_n_groups=3"),
        ("Bamba", {"mamba_d_head": 8}, "mamba_d_head=8"),
        ("Bamba", {"attn_layer_indices": [4]}, "attn_layer_indices"),
        ("Bamba", {"attn_layer_indices": 1}, "attn_layer_indices"),
        ("FalconH1", {"mamba_d_ssm": 100}, "mamba_d_head=None must be 100 elements"),
        ("FalconH1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ("FalconH1", {"mlp_multipliers": 2.0}, "mlp_multipliers"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba"]}, "layer_types"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba"] * 3 + ["conv"]}, "layer_types"),
        ("GraniteMoeHybrid", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ],
)
def test_what_makes_no_sense_is_rejected_by_name(
    family: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, family, **settings)


def test_layers_are_of_the_kind_that_the_file_says(tmp_path: Path) -> None:
    sizes = CacheSizes(block_size=16, dtype_bytes=4)

    def kinds(config: Any) -> list[type]:
        return [type(spec) for spec in config.cache_specs(sizes).values()]

    wanted = [StateSpec, FullAttentionSpec, StateSpec, StateSpec]
    assert kinds(read(tmp_path, "Bamba", attn_layer_indices=[1])) == wanted
    for mamba, attention in (("mamba", "attention"), ("linear_attention", "full_attention")):
        types = [mamba, attention, mamba, mamba]
        assert kinds(read(tmp_path, "GraniteMoeHybrid", layer_types=types)) == wanted
    old = read(tmp_path, "GraniteMoeHybrid", layers_block_type=["mamba"] * 3 + ["attention"])
    assert kinds(old) == [StateSpec] * 3 + [FullAttentionSpec]


def test_a_layer_may_have_both_kinds_of_cache(tmp_path: Path) -> None:
    config = read(tmp_path, "FalconH1")
    specs = config.cache_specs(CacheSizes(block_size=16, dtype_bytes=2, num_shards=2))
    assert [type(spec) for spec in specs.values()] == [FullAttentionSpec, StateSpec] * 4
    assert [*specs][:2] == ["model.layers.0", "model.layers.0.mamba"]
    groups = plan_groups(specs, max_model_len=256, max_num_batched_tokens=64)
    assert [len(group.layer_names) for group in groups] == [4, 4]


def test_the_width_of_mamba_layers_is_given_or_derived(tmp_path: Path) -> None:
    widths = [
        read(tmp_path, "FalconH1", **settings).mamba.width
        for settings in ({}, {"mamba_d_ssm": None}, {"mamba_d_ssm": 256, "mamba_d_head": 32})
    ]
    assert widths == [96, 128, 256]
    del (config := {"architectures": ["FalconH1ForCausalLM"], **FIELDS["FalconH1"]})["mamba_d_ssm"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path).mamba.width == 1024  # type: ignore[attr-defined]


FALCON_H1_1_5B = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.01953125,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100_000_000_000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 65_537,
}
"""The sizes of the published model."""


def test_the_sizes_of_a_published_falcon_h1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FALCON_H1_1_5B))
    config = read_model_config(tmp_path)
    shapes = config.tensor_shapes()
    assert shapes["model.layers.0.mamba.in_proj.weight"] == (2 * 3072 + 2 * 256 + 48, 2048)
    assert shapes["model.layers.23.self_attn.k_proj.weight"] == (256, 2048)
    assert "model.layers.0.mamba.norm.weight" not in shapes
    assert config.score_scale == pytest.approx(0.390625 / 128**0.5)
    specs = config.cache_specs(CacheSizes(block_size=16, dtype_bytes=2))
    spec = specs["model.layers.0.mamba"]
    assert isinstance(spec, StateSpec)
    assert spec.shapes == ((48, 64, 256), (3, 3072 + 512))
    groups = plan_groups(specs, max_model_len=4096, max_num_batched_tokens=512)
    padded = block_bytes(groups) * groups[-1].spec.num_pages  # type: ignore[union-attr]
    assert padded < 1.02 * 24 * spec.state_size_bytes


def test_states_do_not_limit_the_length_of_a_request(tmp_path: Path) -> None:
    config = read(tmp_path, "Mamba2")
    assert config.max_position_embeddings == 2048
    assert config.max_supported_len == 1 << 24
