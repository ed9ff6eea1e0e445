"""Nemotron-H: pre-norm layers that are Mamba 2, attention, an MLP or a mixture of experts each."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import CachedLayer, Kind
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.plan import cache_name
from longshore.worker.layers.attention import NoPEAttention
from longshore.worker.layers.linear import ColumnParallelLinear, Columns
from longshore.worker.layers.mamba2 import Mamba2Mixer, mamba_kind
from longshore.worker.layers.mlp import MLP
from longshore.worker.layers.moe import UngatedExperts
from longshore.worker.layers.moe_router import Router, Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import Attention, FeedForward
from longshore.worker.models.nemotron_h_config import MLP_NAMES, Mixture, NemotronHConfig


class LatentMixture:
    """The best `top_k` experts, which are MLPs without a gate, and a shared one. The chosen experts
    may read and write projections of the hidden states, which all shards compute."""

    def __init__(
        self, mixture: Mixture, hidden_size: int, placement: Placement, *, bias: bool
    ) -> None:
        self._parallel = placement.parallel
        routing = Routing(
            num_experts=mixture.num_experts,
            top_k=mixture.top_k,
            scoring="sigmoid",
            renormalise=mixture.renormalise,
            scale=mixture.scale,
            num_groups=mixture.num_groups,
            top_k_groups=mixture.top_k_groups,
            has_correction=True,
        )
        self.router = Router(hidden_size, routing, placement)
        inner = mixture.latent_size or hidden_size
        self.experts = UngatedExperts(
            mixture.num_experts, inner, mixture.expert_width, "relu2", placement
        )
        self.shared = MLP(
            hidden_size, mixture.shared_width, "relu2", placement, names=MLP_NAMES, bias=bias
        )
        self._into: ColumnParallelLinear | None = None
        self._back: ColumnParallelLinear | None = None
        if mixture.latent_size:
            latent, whole_size = (Columns(size, slice(0, size)) for size in (inner, hidden_size))
            self._into = ColumnParallelLinear(
                hidden_size, (latent,), bias=bias, placement=placement
            )
            self._back = ColumnParallelLinear(inner, (whole_size,), bias=bias, placement=placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        routed = self.router(x)
        out = self.experts(x if self._into is None else self._into(x), routed)
        if self._back is not None:
            bias = self._back.bias if self._parallel.shard == 0 else None
            out = self._back.weight.product(out, bias)
        return self._parallel.all_reduce(out.add_(self.shared.part(x)))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        tensors = {
            **self.router.checkpoint_tensors(f"{name}.gate"),
            **self.experts.checkpoint_tensors(f"{name}.experts"),
            **self.shared.checkpoint_tensors(f"{name}.shared_experts"),
        }
        if self._into is not None and self._back is not None:
            tensors |= self._into.checkpoint_tensors([f"{name}.fc1_latent_proj"])
            tensors |= self._back.checkpoint_tensors([f"{name}.fc2_latent_proj"])
        return tensors


class NemotronHLayer:
    """x + mixer(norm(x)), where the mixer may be one that computes each token separately.

    cached: index among the cached layers of this rank, of a mixer that combines tokens.
    """

    def __init__(
        self,
        config: NemotronHConfig,
        placement: Placement,
        *,
        mixer: Attention | None = None,
        mlp: FeedForward | None = None,
        cached: int = 0,
    ) -> None:
        """Either mixer or mlp is given."""
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mixer, self.mlp, self._cached = mixer, mlp, cached

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.norm.after_add(x, residual)
        if self.mixer is not None:
            return self.mixer(x, self._cached, rotation, attention), residual
        assert self.mlp is not None
        return self.mlp(x), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        mixer = self.mixer or self.mlp
        assert mixer is not None
        return {
            f"{name}.norm.weight": whole(self.norm.weight),
            **mixer.checkpoint_tensors(f"{name}.mixer"),
        }


class NemotronH(DecoderModel):
    config: NemotronHConfig

    def attention_kind(self, layer: int) -> Kind:
        if self.config.kinds[layer] == "attention":
            return super().attention_kind(layer)
        return mamba_kind(self.config.mamba, self.parallel.num_shards)

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return tuple(
            CachedLayer(cache_name(layer), self.attention_kind(layer))
            for layer in self._cached_indices
        )

    @property
    def _cached_indices(self) -> list[int]:
        return [layer for layer in self._layer_indices if self.config.is_cached(layer)]

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        size, bias = config.hidden_size, config.mlp_bias
        match config.kinds[layer]:
            case "mlp":
                width = config.intermediate_size
                mlp = MLP(size, width, "relu2", placement, names=MLP_NAMES, bias=bias)
                return NemotronHLayer(config, placement, mlp=mlp)
            case "moe":
                assert config.mixture is not None
                mixture = LatentMixture(config.mixture, size, placement, bias=bias)
                return NemotronHLayer(config, placement, mlp=mixture)
            case "attention":
                mixer: Attention = NoPEAttention(config, placement)
            case "mamba":
                mixer = Mamba2Mixer(config.mamba, size, config.rms_norm_eps, placement)
        cached = self._cached_indices.index(layer)
        return NemotronHLayer(config, placement, mixer=mixer, cached=cached)
