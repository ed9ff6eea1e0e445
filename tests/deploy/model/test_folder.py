"""Which settings come from a model folder's JSON files."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.model.folder import (
    ModelFolder,
    SamplingDefaults,
    read_model_folder,
)
from longshore.protocol.errors import ConfigError
from tests.deploy.tiny_tokenizer import EOS_ID, save_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def folder(
    path: Path, config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> ModelFolder:
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_model_folder(path)


def test_lengths_and_ids_come_from_config_json(tmp_path: Path) -> None:
    model = folder(tmp_path, {"torch_dtype": "bfloat16"})
    assert model.name == tmp_path.name
    assert (model.vocab_size, model.max_model_len) == (100, 512)
    assert (model.eos_token_ids, model.checkpoint_dtype) == ((2,), "bfloat16")
    assert model.sampling_defaults == SamplingDefaults()


def test_generation_config_says_what_ends_and_how_to_sample(tmp_path: Path) -> None:
    generation = {"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "top_k": 50}
    model = folder(tmp_path, generation=generation)
    assert model.eos_token_ids == (3, 4, 2)
    assert model.sampling_defaults == SamplingDefaults(0.6, 0.9, 50)


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({}, 1.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_model_that_asks_not_to_be_sampled_is_greedy(
    tmp_path: Path, generation: dict[str, Any], temperature: float
) -> None:
    assert folder(tmp_path, generation=generation).sampling_defaults.temperature == temperature


def test_everything_that_generation_config_may_set_is_a_default(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 300,
    }
    assert folder(tmp_path, generation=generation).sampling_defaults == SamplingDefaults(
        temperature=0.6, top_p=0.9, top_k=0, min_p=0.05, repetition_penalty=1.1, max_tokens=300
    )


def test_what_ends_an_answer_is_the_union_of_all_files(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config = {"eos_token_id": [7, 5], "text_config": {"eos_token_id": 8}}
    model = folder(tmp_path, config | {"vocab_size": 400}, {"eos_token_id": [5, 6]})
    assert model.eos_token_ids == (5, 6, 7, 8, EOS_ID)


def test_model_whose_answers_nothing_ends_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder(tmp_path)
    assert not caplog.records
    folder(tmp_path, {"eos_token_id": None})
    assert "has no token that ends an answer" in caplog.text


def test_ends_that_the_model_cannot_produce_are_none(tmp_path: Path) -> None:
    assert folder(tmp_path, {"eos_token_id": [2, 100]}).eos_token_ids == (2,)


def test_negative_ends_are_none(tmp_path: Path) -> None:
    assert folder(tmp_path, {"eos_token_id": [2, -1]}).eos_token_ids == (2,)
    assert folder(tmp_path, {"eos_token_id": -1}).eos_token_ids == ()


def test_null_in_generation_config_says_nothing(tmp_path: Path) -> None:
    generation = dict.fromkeys(("temperature", "top_k", "min_p", "max_new_tokens", "eos_token_id"))
    model = folder(tmp_path, generation=generation)
    assert model.sampling_defaults == SamplingDefaults()
    assert model.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "llama3", "factor": 32.0, **LLAMA3}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_stretching_rope_lengthens_what_the_model_takes(
    tmp_path: Path, rope: dict[str, Any], length: int
) -> None:
    assert folder(tmp_path, {"rope_scaling": rope}).max_model_len == length


def test_yarn_s_original_length_may_stand_beside_the_scaling(tmp_path: Path) -> None:
    config = {
        "original_max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "finetuned": True},
    }
    assert folder(tmp_path, config).max_model_len == 2048


def test_scaling_that_is_no_object_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rope_scaling"):
        folder(tmp_path, {"rope_scaling": [1, 2]})


@pytest.mark.parametrize(
    ("stored", "asked", "device", "expected"),
    [
        ("bfloat16", "auto", "cpu", "bfloat16"),
        ("float16", "auto", "cpu", "float32"),
        ("float16", "auto", "cuda", "float16"),
        (None, "auto", "cpu", "float32"),
        ("bfloat16", "float32", "cpu", "float32"),
    ],
)
def test_dtype_is_the_checkpoint_s_unless_asked(
    tmp_path: Path, stored: str | None, asked: str, device: str, expected: str
) -> None:
    assert folder(tmp_path, {"dtype": stored}).resolve_dtype(asked, device) == expected


def test_dtype_that_cannot_be_computed_in_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        folder(tmp_path, {"dtype": "float8_e4m3fn"})


@pytest.mark.parametrize(
    ("config", "generation", "words"),
    [
        ({"vocab_size": None}, None, "vocab_size"),
        ({"max_position_embeddings": "many"}, None, "max_position_embeddings"),
        ({"eos_token_id": "</s>"}, None, "eos_token_id"),
        ({"eos_token_id": True}, None, "eos_token_id is True"),
        ({}, {"temperature": -1}, "temperature=-1"),
        ({}, {"top_p": "most"}, "top_p"),
        ({}, {"top_k": "most"}, "generation_config"),
        ({}, {"repetition_penalty": 0}, "repetition_penalty=0"),
        ({}, {"min_p": 2}, "min_p=2"),
        ({}, {"max_new_tokens": 0}, "max_tokens=0"),
    ],
)
def test_wrong_settings_are_rejected_by_name(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        folder(tmp_path, config, generation)


def test_what_is_no_model_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a folder"):
        read_model_folder(tmp_path / "meta-llama")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        read_model_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not readable JSON"):
        read_model_folder(tmp_path)
