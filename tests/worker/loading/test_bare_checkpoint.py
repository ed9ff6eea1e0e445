"""Bare checkpoints: decoders without their output head, as embedding models are saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.deploy.model.folder import read_model_folder
from longshore.protocol.handshake import Feature
from longshore.protocol.kv_cache_spec import StateSpec
from longshore.protocol.requests import PoolingParams
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.kv_cache.kv_scales import read_kv_scales
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.tensor_names import (
    HEAD,
    INDEX_FILE,
    SINGLE_FILE,
    tensor_names,
)
from longshore.worker.worker import Worker
from tests.models import make_tiny_model
from tests.worker.plans import Entry, Planner

PROMPT = [3 + (7 * n) % 120 for n in range(40)]
MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 16}


def open_worker(path: Path) -> Worker:
    return Worker(
        WorkerConfig(model=str(path), num_blocks=100, max_num_seqs=8, show_progress=False)
    )


def vector_of(path: Path) -> Any:
    with open_worker(path) as worker:
        spec = worker.kv_cache.groups[0].spec
        # A state of one page is one block, whatever the number of tokens.
        block_size = len(PROMPT) if isinstance(spec, StateSpec) else spec.block_size
        plans = Planner(num_blocks=100, block_size=block_size)
        entry = Entry(0, PROMPT, pooling=PoolingParams(normalize=False))
        return worker.start().execute(plans.plan({0: 40}, added=[entry])).pooled[0]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        ("Gemma2", {"head_dim": 16, "sliding_window": 256, "initializer_range": 0.1}),
        ("Mamba2", MAMBA),
    ],
)
def test_a_bare_checkpoint_gives_the_vectors_of_the_whole_model(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = make_tiny_model(family, tmp_path / "whole", **settings)
    body = whole.backbone if family == "Mamba2" else whole.model
    body.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["architectures"] == [f"{family}Model"]
    with torch.inference_mode():
        expected = body(torch.tensor([PROMPT])).last_hidden_state[0, -1].numpy()
    for folder in ("whole", "bare"):
        vector = vector_of(tmp_path / folder)
        np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_bare_checkpoint_with_tied_embeddings_generates_tokens(
    is_tied: bool, tmp_path: Path
) -> None:
    whole = make_tiny_model("Llama", tmp_path / "whole", tie_word_embeddings=is_tied)
    whole.model.save_pretrained(tmp_path / "bare")
    with open_worker(tmp_path / "bare") as worker:
        assert (Feature.POOLING_ONLY in worker.features) == (not is_tied)
        assert (worker.model.head is None) == (not is_tied)


def test_bare_names_are_understood_in_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    make_tiny_model("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in tensors.items()}
    expected = vector_of(tmp_path)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(vector_of(tmp_path), expected)


def test_missing_and_unused_tensors_are_named_as_they_are_stored(tmp_path: Path) -> None:
    make_tiny_model("Llama", tmp_path / "whole").model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "pooler.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"has pooler\.weight"):
        open_worker(tmp_path)
    del tensors["norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"lacks norm\.weight"):
        open_worker(tmp_path)


def test_an_unknown_bare_architecture_is_rejected(tmp_path: Path) -> None:
    make_tiny_model("Llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("Llama", "LlamaBidirectionalModel", "LlamaForTokenClassification"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(UnsupportedModel, match=name):
            open_worker(tmp_path)


def as_published(path: Path, **more: torch.Tensor) -> None:
    """Untied, with bare names and no head, but with the architecture of the whole model."""
    make_tiny_model("Qwen3", path, head_dim=16)
    tensors = load_file(path / "model.safetensors")
    body = {n.removeprefix("model."): each for n, each in tensors.items() if n != HEAD}
    save_file(body | more, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_bare_checkpoint_with_the_architecture_of_the_whole_model_gives_vectors(
    is_indexed: bool, tmp_path: Path
) -> None:
    make_tiny_model("Qwen3", tmp_path / "whole", head_dim=16)
    as_published(tmp_path / "bare")
    if is_indexed:
        (tmp_path / "bare" / SINGLE_FILE).rename(tmp_path / "bare" / "part.safetensors")
        names = load_file(tmp_path / "bare" / "part.safetensors")
        index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
        (tmp_path / "bare" / INDEX_FILE).write_text(json.dumps(index))
    with open_worker(tmp_path / "bare") as worker:
        assert Feature.POOLING_ONLY in worker.features
    np.testing.assert_array_equal(vector_of(tmp_path / "bare"), vector_of(tmp_path / "whole"))
    folder = read_model_folder(tmp_path / "bare")
    assert folder.embedding is not None
    assert folder.embedding.is_only


def test_a_whole_model_that_lacks_its_head_is_incomplete(tmp_path: Path) -> None:
    make_tiny_model("Qwen3", tmp_path, head_dim=16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    del tensors[HEAD]
    save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    with pytest.raises(BrokenCheckpoint, match=r"lacks lm_head\.weight"):
        open_worker(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x09\0\0\0\0\0\0\0[1, 2, {}]", b"\xff" * 20])
def test_unreadable_tensor_names_are_an_empty_set(content: bytes, tmp_path: Path) -> None:
    assert tensor_names(tmp_path) == frozenset()
    (tmp_path / SINGLE_FILE).write_bytes(content)
    assert tensor_names(tmp_path) == frozenset()


def test_scales_of_the_kv_cache_are_read_by_bare_names_too(tmp_path: Path) -> None:
    scale = {"layers.0.self_attn.k_scale": torch.tensor(0.5)}
    as_published(tmp_path, **scale)
    scales = read_kv_scales(find_weights(tmp_path), ["model.layers.0", "model.layers.1"])
    assert scales == {"model.layers.0": KVScales(0.5, 1.0), "model.layers.1": KVScales(1.0, 1.0)}
    open_worker(tmp_path).close()
