"""DeepSeek-V2 and V3: the meaning of their configs, and what is rejected or ignored."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.protocol.kv_cache_spec import MLAAttentionSpec
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.deepseek_config import DeepseekConfig
from longshore.worker.models.families import read_model_config
from tests.worker.models.cases import CASES, LATENT, Case
from tests.worker.models.conftest import Checkpoint
from tests.worker.models.paged_model import PagedModel, forward_logits

V3 = next(case for case in CASES if case.family == "DeepseekV3")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    **LATENT,
    "n_group": 2,
    "topk_group": 1,
}


def read(folder: Path, version: int, **settings: Any) -> DeepseekConfig:
    config = {"architectures": [f"DeepseekV{version}ForCausalLM"], **SHAPE, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    read = read_model_config(folder)
    assert isinstance(read, DeepseekConfig)
    return read


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        (2, {"scoring_func": "sigmoid"}),
        (2, {"topk_method": "noaux_tc"}),
        (2, {"norm_topk_prob": True}),
        (2, {"mlp_bias": True}),
        (3, {"scoring_func": "softmax"}),
        (3, {"topk_method": "greedy"}),
        (3, {"quantization_config": {"quant_method": "fbgemm_fp8"}}),
    ],
    ids=str,
)
def test_what_the_family_does_not_compute_is_rejected_by_name(
    version: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(settings))):
        read(tmp_path, version, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_group": 3}, "n_group=3 must be a divisor of n_routed_experts=8"),
        ({"topk_group": 3}, "topk_group=3 must be at most n_group=2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most the number of"),
        ({"head_dim": 16}, "head_dim=16 must be qk_rope_head_dim=8"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_named(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, 3, **settings)


def test_shards_must_divide_the_width_of_an_expert(tmp_path: Path) -> None:
    config = read(tmp_path, 3, moe_intermediate_size=34)
    config.check_split(num_shards=2)
    with pytest.raises(UnsupportedModel, match="moe_intermediate_size=34"):
        config.check_split(num_shards=4)


def test_queries_come_from_the_hidden_states_only_if_the_file_says_null(tmp_path: Path) -> None:
    assert read(tmp_path, 2, q_lora_rank=None).q_lora_rank is None
    assert read(tmp_path, 2, q_lora_rank=24).q_lora_rank == 24


def test_dense_layers_come_first_and_where_the_frequency_says(tmp_path: Path) -> None:
    config = read(tmp_path, 2, first_k_dense_replace=2)
    assert [config.is_dense(layer) for layer in range(6)] == [True, True, *[False] * 4]
    config = read(tmp_path, 2, first_k_dense_replace=1, moe_layer_freq=2)
    dense = [layer for layer in range(6) if config.is_dense(layer)]
    assert dense == [0, 1, 3, 5]


def test_stretched_positions_sharpen_the_scores_as_deepseek_v2_was_trained(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    plain = read(tmp_path, 2, **sizes, rope_scaling=yarn)
    assert plain.score_scale == pytest.approx(192**-0.5)
    sharp = read(
        tmp_path, 2, **sizes, rope_scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}
    )
    assert sharp.score_scale == pytest.approx(0.11472, rel=1e-4)


def test_a_token_takes_its_latent_and_its_rotary_key_on_every_shard(tmp_path: Path) -> None:
    config = read(tmp_path, 3)
    for num_shards in (1, 4):
        sizes = CacheSizes(block_size=16, dtype_bytes=2, num_shards=num_shards)
        specs = config.cache_specs(sizes).values()
        assert set(specs) == {MLAAttentionSpec(block_size=16, head_size=48 + 8, dtype_bytes=2)}
        assert sum(spec.page_size_bytes for spec in specs) == 6 * 16 * (48 + 8) * 2


def test_multi_token_prediction_layers_are_not_loaded(
    checkpoint_of: Callable[[Case], Checkpoint],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = checkpoint_of(V3)
    tensors = load_file(checkpoint.path / "model.safetensors")
    config = json.loads((checkpoint.path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors |= {"model.layers.2.eh_proj.weight": torch.randn(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = checkpoint.prompts[0]
    with caplog.at_level(logging.INFO):
        got = forward_logits([PagedModel(tmp_path)], prompt)
    assert "model.layers.2" in caplog.text
    assert torch.equal(got, forward_logits([PagedModel(checkpoint.path)], prompt))

    tensors |= {"model.layers.3.eh_proj.weight": torch.randn(64, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.3\.eh_proj"):
        PagedModel(tmp_path)
