"""Settings of experts in config.json, in every spelling, and what is rejected."""

from pathlib import Path
from typing import Any

import pytest

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.families import read_model_config
from longshore.worker.models.llama4_config import Llama4Config
from longshore.worker.models.qwen3_moe_config import Qwen3MoeConfig
from longshore.worker.models.rope_config import YarnRope
from tests.worker.models.test_configs import write_config

SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2}


def read(folder: Path, architecture: str, **settings: Any) -> Any:
    return read_model_config(write_config(folder, architecture, **{**SIZES, **settings}))


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_qwen3_s_number_of_experts_has_two_names(spelling: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Qwen3Moe", **{spelling: 16})
    config = read_model_config(folder)
    assert isinstance(config, Qwen3MoeConfig)
    assert (config.num_experts, config.top_k) == (16, 8)


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {0, 1, 2}),
        ({"mlp_only_layers": None, "decoder_sparse_step": 5}, {0, 1, 2, 3}),
    ],
)
def test_qwen3_says_which_layers_are_dense(
    settings: dict[str, Any], dense: set[int], tmp_path: Path
) -> None:
    assert read(tmp_path, "Qwen3Moe", **settings).dense_layers == dense


@pytest.mark.parametrize(
    ("settings", "rope", "experts"),
    [
        ({}, {0, 1, 2}, {0, 1, 2, 3}),
        ({"no_rope_layer_interval": 2}, {0, 2}, {0, 1, 2, 3}),
        ({"no_rope_layers": [], "interleave_moe_layer_step": 2}, {0, 1, 2}, {1, 3}),
        ({"no_rope_layers": [1, 0, 0, 1], "moe_layers": [2]}, {0, 3}, {2}),
    ],
)
def test_llama_4_says_which_layers_have_rope_and_experts(
    settings: dict[str, Any], rope: set[int], experts: set[int], tmp_path: Path
) -> None:
    chunk = {"attention_chunk_size": 64}
    config = read(tmp_path, "Llama4", **chunk, **settings)
    assert isinstance(config, Llama4Config)
    assert (config.rope_layers, config.expert_layers) == (rope, experts)
    assert [config.reach_of(layer).chunk for layer in range(4)] == [
        64 if layer in rope else None for layer in range(4)
    ]


@pytest.mark.parametrize(("value", "scale"), [(True, 0.1), (4, 0.1), (False, 0.0), (None, 0.1)])
def test_llama_4_s_temperature_is_on_unless_it_is_switched_off(
    value: object, scale: float, tmp_path: Path
) -> None:
    assert read(tmp_path, "Llama4", attn_temperature_tuning=value).attn_scale == scale


def test_gpt_oss_stretches_positions_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    rope = read(tmp_path, "GptOss").rope
    assert isinstance(rope, YarnRope)
    assert (rope.theta, rope.factor, rope.truncate) == (150_000.0, 32.0, False)
    written_by_version_4 = {"rope_theta": 1e4, "rope_scaling": None}
    assert not isinstance(read(tmp_path, "GptOss", **written_by_version_4).rope, YarnRope)


@pytest.mark.parametrize("architecture", ["Mixtral", "Qwen3Moe", "GptOss", "Llama4"])
def test_more_experts_per_token_than_there_are_make_no_sense(
    architecture: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"num_experts_per_tok=5 must be at most .* 4"):
        read(tmp_path, architecture, num_experts_per_tok=5)


def test_experts_in_another_format_are_rejected_by_name(tmp_path: Path) -> None:
    quantised = {"quant_method": "bitsandbytes"}
    with pytest.raises(
        UnsupportedModel, match=r"config: quant_method='bitsandbytes' is not supported"
    ):
        read(tmp_path, "GptOss", quantization_config=quantised)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("Qwen3Moe", {"mlp_only_layers": ["first"]}, "mlp_only_layers"),
        ("Llama4", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("Llama4", {"moe_layers": 3}, "moe_layers"),
    ],
)
def test_lists_of_layers_that_make_no_sense_are_rejected(
    architecture: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, architecture, **settings)


def test_a_rope_that_also_stretches_keys_is_rejected_where_a_norm_would_undo_it(
    tmp_path: Path,
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModel, match="YarnRope"):
        read(tmp_path, "Llama4", rope_scaling=yarn)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("Mixtral", {"intermediate_size": 98}, "intermediate_size=98"),
        ("Qwen3Moe", {"moe_intermediate_size": 30}, "moe_intermediate_size=30"),
        ("GptOss", {"intermediate_size": 90}, "intermediate_size=90"),
        ("Llama4", {"intermediate_size": 94}, "intermediate_size=94"),
        ("Llama4", {"intermediate_size_mlp": 90}, "intermediate_size_mlp=90"),
    ],
)
def test_experts_that_cannot_be_cut_evenly_are_rejected_by_name(
    architecture: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = read(tmp_path, architecture, **settings)
    config.check_split(num_shards=2)
    with pytest.raises(UnsupportedModel, match=rf"cannot cut .*{named}"):
        config.check_split(num_shards=4)


def test_a_window_of_qwen3_s_mixtures_is_that_of_all_layers(tmp_path: Path) -> None:
    window = {"sliding_window": 64, "max_window_layers": 2}
    without = read(tmp_path, "Qwen3Moe", **window)
    having = read(tmp_path, "Qwen3Moe", **window, use_sliding_window=True)
    assert {without.reach_of(layer).window for layer in range(4)} == {None}
    assert {having.reach_of(layer).window for layer in range(4)} == {64}
