"""Tensors under other names are loaded like those under ours."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.worker.errors import UnsupportedModel
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.loader import load_weights
from longshore.worker.models.families import read_model_config
from longshore.worker.models.llama import Llama
from longshore.worker.models.llama_config import LlamaConfig
from tests.models import make_tiny_llama


class OtherNames(LlamaConfig):
    stored_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens.": "embeddings.",
        "model.": "backbone.",
        "lm_head.": "output.",
    }


def other_name(name: str) -> str:
    own = next(own for own in OtherNames.stored_names if name.startswith(own))
    return OtherNames.stored_names[own] + name.removeprefix(own)


def load_renamed(folder: Path, head: torch.Tensor | None = None) -> dict[str, Any]:
    """The model of the folder with all tensors renamed. head: whether the head is stored too."""
    path = folder / "model.safetensors"
    tensors = {other_name(name): tensor for name, tensor in load_file(path).items()}
    if head is not None:
        tensors["output.weight"] = head
    save_file(tensors, path)
    config = read_model_config(folder)
    model = Llama(
        OtherNames(**{field.name: getattr(config, field.name) for field in fields(config)}),
        max_model_len=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    load_weights(model, find_weights(folder), show_progress=False)
    return tensors


@pytest.mark.parametrize("is_tied", [True, False])
def test_every_tensor_is_found_under_its_other_name(is_tied: bool, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=is_tied)
    assert ("output.weight" in load_renamed(tmp_path)) is not is_tied


def test_a_tied_head_under_another_name_must_be_the_embeddings(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    (tmp_path / "copy").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "copy" / file).write_bytes((tmp_path / file).read_bytes())
    load_renamed(tmp_path / "copy", head=embeddings.clone())
    with pytest.raises(
        UnsupportedModel, match=r"output\.weight differs from embeddings\.weight, .* ties the two"
    ):
        load_renamed(tmp_path, head=embeddings + 1)
