"""Qwen3-Next and Qwen3.5: published files, layouts of checkpoints, parts that are not loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshore.protocol.kv_cache_spec import FullAttentionSpec, StateSpec
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.families import read_model_config
from longshore.worker.models.rope_config import DefaultRope
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import FIRST_CASES
from tests.worker.models.conftest import NUM_TOKENS, Checkpoint, prompt_of
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.models.served_model import ServedModel
from tests.worker.models.tiny_qwen3_5 import ROPE, make_qwen3_5_with_images

CheckpointOf = Callable[..., Checkpoint]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_a_checkpoint_with_images_answers_texts_like_transformers(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    settings = FIRST_CASES[family].settings | {"initializer_range": 0.2}
    model = make_qwen3_5_with_images(
        family, tmp_path, **settings | {"tie_word_embeddings": is_tied}
    )
    prompts = [prompt_of(length, seed=length) for length in (90, 7)]
    with ServedModel(tmp_path, num_tokens=NUM_TOKENS) as served:
        answers = served.answers(prompts)
    assert_greedy_equal(
        answers, [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    )


def changed(
    checkpoint: Checkpoint, folder: Path, change: Callable[[dict[str, Tensor]], None]
) -> Path:
    """A copy of a checkpoint with other tensors."""
    tensors = load_file(checkpoint.path / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
    return folder


def stack_experts(tensors: dict[str, Tensor]) -> None:
    """As published for Qwen3.5: two tensors for all experts of a layer, outputs first."""
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{name}.{expert}.{part}.weight") for expert in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{name}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{name}.down_proj"] = down


@pytest.mark.parametrize("family", ["Qwen3_5Moe", "Qwen3Next"])
def test_stacked_experts_are_those_that_are_stored_apart(
    family: str, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(FIRST_CASES[family])
    stacked = changed(checkpoint, tmp_path, stack_experts)
    apart, together = read_model_config(checkpoint.path), read_model_config(stacked)
    assert (apart.mixture.is_stacked, together.mixture.is_stacked) == (False, True)  # type: ignore
    prompt = checkpoint.prompts[0]
    wanted, got = (
        forward_logits([PagedModel(path)], prompt) for path in (checkpoint.path, stacked)
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5"])
def test_layers_for_multi_token_prediction_are_not_loaded(
    family: str, prefix: str, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(FIRST_CASES[family])

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{prefix}layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 5)
        tensors[f"{prefix}fc.weight"] = torch.zeros(2)

    folder = changed(checkpoint, tmp_path, add)
    prompt = checkpoint.prompts[3]
    wanted, got = (forward_logits([PagedModel(path)], prompt) for path in (checkpoint.path, folder))
    assert torch.equal(got, wanted)


QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10_000_000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
TEXT_0_8B: dict[str, Any] = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262_144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]},
    "vocab_size": 248_320,
}
IMAGES_0_8B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "dtype": "bfloat16",
    "model_type": "qwen3_5",
    "text_config": TEXT_0_8B,
    "tie_word_embeddings": True,
    "vision_config": {"depth": 12},
}
SIZES = CacheSizes(block_size=16, dtype_bytes=2)


def read(folder: Path, values: dict[str, Any], **settings: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**values, **settings}))
    return read_model_config(folder)


def test_a_published_file_of_qwen3_next(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT_80B)
    assert config.attention_layers == frozenset(range(3, 48, 4))
    assert (config.head_dim, config.rotary_dim, config.rope) == (256, 64, DefaultRope(1e7))
    assert config.max_supported_len == 262_144
    specs = config.cache_specs(SIZES)
    assert isinstance(specs["model.layers.3"], FullAttentionSpec)
    assert specs["model.layers.4"] == StateSpec(
        block_size=16,
        shapes=((32, 128, 128), (3, 8192)),
        dtype_bytes=(4, 2),
        channels=(("group", 128), ("group", 128), ("head", 128)),
    )
    shapes = config.tensor_shapes()
    assert shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (12_288, 2048)
    assert shapes["model.layers.0.linear_attn.in_proj_ba.weight"] == (64, 2048)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes["model.layers.0.mlp.experts.511.down_proj.weight"] == (2048, 512)


def test_a_published_file_of_qwen3_5(tmp_path: Path) -> None:
    config = read(tmp_path, IMAGES_0_8B)
    assert (config.dtype, config.tie_word_embeddings, config.num_layers) == ("bfloat16", True, 24)
    assert (config.head_dim, config.rotary_dim, config.rope) == (256, 64, DefaultRope(1e7))
    assert (config.mixture, config.dense_layers) == (None, frozenset(range(24)))
    shapes = config.tensor_shapes()
    assert shapes["model.layers.0.linear_attn.in_proj_qkv.weight"] == (6144, 1024)
    assert shapes["model.layers.0.linear_attn.in_proj_z.weight"] == (2048, 1024)
    assert shapes["model.layers.0.linear_attn.in_proj_a.weight"] == (16, 1024)
    assert shapes["model.layers.0.linear_attn.norm.weight"] == (128,)


def test_the_output_head_is_tied_as_the_whole_model_says(tmp_path: Path) -> None:
    text = {**TEXT_0_8B, "tie_word_embeddings": False}
    assert read(tmp_path, IMAGES_0_8B, text_config=text).tie_word_embeddings
    inner = {**TEXT_0_8B, "tie_word_embeddings": True}
    del inner["model_type"]
    assert read(
        tmp_path, IMAGES_0_8B, text_config=inner, tie_word_embeddings=None
    ).tie_word_embeddings


def test_shards_cut_value_heads_and_cut_or_copy_key_heads(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT_80B, linear_num_key_heads=2)
    shapes = {
        num_shards: config.cache_spec(
            0, CacheSizes(block_size=16, dtype_bytes=2, num_shards=num_shards)
        ).shapes
        for num_shards in (1, 2, 4)
    }
    assert shapes[1] == ((32, 128, 128), (3, 4096 + 512))
    assert shapes[2] == ((16, 128, 128), (3, 2048 + 256))
    assert shapes[4] == ((8, 128, 128), (3, 1024 + 256)), "two key heads on four shards"


@pytest.mark.parametrize(
    ("num_shards", "heads", "named"),
    [
        (3, (4, 2), "linear_num_value_heads=4"),
        (4, (12, 3), "linear_num_key_heads=3"),
        (8, (4, 2), "linear_num_value_heads=4"),
    ],
)
def test_what_cannot_be_cut_is_rejected_by_name(
    tmp_path: Path, num_shards: int, heads: tuple[int, int], named: str
) -> None:
    config = read(
        tmp_path, QWEN3_NEXT_80B, linear_num_value_heads=heads[0], linear_num_key_heads=heads[1]
    )
    with pytest.raises(UnsupportedModel, match=named):
        config.check_split(num_shards=num_shards)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=False"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 48}, "type sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_local_experts": 4}, "num_local_experts=4"),
    ],
)
def test_what_is_not_computed_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(tmp_path, QWEN3_NEXT_80B, **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"linear_num_key_heads": 5}, "linear_num_key_heads=5 .* linear_num_value_heads=32"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok=513"),
        ({"layer_types": ["full_attention"]}, "layer_types="),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3"),
    ],
)
def test_what_makes_no_sense_is_rejected_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read(tmp_path, QWEN3_NEXT_80B, **settings)
