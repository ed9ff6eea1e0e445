"""Mamba 2: layers with a norm and a state space mixer."""

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import Kind
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.mamba2 import Mamba2Mixer, mamba_kind
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.mamba2_config import Mamba2Config


class Mamba2Layer:
    """x + mixer(norm(x))."""

    def __init__(self, config: Mamba2Config, placement: Placement) -> None:
        self._has_wide_residual = config.has_wide_residual
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mixer = Mamba2Mixer(config.mamba, config.hidden_size, config.rms_norm_eps, placement)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        if self._has_wide_residual and x.dtype != torch.float32:
            residual = x.float() if residual is None else residual.add_(x)
            x = self.norm(residual.to(x.dtype))
        else:
            x, residual = self.norm.after_add(x, residual)
        return self.mixer(x, layer, rotation, attention), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.norm.weight": whole(self.norm.weight),
            **self.mixer.checkpoint_tensors(f"{name}.mixer"),
        }


class Mamba2(DecoderModel):
    config: Mamba2Config

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        return Mamba2Layer(self.config, placement)

    def attention_kind(self, layer: int) -> Kind:
        return mamba_kind(self.config.mamba, self.parallel.num_shards)

    def forward(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        hidden = super().forward(inputs, positions, attention)
        return hidden.to(self._placement.dtype)  # the residual may be float32
