"""Small checkpoints with different kinds of attention, which the tests of connectors share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.deploy.llm import in_process_engine
from tests.integration.forks import forked_engines as forked_engines  # a fixture
from tests.models import make_tiny_model
from tests.worker.models.cases import LATENT

KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "full": ("Llama", {}),
    "windows": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 40,
            "head_dim": 16,
            "initializer_range": 0.1,
        },
    ),
    "chunks": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "attention_chunk_size": 48,
            "no_rope_layer_interval": 2,
            "floor_scale": 16,
        },
    ),
    "latents": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "states": (
        "Bamba",
        {
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "attn_layer_indices": [1],
            "initializer_range": 0.2,
        },
    ),
}
"""Models by kind of attention: family and settings."""


@pytest.fixture(autouse=True)
def idle_engines_return_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread drives several engines: while it waits for one that has nothing to do, the others
    wait too."""
    monkeypatch.setattr(in_process_engine, "TRANSFER_POLL_S", 0.002)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The checkpoint of a kind in KINDS, and its transformers model."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            family, settings = KINDS[kind]
            path = tmp_path_factory.mktemp(kind)
            made[kind] = path, make_tiny_model(family, path, **settings)
        return made[kind]

    return make
