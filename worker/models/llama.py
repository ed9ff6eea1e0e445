"""The Llama family (Touvron et al., 2023): pre-norm, rotary positions, grouped queries, SwiGLU."""

from typing import Final

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.layers.embedding import Embedding
from longshore.worker.layers.linear import FusedLinear, Linear
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.rotary import RotaryEmbedding, rotate
from longshore.worker.models.llama_config import LlamaConfig

EMBEDDINGS: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


class LlamaAttention:
    """Projections around attention; queries, keys and values are one product."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv = FusedLinear(
            config.hidden_size, (q_size, kv_size, kv_size), bias=bias, dtype=dtype, device=device
        )
        self.out = Linear(q_size, config.hidden_size, bias=bias, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], attention: AttentionStep
    ) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        # Queries and keys lie side by side, so one call turns both.
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = rotate(qk, *rotation).split((self.num_heads, self.num_kv_heads), dim=1)
        return self.out(attention.forward(layer, q, k, v))

    def checkpoint_tensors(self, name: str) -> dict[str, Tensor]:
        return {
            **self.qkv.parts((f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")),
            **self.out.checkpoint_tensors(f"{name}.o_proj"),
        }


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = LlamaAttention(config, dtype, device)
        self.post_attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def __call__(
        self, x: Tensor, layer: int, rotation: tuple[Tensor, Tensor], attention: AttentionStep
    ) -> Tensor:
        x = x + self.attention(self.input_norm(x), layer, rotation, attention)
        return x + self.mlp(self.post_attention_norm(x))

    def checkpoint_tensors(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}.input_layernorm.weight": self.input_norm.weight,
            f"{name}.post_attention_layernorm.weight": self.post_attention_norm.weight,
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.mlp.checkpoint_tensors(f"{name}.mlp"),
        }


class Llama:
    """A Llama for causal language modelling. Uninitialised until `checkpoint_tensors` are filled.

    max_model_len: positions that are tabulated, in tokens.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.rotary = RotaryEmbedding(
            config.rope,
            head_dim=config.head_dim,
            max_positions=max_model_len,
            dtype=dtype,
            device=device,
        )
        self.layers = [LlamaLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """The final hidden states, before the last norm.

        token_ids: (n,) int32; positions: (n,) int64, below max_model_len -> (n, hidden_size).
        """
        x = self.embedding(token_ids)
        rotation = self.rotary.gather(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, rotation, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden_size) from `forward` -> (n, vocab_size) float32."""
        return self.head.logits(self.norm(hidden))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes; every one must be filled."""
        tensors = {
            EMBEDDINGS: self.embedding.weight,
            "model.norm.weight": self.norm.weight,
        }
        if self.head is not self.embedding:
            tensors[HEAD] = self.head.weight
        for index, layer in enumerate(self.layers):
            tensors.update(layer.checkpoint_tensors(f"model.layers.{index}"))
        return tensors

    def is_redundant(self, name: str) -> bool:
        """A tensor that some writers store although the model derives it: tables of angles, and
        the output head of a model that ties it to its embeddings."""
        return self.copy_of(name) is not None or name.endswith("rotary_emb.inv_freq")

    def copy_of(self, name: str) -> str | None:
        """A tied output head may be stored, but only as the embeddings that it is tied to."""
        if name == HEAD and self.config.tie_word_embeddings:
            return EMBEDDINGS
        return None
