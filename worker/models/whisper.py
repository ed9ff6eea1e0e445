"""Whisper: an audio encoder, and a decoder with learned positions whose layers have self-attention
and cross-attention to the encoder's tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep, EncodingStep
from longshore.worker.attention.cross_backend import CrossAttentionKind
from longshore.worker.attention.kind import CachedLayer
from longshore.worker.config import QuantisedProducts
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import NoPEAttention
from longshore.worker.layers.audio_encoder import AudioEncoder, EncoderShape
from longshore.worker.layers.audio_features import LogMel
from longshore.worker.layers.cross_attention import CrossAttention
from longshore.worker.layers.layer_norm import LayerNorm
from longshore.worker.layers.mlp import MLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.models.whisper_config import WhisperConfig, cross_name
from longshore.worker.ranks.parallel import ALONE, Parallel

ENCODER = "model.encoder"
POSITIONS = "model.decoder.embed_positions.weight"


class WhisperLayer:
    """x + attention(norm(x)), then x + cross(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: WhisperConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self._num_layers = config.num_layers
        self.attention_norm = LayerNorm(size, eps, placement)
        self.attention = NoPEAttention(config, placement, out_name="out_proj")
        self.cross_norm = LayerNorm(size, eps, placement)
        self.cross = CrossAttention(size, config.num_heads, placement)
        self.mlp_norm = LayerNorm(size, eps, placement)
        self.mlp = MLP(size, config.intermediate_size, config.activation, placement)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm.after_add(x, residual)
        x = self.attention(x, layer, rotation, attention)
        x, residual = self.cross_norm.after_add(x, residual)
        x = self.cross(x, self._num_layers + layer, attention)
        x, residual = self.mlp_norm.after_add(x, residual)
        return self.mlp(x), residual

    def write_kv(self, encoded: Tensor, layer: int, row: int, attention: EncodingStep) -> None:
        """Write the cross-attention KV of a row. encoded: (num_tokens, hidden_size)."""
        self.cross.write_kv(encoded, self._num_layers + layer, row, attention)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.attention_norm.checkpoint_tensors(f"{name}.self_attn_layer_norm"),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.cross_norm.checkpoint_tensors(f"{name}.encoder_attn_layer_norm"),
            **self.cross.checkpoint_tensors(f"{name}.encoder_attn"),
            **self.mlp_norm.checkpoint_tensors(f"{name}.final_layer_norm"),
            **self.mlp.checkpoint_tensors(name),
        }


class Whisper(DecoderModel):
    """positions: (max_position_embeddings, hidden_size), added to the decoder's embeddings."""

    config: WhisperConfig
    layers: Sequence[WhisperLayer]
    norm_type = LayerNorm

    def __init__(
        self,
        config: WhisperConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel = ALONE,
        products: QuantisedProducts | None = None,
    ) -> None:
        super().__init__(
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            parallel=parallel,
            products=products,
        )
        self.positions = self._placement.empty(config.max_position_embeddings, config.hidden_size)
        self.log_mel = LogMel(config.audio, device)
        shape = EncoderShape(
            num_channels=config.audio.num_mel_bins,
            num_tokens=config.num_encoder_tokens,
            size=config.hidden_size,
            num_layers=config.num_encoder_layers,
            num_heads=config.num_encoder_heads,
            intermediate_size=config.encoder_intermediate_size,
            activation=config.activation,
            norm_eps=config.rms_norm_eps,
        )
        self.encoder = AudioEncoder(shape, self._placement)

    def make_layer(self, placement: Placement, layer: int) -> WhisperLayer:
        return WhisperLayer(self.config, placement)

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """The self-attention of all layers, then their cross-attention."""
        cross = CrossAttentionKind(num_heads=self.num_local_heads)
        return super().cached_layers() + tuple(
            CachedLayer(cross_name(layer), cross) for layer in self._layer_indices
        )

    def encode(self, samples: Tensor) -> Tensor:
        return self.encoder(self.log_mel(samples).to(self._placement.dtype))

    def write_encoded(self, encoded: Tensor, row: int, attention: EncodingStep) -> None:
        for index, layer in enumerate(self.layers):
            layer.write_kv(encoded, index, row, attention)

    def forward(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        x = self.embed(inputs).add_(self.positions.index_select(0, positions))
        x, residual = self.run_layers(x, positions, attention)
        return x if residual is None else residual.add_(x)

    def checkpoint_tensors(self) -> StoredTensors:
        return {
            **super().checkpoint_tensors(),
            **self.encoder.checkpoint_tensors(ENCODER),
            POSITIONS: whole(self.positions),
        }
