"""What a checkpoint must have is known without torch, in every layout of its names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.checkpoint import check_checkpoint, find_weights
from longshore.worker.loading.loader import load_weights
from longshore.worker.loading.tensor_names import HEAD, SINGLE_FILE, STORED_DECODERS
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from tests.models import SHAPE, make_tiny_config, make_tiny_llama
from tests.worker.models.cases import CASES, FIRST_CASES

BERT: Final = {"type_vocab_size": 2, "pad_token_id": 1}
OTHERS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "Llama, labels": ("Llama", "ForSequenceClassification", {"num_labels": 3}),
    "Qwen3, tokens as label": ("Qwen3", "ForSequenceClassification", {
        "classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}),
    "BERT": ("Bert", "Model", BERT),
    "BERT, labels": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 3}),
    "RoBERTa, labels": ("Roberta", "ForSequenceClassification", {**BERT, "num_labels": 3}),
    "XLM-RoBERTa": ("XLMRoberta", "Model", BERT),
    "Whisper": ("Whisper", "ForConditionalGeneration", {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 80, "decoder_ffn_dim": 96,
        "num_mel_bins": 12, "max_source_positions": 50, "max_target_positions": 40}),
    "Whisper, untied": ("Whisper", "ForConditionalGeneration", {
        "d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "tie_word_embeddings": False}),
}  # fmt: skip


def config_of(path: Path, family: str, head: str, settings: dict[str, Any]) -> DecoderConfig:
    vocab = {"no": 3, "yes": 5}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    make_tiny_config(family, path, head=head, **settings)
    return read_model_config(path)


@pytest.mark.parametrize(
    ("family", "head", "settings"),
    [
        *(pytest.param(c.family, "ForCausalLM", c.settings, id=c.name) for c in CASES),
        *(pytest.param(*other, id=name) for name, other in OTHERS.items()),
    ],
)
def test_shapes_known_without_torch_are_those_of_the_model(
    tmp_path: Path, family: str, head: str, settings: dict[str, Any]
) -> None:
    config = config_of(tmp_path, family, head, settings)
    model = MODELS[type(config)](
        config, max_model_len=16, dtype=torch.float32, device=torch.device("meta")
    )
    tensors = model.checkpoint_tensors()
    assert config.tensor_shapes() == {name: stored.shape for name, stored in tensors.items()}


def write(path: Path, shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> None:
    tensors = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
    save_file(tensors, path / SINGLE_FILE)


@pytest.mark.parametrize("prefix", STORED_DECODERS)
@pytest.mark.parametrize("case", FIRST_CASES.values(), ids=str)
def test_every_family_is_found_under_every_layout(tmp_path: Path, case: Any, prefix: str) -> None:
    config = config_of(tmp_path, case.family, "ForCausalLM", case.settings)
    shapes = config.tensor_shapes()
    own = "backbone." if case.family in ("Mamba2", "NemotronH") else "model."
    if own != "model." and prefix not in ("model.", ""):
        pytest.skip("this family is never a part of another model")
    prefix = own if prefix == "model." else prefix
    stored = {
        name if name == HEAD else prefix + name.removeprefix(own): shape
        for name, shape in shapes.items()
    }
    if prefix.startswith("language_model.") and HEAD in stored:
        stored[f"language_model.{HEAD}"] = stored.pop(HEAD)
    if "language_model" in prefix:
        stored["vision_tower.layers.0.weight"] = stored["model.projector.weight"] = (1,)
    write(tmp_path, stored)
    check_checkpoint(config, find_weights(tmp_path))
    # Without its head, only what is saved without one is whole.
    without = {name: shape for name, shape in stored.items() if not name.endswith(HEAD)}
    write(tmp_path, without)
    is_whole = config.tie_word_embeddings or prefix in ("", "language_model.")
    if is_whole:
        check_checkpoint(read_model_config(tmp_path), find_weights(tmp_path))
    else:
        with pytest.raises(BrokenCheckpoint, match=r"lacks (language_model\.)?lm_head\.weight"):
            check_checkpoint(read_model_config(tmp_path), find_weights(tmp_path))


@pytest.mark.parametrize("prefix", STORED_DECODERS)
def test_the_same_values_are_loaded_under_every_layout(tmp_path: Path, prefix: str) -> None:
    make_tiny_llama(tmp_path)
    config = read_model_config(tmp_path)

    def loaded() -> dict[str, list[torch.Tensor]]:
        model = MODELS[type(config)](
            config, max_model_len=16, dtype=torch.float32, device=torch.device("cpu")
        )
        tensors = model.checkpoint_tensors()
        model.loaded = lambda: None  # type: ignore[method-assign]  # it would pack them
        load_weights(model, find_weights(tmp_path), show_progress=False)
        return {name: [part for part, _ in tensor.parts] for name, tensor in tensors.items()}

    expected = loaded()
    tensors = load_file(tmp_path / SINGLE_FILE)
    renamed = {
        name if name == HEAD else prefix + name.removeprefix("model."): value
        for name, value in tensors.items()
    }
    save_torch_file(renamed, tmp_path / SINGLE_FILE, {"format": "pt"})
    for name, parts in loaded().items():
        for part, other in zip(parts, expected[name], strict=True):
            assert torch.equal(part, other)


def test_a_text_model_saved_with_images_by_transformers_is_found(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**SHAPE, "head_dim": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "whole")
    transformers.Gemma3Model(config).save_pretrained(tmp_path / "body")
    for folder in ("whole", "body"):
        path = tmp_path / folder / "config.json"
        changed = json.loads(path.read_text())
        changed["architectures"] = ["Gemma3ForConditionalGeneration"]
        path.write_text(json.dumps(changed))
        check_checkpoint(read_model_config(tmp_path / folder), find_weights(tmp_path / folder))


def broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        shapes = read_model_config(path).tensor_shapes()
        change(shapes)
        write(path, {f"model.language_{name}": shape for name, shape in shapes.items()})

    return damage


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (
            broken(lambda s: s.pop("model.norm.weight")),
            BrokenCheckpoint,
            r"lacks model\.language_model\.norm\.weight, which config\.json requires",
        ),
        (
            broken(lambda s: s.update({"model.layers.0.extra": (1,)})),
            UnsupportedModel,
            r"has model\.language_model\.layers\.0\.extra, which this model does not use",
        ),
        (
            broken(lambda s: s.update({"model.norm.weight": (3,)})),
            BrokenCheckpoint,
            r"model\.language_model\.norm\.weight has shape \(3,\), but config\.json implies",
        ),
        (
            lambda path: write(path, read_model_config(path).tensor_shapes(), np.int8),
            UnsupportedModel,
            r"is stored as I8; only F32, BF16, F16 are supported",
        ),
    ],
    ids=["missing", "unused", "shape", "dtype"],
)
def test_what_does_not_fit_is_named_as_it_is_stored(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], reason: str
) -> None:
    make_tiny_config("Llama", tmp_path, tie_word_embeddings=True)
    damage(tmp_path)
    with pytest.raises(error, match=reason):
        check_checkpoint(read_model_config(tmp_path), find_weights(tmp_path))
