"""Shapes of real models, for folders with a configuration and no weights: they are filled at random
(`--load-format dummy`)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense Qwen3 (Yang et al., 2025) in bfloat16."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    is_tied: bool = False

    @property
    def num_layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def step_weight_bytes(self) -> int:
        """What every step reads: all layers and the head. Of a separate embedding it reads only the
        rows of its tokens."""
        return 2 * (self.num_layer_weights + self.hidden_size * self.vocab_size)

    @property
    def token_kv_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2

    def prefill_flops(self, num_tokens: int, num_before: int = 0) -> int:
        """Operations of one prompt: the products of all layers, and attention to the tokens
        before."""
        num_pairs = num_tokens * num_before + num_tokens * (num_tokens + 1) // 2
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs
        return 2 * self.num_layer_weights * num_tokens + attention

    def config(self, max_model_len: int) -> dict[str, Any]:
        """Fields of config.json, as transformers knows them. No token ends an answer."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": max_model_len,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def write(self, folder: Path, max_model_len: int) -> Path:
        """A model folder without weights."""
        path = folder / f"{self.name.replace(' ', '-')}-{max_model_len}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config(max_model_len)))
        return path


TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=4096,
    is_tied=True,
)
QWEN_0_6B = ModelShape(
    name="Qwen3 0.6B",
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    is_tied=True,
)
QWEN_8B = ModelShape(
    name="Qwen3 8B", hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32
)
QWEN_32B = ModelShape(
    name="Qwen3 32B", hidden_size=5120, intermediate_size=25_600, num_layers=64, num_heads=64
)
SHAPES = {"tiny": TINY, "0.6b": QWEN_0_6B, "8b": QWEN_8B, "32b": QWEN_32B}
