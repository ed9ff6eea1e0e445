"""Folders of EAGLE-3 drafters: what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.protocol.errors import ConfigError
from longshore.worker.config import WorkerConfig
from longshore.worker.drafting.eagle_config import read_eagle_config
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.families import read_model_config
from longshore.worker.models.llama import Llama
from longshore.worker.worker import Worker
from tests.models import make_tiny_eagle, make_tiny_llama

MakeEagle = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("target")
    return path, make_tiny_llama(path, num_hidden_layers=8)


@pytest.fixture
def make_eagle(target: tuple[Path, Any], tmp_path: Path) -> MakeEagle:
    def make(**changes: Any) -> Path:
        make_tiny_eagle(tmp_path / "eagle", target[1], read_layers=(1, 2, 3), **changes)
        return tmp_path / "eagle"

    return make


def open_worker(path: Path, eagle: Path) -> Worker:
    config = {"method": "eagle3", "model": str(eagle), "num_speculative_tokens": 2}
    return Worker(
        WorkerConfig(
            model=str(path),
            num_blocks=20,
            max_model_len=32,
            show_progress=False,
            speculative_config=json.dumps(config),
        )
    )


def test_an_early_a_middle_and_a_late_layer_are_read_by_default(
    target: tuple[Path, Any], make_eagle: MakeEagle
) -> None:
    config = read_model_config(target[0])
    found = read_eagle_config(make_eagle(eagle_config=None), config)
    assert found.read_layers == (2, 4, 5)
    assert (found.num_draft_tokens, found.hidden_size, found.model_hidden_size) == (43, 48, 64)
    assert not found.adds_normed_hidden


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no EAGLE-3 drafter"),
        ({"architectures": None}, "no EAGLE-3 drafter"),
        ({"num_hidden_layers": 2}, "several layers"),
        ({"vocab_size": 99}, "vocab_size=99, but this model has 128"),
        ({"target_hidden_size": 32}, "target_hidden_size=32, but this model has 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state"),
        *(
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": given}}, "3 layers of the 8")
            for given in ([1, 2], [1, 2, 8], [-1, 2, 3], ["1", 2, 3], "1")
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], reason: str, target: tuple[Path, Any], make_eagle: MakeEagle
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_eagle_config(make_eagle(**changes), read_model_config(target[0]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("d2t"), "no table d2t"),
        (lambda tensors: tensors["d2t"].add_(100), "ids outside 0..127"),
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight"),
        (lambda tensors: tensors.pop("embed_tokens.weight"), "embed_tokens.weight"),
    ],
)
def test_broken_weights_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object],
    reason: str,
    target: tuple[Path, Any],
    make_eagle: MakeEagle,
) -> None:
    eagle = make_eagle()
    stored = load_file(eagle / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    change(tensors)
    save_file(tensors, eagle / "model.safetensors")
    with pytest.raises(BrokenCheckpoint, match=reason):
        open_worker(target[0], eagle)


def test_a_model_whose_layers_cannot_be_read_is_refused(
    target: tuple[Path, Any], make_eagle: MakeEagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of another package may run its layers in its own way."""
    monkeypatch.setattr(Llama, "run_layers", lambda *_: None, raising=False)
    with pytest.raises(UnsupportedModel, match="cannot read the hidden states"):
        open_worker(target[0], make_eagle())
