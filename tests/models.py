"""Tiny random checkpoints, made by transformers: small enough to compare every logit."""

import importlib
import itertools
import json
from collections.abc import Sequence
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


def make_tiny_mtp_model(path: Path, *, is_skilled: bool = False, **overrides: Any) -> Any:
    """A DeepSeek-V3 of two layers, with a third one for multi-token prediction.

    is_skilled: predictions depend on the last token more than on others, and the third layer knows
                that token, so that it is often right.
    """
    import torch
    from safetensors.torch import load_file, save_file

    settings = {"num_nextn_predict_layers": 1, **overrides}
    model = make_tiny_model("DeepseekV3", path, num_hidden_layers=3, **settings)
    tensors, size = load_file(path / "model.safetensors"), model.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norm = 1 + 0.3 * torch.randn(size, generator=generator)
        tensors[f"model.layers.2.{name}.weight"] = norm
    projection = torch.randn(size, 2 * size, generator=generator) * size**-0.5
    if is_skilled:
        for name in [name for name in tensors if "o_proj" in name or "down_proj" in name]:
            tensors[name] *= 0.05
        embeddings = tensors["model.embed_tokens.weight"]
        embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt()
        projection = torch.cat((torch.eye(size), 0.01 * projection[:, size:]), dim=1)
        tensors["model.layers.2.enorm.weight"] = torch.ones(size)
        tensors["model.layers.2.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.layers.2.eh_proj.weight"] = projection
    # As published: copies of what the model has, too.
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    if "lm_head.weight" in tensors:
        tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return type(model).from_pretrained(path, dtype=torch.float32).eval()


def make_tiny_eagle(
    path: Path, target: Any, *, read_layers: Sequence[int], is_whole: bool = False, **changes: Any
) -> None:
    """An EAGLE-3 drafter for `target`, a model of transformers. Its head has every third token of
    the vocabulary, and it has embeddings of its own.

    is_whole: the head has all tokens, and the embeddings are the model's; names as vLLM writes
             them.
    changes:  of config.json.
    """
    import torch
    from safetensors.torch import save_file

    given, generator = target.config, torch.Generator().manual_seed(2)
    width, heads, kv_heads, head_dim = 80, 4, 2, 16  # KV like that of `SHAPE`
    size = given.hidden_size if is_whole else 48
    token_ids = torch.arange(0, given.vocab_size, 1 if is_whole else 3)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": given.vocab_size,
        "draft_vocab_size": len(token_ids),
        "hidden_size": size,
        "target_hidden_size": given.hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(read_layers)},
        **changes,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    layer = {
        "self_attn.q_proj": matrix(heads * head_dim, 2 * size),
        "self_attn.k_proj": matrix(kv_heads * head_dim, 2 * size),
        "self_attn.v_proj": matrix(kv_heads * head_dim, 2 * size),
        "self_attn.o_proj": matrix(size, heads * head_dim),
        "mlp.gate_proj": matrix(width, size),
        "mlp.up_proj": matrix(width, size),
        "mlp.down_proj": matrix(size, width),
        "hidden_norm": norm(),
        "input_layernorm": norm(),
        "post_attention_layernorm": norm(),
    }
    prefix = "layers.0" if is_whole else "midlayer"
    tensors = {f"{prefix}.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": matrix(size, 3 * given.hidden_size),
        "norm.weight": norm(),
        "lm_head.weight": matrix(len(token_ids), size),
    }
    if not is_whole:
        tensors |= {
            "embed_tokens.weight": torch.randn(given.vocab_size, size, generator=generator),
            "d2t": token_ids - torch.arange(len(token_ids)),
            "t2d": torch.zeros(given.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True),
        }
    save_file(tensors, path / "model.safetensors")


def make_tiny_llama(path: Path, **kwargs: Any) -> Any:
    """`make_tiny_model` of the family that most tests use."""
    return make_tiny_model("Llama", path, **kwargs)
