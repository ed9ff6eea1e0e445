"""One attention interface for all cached layers of a rank, across KV cache groups and kinds."""

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longshore.worker.attention.backend import AttentionBackend, AttentionStep, LayerHooks
from longshore.worker.attention.context_parallel import shared_backend
from longshore.worker.attention.cross_backend import CrossAttentionStep
from longshore.worker.attention.kind import CachedLayer, Kind
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.ranks.parallel import ALONE, Parallel

logger = logging.getLogger(__name__)


class GroupedAttention:
    """The backends of a rank: one per KV cache group and kind of layer."""

    def __init__(
        self, cache: KVCache, layers: Sequence[CachedLayer], parallel: Parallel = ALONE
    ) -> None:
        """layers: the cached layers in the model's order; each must be in a group of the cache.
        parallel: this rank's position. Raises UnsupportedModel for a kind of layer that does not
        support its context parallelism."""
        is_shared = parallel.context_share.size > 1
        entries = {
            name: (group, index)
            for group, planned in enumerate(cache.groups)
            for index, name in enumerate(planned.layer_names)
        }
        numbers: dict[tuple[int, Kind], int] = {}
        self._backends: list[tuple[int, AttentionBackend]] = []  # with their groups
        self._layers: list[tuple[int, int]] = []  # number of the backend, index in the group
        self._names = [layer.name for layer in layers]
        for layer in layers:
            group, index = entries[layer.name]
            number = numbers.setdefault((group, layer.kind), len(numbers))
            if number == len(self._backends):
                view, kind = cache.view(group), layer.kind
                backend = (
                    shared_backend(kind, view, parallel) if is_shared else kind.make_backend(view)
                )
                self._backends.append((group, backend))
            self._layers.append((number, index))
        for description in dict.fromkeys(str(backend) for _, backend in self._backends):
            logger.debug("attention: %s", description)

    @property
    def is_replayable(self) -> bool:
        """See AttentionBackend; of all backends."""
        return all(getattr(backend, "is_replayable", False) for _, backend in self._backends)

    @property
    def shares_blocks(self) -> bool:
        """See AttentionBackend; of any backend."""
        return any(getattr(backend, "shares_blocks", False) for _, backend in self._backends)

    def begin_step(
        self, metadata: Sequence[AttentionMetadata], hooks: LayerHooks | None = None
    ) -> "GroupedStep":
        """metadata: by group. hooks: around each layer of this step. Called once per step
        on the compute queue."""
        steps = [backend.begin_step(metadata[group]) for group, backend in self._backends]
        if hooks is not None and hooks.has_layer_hooks:
            return HookedStep(steps, self._layers, self._names, hooks)
        return GroupedStep(steps, self._layers)


class GroupedStep:
    """The AttentionStep of one step that the model uses."""

    def __init__(self, steps: Sequence[AttentionStep], layers: Sequence[tuple[int, int]]) -> None:
        self._steps = steps
        self._layers = layers
        self.native_steps = [one for step in steps for one in step.native_steps]

    def forward(self, layer: int, inputs: Any) -> Tensor:
        """layer: index among the cached layers of this rank. See AttentionStep.forward."""
        number, index = self._layers[layer]
        return self._steps[number].forward(index, inputs)

    def write(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """layer: a layer of cross attention, numbered as in `forward`. See EncodingStep.write."""
        number, index = self._layers[layer]
        step = self._steps[number]
        assert isinstance(step, CrossAttentionStep)
        step.write(index, row, k, v)


class HookedStep(GroupedStep):
    """A step with hooks around the attention of each layer."""

    def __init__(
        self,
        steps: Sequence[AttentionStep],
        layers: Sequence[tuple[int, int]],
        names: Sequence[str],
        hooks: LayerHooks,
    ) -> None:
        super().__init__(steps, layers)
        self._names = names
        self._hooks = hooks

    def forward(self, layer: int, inputs: Any) -> Tensor:
        name = self._names[layer]
        self._hooks.before_layer(name)
        out = super().forward(layer, inputs)
        self._hooks.after_layer(name)
        return out
