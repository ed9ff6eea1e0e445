"""The interface of attention backends, and of layers that replace attention (Mamba)."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.rotary import Rotation


class AttentionInputs(NamedTuple):
    """What a layer of PagedAttentionKind gives to its backend.

    q:        (num_tokens, num_heads, head_dim).
    k, v:     (num_tokens, num_kv_heads, head_dim).
    rotation: what is done to q and k first; then they are overwritten.
    sinks:    (num_heads,) float32, logits that take part in the softmax of each head but have no
              value.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None = None
    sinks: Tensor | None = None


class LayerHooks(Protocol):
    """Called around the attention of each layer, by the layer's cache name."""

    @property
    def has_layer_hooks(self) -> bool:
        """False: neither is called."""
        ...

    def before_layer(self, name: str) -> None: ...

    def after_layer(self, name: str) -> None: ...


class AttentionStep(Protocol):
    """Attention of one step. What all layers have in common is computed once, when it is created.

    native_steps: arguments of the CPU kernel for the parts that it computes; used by graphs.
    """

    @property
    def native_steps(self) -> Sequence[bytes]: ...

    def forward(self, layer: int, inputs: Any) -> Tensor:
        """Write the KV of every token of the step to the cache, then compute the layer.

        Layers and backends of one kind agree on inputs and result: AttentionInputs, and
        (num_tokens, num_heads * head_dim), for PagedAttentionKind.

        The KV of all tokens is written before any token attends, because a request may have a
        prefix hit on blocks that another request fills in the same step.
        """
        ...


class EncodingStep(AttentionStep, Protocol):
    """A step with layers that attend to an encoder's tokens."""

    def write(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """Write the keys and values that the tokens of a row attend to from this step on. Called
        before the layer is computed. k, v: (num_encoder_tokens, num_kv_heads, head_dim)."""
        ...


class AttentionBackend(Protocol):
    """An implementation of layers of one kind, bound to one group's view of the cache. `str` gives
    its description for the log.

    Block table entries that no token of the step needs (outside its window or chunk, or older
    states) may refer to blocks that now belong to other rows. A backend must not read them, not
    even masked.

    A backend with the attribute `is_replayable = True` can be captured in a graph: for a step of
    decodes, everything that depends on rows, lengths and blocks is read on the device, from the
    metadata's tensors, and rows of length 0 read and write nothing. Their results are finite.
    With the attribute `shares_blocks = True`, it uses `AttentionMetadata.shared_tokens`.
    """

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Called once per step on the compute queue; must not wait for the device."""
        ...
