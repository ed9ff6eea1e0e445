"""Nemotron-H: published files, spellings of the layers, parts that are not loaded, what is
rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.protocol.kv_cache_spec import FullAttentionSpec, StateSpec
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.families import read_model_config
from tests.worker.models.cases import FIRST_CASES
from tests.worker.models.conftest import Checkpoint
from tests.worker.models.paged_model import PagedModel, forward_logits

CheckpointOf = Callable[..., Checkpoint]

NANO_9B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15_680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131_072,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131_072,
}
NANO_30B: dict[str, Any] = NANO_9B | {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}
SIZES = CacheSizes(block_size=16, dtype_bytes=2)


def read(folder: Path, published: dict[str, Any] = NANO_9B, **settings: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(published | settings))
    return read_model_config(folder)


def test_the_published_dense_model(tmp_path: Path) -> None:
    config = read(tmp_path)
    specs = config.cache_specs(SIZES)
    kinds = [type(spec) for spec in specs.values()]
    assert kinds.count(StateSpec) == 27
    assert kinds.count(FullAttentionSpec) == 4
    assert [name for name, spec in specs.items() if isinstance(spec, FullAttentionSpec)] == [
        f"model.layers.{layer}" for layer in (14, 21, 30, 39)
    ]
    assert specs["model.layers.0"].shapes == ((128, 80, 128), (3, 128 * 80 + 2 * 8 * 128))
    shapes = config.tensor_shapes()
    assert shapes["backbone.embeddings.weight"] == (131_072, 4480)
    assert shapes["backbone.norm_f.weight"] == (4480,)
    assert shapes["backbone.layers.1.mixer.up_proj.weight"] == (15_680, 4480)
    assert shapes["backbone.layers.14.mixer.o_proj.weight"] == (4480, 5120)
    assert shapes["lm_head.weight"] == (131_072, 4480)
    assert config.max_supported_len == 131_072


def test_the_published_mixture(tmp_path: Path) -> None:
    config = read(tmp_path, NANO_30B)
    shapes = config.tensor_shapes()
    assert shapes["backbone.layers.1.mixer.experts.127.up_proj.weight"] == (1856, 2688)
    assert shapes["backbone.layers.1.mixer.shared_experts.down_proj.weight"] == (2688, 3712)
    assert shapes["backbone.layers.1.mixer.gate.e_score_correction_bias"] == (128,)
    config.check_split(num_shards=4)
    with pytest.raises(UnsupportedModel, match="moe_intermediate_size=1858"):
        read(tmp_path, NANO_30B, moe_intermediate_size=1858).check_split(num_shards=4)
    latent = read(tmp_path, NANO_30B, moe_latent_size=1024).tensor_shapes()
    assert latent["backbone.layers.1.mixer.experts.0.down_proj.weight"] == (1024, 1856)
    assert latent["backbone.layers.1.mixer.fc2_latent_proj.weight"] == (2688, 1024)


def test_layers_are_spelled_as_a_pattern_or_as_a_list(tmp_path: Path) -> None:
    given = {"num_hidden_layers": 4, "hybrid_override_pattern": None}
    wanted = read(tmp_path, NANO_30B, **given | {"hybrid_override_pattern": "ME*-"})
    for types in (
        ["mamba", "moe", "attention", "mlp"],
        ["linear_attention", "moe", "full_attention", "mlp"],
        None,  # as transformers' default
    ):
        assert read(tmp_path, NANO_30B, **given, layers_block_type=types) == wanted
    assert read(tmp_path, NANO_30B, **given | {"num_hidden_layers": None}) == wanted


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hybrid_override_pattern": "M-|" + "M" * 53}, r"layers of type \|"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_head_dim": 64}, "attention_head_dim=64"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"residual_in_fp32": True}, "residual_in_fp32"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern"),
        ({"layers_block_type": "M-"}, "layers_block_type"),
        ({"layers_block_type": []}, "layers_block_type"),
        ({"hybrid_override_pattern": "-" * 56}, "at least one of Mamba or attention"),
        ({"num_hidden_layers": 55}, "num_hidden_layers=55 must be 56"),
        ({"n_groups": 3}, "n_groups=3"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200"),
        ({"n_group": 3}, "n_group=3"),
    ],
)
def test_what_makes_no_sense_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    published = NANO_30B if {"num_experts_per_tok", "n_group"} & settings.keys() else NANO_9B
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, published, **settings)


def test_every_stage_must_have_something_to_store(tmp_path: Path) -> None:
    config = read(tmp_path, hybrid_override_pattern="M*--", num_hidden_layers=4)
    config.check_split(num_shards=1)
    with pytest.raises(UnsupportedModel, match=r"pipeline_parallel_size=2: stage 1 .* 2 to 3"):
        config.check_split(num_shards=1, num_stages=2)
    read(tmp_path).check_split(num_shards=2, num_stages=8)


def test_layers_for_multi_token_prediction_are_not_loaded(
    checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(FIRST_CASES["NemotronH"])
    tensors = load_file(checkpoint.path / "model.safetensors")
    tensors["mtp.layers.0.mixer.q_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
    prompt = checkpoint.prompts[3]
    wanted, got = (
        forward_logits([PagedModel(path)], prompt) for path in (checkpoint.path, tmp_path)
    )
    assert torch.equal(got, wanted)
