"""GPT-OSS: a Llama with attention sinks, and a mixture of experts instead of the MLP."""

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs, AttentionStep
from longshore.worker.kernels.gate import Gate
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, StackedExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.gpt_oss_config import GptOssConfig
from longshore.worker.models.llama import PreNormLayer


class SinkAttention(SelfAttention):
    """Attention with a learned sink per head: a logit in the softmax that belongs to no token (Xiao
    et al., 2023).

    sinks: (local heads,) float32.
    """

    def __init__(self, config: GptOssConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self._num_heads = config.num_heads
        self._share = placement.parallel.share(config.num_heads)
        num_local = self._share.stop - self._share.start
        self.sinks = torch.empty(num_local, dtype=torch.float32, device=placement.device)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split(self._heads, dim=1)
        q, k, to_rotate = self.prepare(q, k, rotation)
        return self.out(attention.forward(layer, AttentionInputs(q, k, v, to_rotate, self.sinks)))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        sinks = StoredTensor((self._num_heads,), ((self.sinks, (self._share,)),))
        return {**super().checkpoint_tensors(name), f"{name}.sinks": sinks}


class GptOss(DecoderModel):
    config: GptOssConfig

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        form = ExpertForm(
            stored=StackedExperts(),
            gate=Gate(
                activation="clamped_swiglu",
                alpha=config.swiglu_alpha,
                limit=config.swiglu_limit,
                is_interleaved=True,
            ),
            bias=True,
        )
        routing = Routing(
            num_experts=config.num_experts, top_k=config.top_k, renormalise=True, has_bias=True
        )
        mixture = MixtureOfExperts(
            config.hidden_size,
            config.intermediate_size,
            routing,
            form,
            placement,
            router_name="router",
        )
        return PreNormLayer(
            config, placement, attention=SinkAttention(config, placement), mlp=mixture
        )
