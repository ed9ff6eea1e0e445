"""Tiny random Llama checkpoints, made by transformers: small enough to compare every logit."""

from pathlib import Path
from typing import Any, Protocol

import pytest


class MakeTinyLlama(Protocol):
    """Writes a checkpoint to `path` and returns the transformers model it was made from."""

    def __call__(self, path: Path, *, max_shard_size: str = "1GB", **overrides: Any) -> Any: ...


def make_tiny_llama(
    path: Path, *, max_shard_size: str = "1GB", seed: int = 0, **overrides: Any
) -> Any:
    """A random Llama in float32: two layers, 4 query heads over 2 KV heads of 16, 128 tokens.

    overrides:      fields of transformers' LlamaConfig.
    max_shard_size: smaller than the model for a sharded checkpoint.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Default weights give nearly flat logits, in which a wrong block would hardly show.
        "initializer_range": 0.3,
    }
    config = LlamaConfig(**(settings | overrides))
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval().float()
    torch.set_rng_state(rng_state)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts them at zero, which would hide them
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


@pytest.fixture(scope="session")
def tiny_llama() -> MakeTinyLlama:
    return make_tiny_llama
