"""Gemma 3 from checkpoints that take images too: their text part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.worker.errors import UnsupportedModel
from longshore.worker.models.families import read_model_config
from longshore.worker.models.rope_config import LinearRope
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.conftest import NUM_TOKENS, prompt_of
from tests.worker.models.served_model import ServedModel

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "initializer_range": 0.2,
}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_with_images_answers_texts_like_transformers(
    is_tied: bool, tmp_path: Path
) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {**TEXT, "tie_word_embeddings": is_tied}
    config = Gemma3Config(
        text_config=text,
        vision_config=IMAGES,
        mm_tokens_per_image=4,
        tie_word_embeddings=is_tied,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config).eval().float()
    model.save_pretrained(tmp_path)
    prompts = [prompt_of(length, seed=length) for length in (90, 7)]
    with ServedModel(tmp_path, num_tokens=NUM_TOKENS) as served:
        answers = served.answers(prompts)
    assert_greedy_equal(
        answers, [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    )


def write(folder: Path, **settings: Any) -> Path:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_defaults_of_a_published_file_are_those_of_the_4b_model(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read_model_config(write(tmp_path, text_config=text, torch_dtype="bfloat16"))
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.head_dim, config.max_supported_len, config.dtype) == (256, 131_072, "bfloat16")
    assert (config.score_scale, config.tie_word_embeddings) == (1 / 16, True)
    full = [layer for layer in range(34) if config.reach_of(layer).window is None]
    assert full == [5, 11, 17, 23, 29]
    assert config.rope_of(5) == LinearRope(1e6, 8.0)
    assert config.activation == "gelu_tanh"


def test_quantised_weights_of_all_parts_are_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config has no quant_method"):
        read_model_config(write(tmp_path, text_config=TEXT, quantization_config={"bits": 4}))
