"""Logits of whole prompts against transformers, in float32, for every shape of the family."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.worker.config import WorkerConfig
from longshore.worker.errors import UnsupportedModel
from longshore.worker.worker import Worker
from tests.models import make_tiny_llama
from tests.worker.forward import paged_logits

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500_000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    },
    "yarn with its own amplitude": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "rope_theta": 10_000.0,
    },
    "yarn with a ramp of no width": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 6,
        "rope_theta": 10_000.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "rope_theta": 10_000.0,
    },
}
NUM_TOKENS = 150  # past the trained length of the scaled ropes


def open_worker(path: Path, **overrides: Any) -> Worker:
    settings = {"num_blocks": 40, "max_model_len": 256, "show_progress": False} | overrides
    return Worker(WorkerConfig(model=str(path), **settings))


def assert_same_logits(path: Path, reference: Any, chunks: list[int] | None = None) -> None:
    vocab_size = reference.config.vocab_size
    ids = torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    exact = copy.deepcopy(reference).double()  # in float32 its error is almost 1e-4
    with torch.inference_mode():
        wanted = exact(ids[None]).logits[0].float()
    got = paged_logits(open_worker(path), ids.tolist(), chunks or [NUM_TOKENS])
    assert wanted.std() > 0.1, "a flat reference would prove nothing"
    torch.testing.assert_close(got, wanted, atol=3e-4, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_logits_equal_transformers_for_every_rope(rope: str, tmp_path: Path) -> None:
    reference = make_tiny_llama(tmp_path, rope_parameters=dict(ROPES[rope]))
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize("rope", ["linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
def test_the_older_rope_scaling_key_means_the_same(
    rope: str, kind_key: str, tmp_path: Path
) -> None:
    reference = make_tiny_llama(tmp_path, rope_parameters=dict(ROPES[rope]))
    config_path = tmp_path / "config.json"
    config = json.loads(config_path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling[kind_key] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    config_path.write_text(json.dumps(config))
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize(
    "shape",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 1e-2},
    ],
    ids=["tied", "multi-head", "multi-query", "explicit head_dim", "biases", "eps"],
)
def test_logits_equal_transformers_for_every_shape(shape: dict[str, Any], tmp_path: Path) -> None:
    assert_same_logits(tmp_path, make_tiny_llama(tmp_path, **shape))


def test_logits_of_a_sharded_checkpoint_equal_transformers(tmp_path: Path) -> None:
    reference = make_tiny_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(tmp_path, reference)


@pytest.mark.parametrize(
    "chunks", [[1] * NUM_TOKENS, [64, 86], [16, 1, 33, 100], [149, 1]], ids=str
)
def test_chunks_of_any_size_give_the_logits_of_the_whole_prompt(
    chunks: list[int], checkpoint: tuple[Path, Any]
) -> None:
    assert_same_logits(*checkpoint, chunks=chunks)


def test_bfloat16_logits_stay_near_the_float32_reference(checkpoint: tuple[Path, Any]) -> None:
    path, reference = checkpoint
    ids = torch.randint(128, (64,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        wanted = reference(ids[None]).logits[0]
        rounded = copy.deepcopy(reference).bfloat16()(ids[None]).logits[0].float()
    got = paged_logits(open_worker(path, dtype="bfloat16"), ids.tolist(), [64])
    # Rounding differs with the order of operations; ours may not differ more from float32 than that
    # of transformers.
    assert (got - wanted).abs().mean() < 1.5 * (rounded - wanted).abs().mean()


def test_dynamic_rope_is_rejected_beyond_the_trained_length(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, rope_parameters=dict(ROPES["dynamic"]))
    with pytest.raises(UnsupportedModel, match=r"max_model_len=257 .* 256 .* dynamic rope"):
        open_worker(tmp_path, max_model_len=257)


def test_a_scaled_rope_reaches_its_stretched_length(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, rope_parameters=dict(ROPES["linear"]))
    assert open_worker(tmp_path, max_model_len=1024, num_blocks=65).max_model_len == 1024
    with pytest.raises(UnsupportedModel, match="1024 tokens"):
        open_worker(tmp_path, max_model_len=1025, num_blocks=66)
