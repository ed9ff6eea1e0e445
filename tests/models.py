"""Tiny random checkpoints, made by transformers: small enough to compare every logit."""

import importlib
import itertools
from pathlib import Path
from typing import Any, Final

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    # Default weights give nearly flat logits, in which an error from a wrong block would be small.
    "initializer_range": 0.3,
}


def make_tiny_model(
    family: str,
    path: Path,
    *,
    head: str = "ForCausalLM",
    max_shard_size: str = "1GB",
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random model in float32: two layers, 4 query heads over 2 KV heads of 16, 128 tokens.

    family:         of transformers, as in `LlamaForCausalLM`.
    head:           or `ForSequenceClassification`.
    overrides:      fields of its config.
    max_shard_size: smaller than the model for a sharded checkpoint.
    """
    import torch

    model_class = getattr(importlib.import_module("transformers"), f"{family}{head}")
    config = model_class.config_class(**(SHAPE | overrides))
    # Mixtures as plain products: the grouped product that transformers prefers has no float64.
    config._experts_implementation = "eager"
    rng_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config).eval().float()
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        # transformers starts biases at zero and norms at one (some store them minus one), which
        # would hide mixed-up tensors.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif name.endswith(("norm.weight", "norm_f.weight", ".D")):
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5)
        elif name.endswith(".A_log"):  # some states decay slowly, so that a lost state is noticed
            torch.nn.init.uniform_(parameter, -6.0, 1.0)
    torch.set_rng_state(rng_state)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def make_tiny_config(
    family: str, path: Path, *, head: str = "ForCausalLM", **overrides: Any
) -> None:
    """The config.json of `make_tiny_model`, without weights."""
    transformers = importlib.import_module("transformers")
    text = f"{family}TextConfig"  # of families that also have images
    name = text if hasattr(transformers, text) else f"{family}Config"
    config = getattr(transformers, name)(**(SHAPE | overrides))
    config.architectures = [f"{family}{head}"]
    config.save_pretrained(path)


def make_tiny_llama(path: Path, **kwargs: Any) -> Any:
    """`make_tiny_model` of the family that most tests use."""
    return make_tiny_model("Llama", path, **kwargs)
