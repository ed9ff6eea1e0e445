"""KV cache specs: the size of a block per kind of attention, and the KV cache groups of a model.

The worker derives the groups from the model; the scheduler plans blocks from them without knowing
any tensor. Specs are immutable, and layers with equal specs can share a group.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

from longshore.protocol.errors import ConfigError, KVCacheTooSmall

KVCacheDtype: TypeAlias = Literal["auto", "fp8_e4m3"]
"""The dtype of keys and values; "auto" is the model's dtype."""

FP8_E4M3: Final = "fp8_e4m3"

NULL_BLOCK: Final = 0
"""Placeholder in block tables and padding target of kernels. Holds no data, is never allocated."""

DEFAULT_STEPS_IN_FLIGHT: Final = 2
"""Default for the number of unanswered plans: one step is planned ahead."""

CROSS_LAYER_LAYOUT: Final = "num_blocks,num_layers,2,block_size,num_kv_heads,head_size"
"""A block's bytes are contiguous over all layers of its group, so one copy moves one block."""


class BadSpec(ConfigError, ValueError):
    """A spec is invalid. As a ValueError it makes a received message malformed."""


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every integer of a spec is at least 1. Raises BadSpec."""

    block_size: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise BadSpec(f"{type(self).__name__}.{name}={value} must be at least 1")

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        """Maximum number of blocks that one request of `max_model_len` tokens holds while
        `num_steps` steps in flight compute at most `max_num_batched_tokens` of them (None: all)."""
        return self._max_blocks(max_model_len, max_num_batched_tokens, num_steps)

    def _max_blocks(self, max_model_len: int, num_batched: int | None, num_steps: int) -> int:
        return -(-max_model_len // self.block_size)


class _AttentionSpec(_Spec, frozen=True):
    """A key and a value vector per token and head. Sizes in tokens, heads, elements.

    head_size_v: size of a value vector; None: as `head_size`.
    """

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    head_size_v: int | None = None

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        width = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.num_kv_heads * width * self.dtype_bytes

    def _max_window_blocks(self, num_kept: int, max_model_len: int, num_batched: int | None) -> int:
        """Blocks of a request that keeps `num_kept` tokens in addition to those in flight."""
        in_flight = max_model_len if num_batched is None else num_batched
        num_tokens = min(num_kept + in_flight, max_model_len)
        return -(-num_tokens // self.block_size) + 1  # the first token may lie within a block


class FullAttentionSpec(_AttentionSpec, frozen=True, tag="full"):
    """Layers whose tokens attend to all earlier ones.

    sliding_window, attention_chunk_size: the actual limit of layers that are planned as full
        attention, because no group of this model frees skipped blocks. All blocks are kept.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise BadSpec(
                f"sliding_window={self.sliding_window} and attention_chunk_size="
                f"{self.attention_chunk_size} are both set; a layer has one or the other"
            )


class SinkFullAttentionSpec(_AttentionSpec, frozen=True, tag="sink_full", kw_only=True):
    """Full attention after `sink_tokens` learned tokens, which all requests share and none
    computes. Their `num_sink_blocks` blocks are reserved: see `sink_block_ids`."""

    sink_tokens: int

    @property
    def num_sink_blocks(self) -> int:
        """Blocks of the pool that are reserved for the group's sink."""
        return -(-self.sink_tokens // self.block_size)


class SlidingWindowSpec(_AttentionSpec, frozen=True, tag="sliding_window", kw_only=True):
    """Layers whose tokens attend to themselves and the `sliding_window - 1` tokens before."""

    sliding_window: int

    def _max_blocks(self, max_model_len: int, num_batched: int | None, num_steps: int) -> int:
        return self._max_window_blocks(self.sliding_window - 1, max_model_len, num_batched)


class ChunkedLocalAttentionSpec(_AttentionSpec, frozen=True, tag="chunked_local", kw_only=True):
    """Layers whose tokens attend to earlier ones of the same chunk. Chunks of
    `attention_chunk_size` tokens begin at the first token."""

    attention_chunk_size: int

    def _max_blocks(self, max_model_len: int, num_batched: int | None, num_steps: int) -> int:
        return self._max_window_blocks(self.attention_chunk_size, max_model_len, num_batched)


class MLAAttentionSpec(_Spec, frozen=True, tag="mla"):
    """Multi-head latent attention: tokens attend to all earlier ones by one latent vector per
    token, shared by all heads. `head_size` includes its rotary part."""

    num_kv_heads: ClassVar[int] = 1

    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * self.head_size * self.dtype_bytes


class MambaSpec(_Spec, frozen=True, tag="mamba"):
    """Layers with a recurrent state instead of KV. A block holds the state after the last token
    computed so far in its `block_size` tokens.

    shapes:            shapes of a layer's state tensors.
    dtype_bytes:       element size of each state tensor.
    padded_size_bytes: bytes that a state occupies in a block; None: its own size.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype_bytes: tuple[int, ...]
    padded_size_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtype_bytes):
            raise BadSpec(
                f"{len(self.shapes)} shapes but {len(self.dtype_bytes)} element sizes; each state "
                "tensor has one of each"
            )
        if self.padded_size_bytes is not None and self.padded_size_bytes < self.state_size_bytes:
            raise BadSpec(
                f"padded_size_bytes={self.padded_size_bytes} is less than the "
                f"{self.state_size_bytes} bytes of the state"
            )

    @property
    def state_size_bytes(self) -> int:
        """Bytes of one layer's state."""
        pairs = zip(self.shapes, self.dtype_bytes, strict=True)
        return sum(math.prod(shape) * size for shape, size in pairs)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.state_size_bytes if self.padded_size_bytes is None else self.padded_size_bytes

    def _max_blocks(self, max_model_len: int, num_batched: int | None, num_steps: int) -> int:
        # The state to continue from, and one per step in flight.
        num_new = 1 if num_batched is None else min(-(-num_batched // self.block_size), num_steps)
        return min(super()._max_blocks(max_model_len, num_batched, num_steps), 1 + num_new)


class CrossAttentionSpec(_AttentionSpec, frozen=True, tag="cross", kw_only=True):
    """Layers whose tokens attend to the encoder's tokens, at most `max_encoder_tokens` per request.
    Their KV is computed once."""

    max_encoder_tokens: int

    def _max_blocks(self, max_model_len: int, num_batched: int | None, num_steps: int) -> int:
        return -(-self.max_encoder_tokens // self.block_size)


class CustomSpec(_Spec, frozen=True, tag="custom"):
    """A kind of attention from another package.

    page_size_bytes: bytes of one block of one layer.
    manager:         `package.module:Class` that plans its blocks in the scheduler; a subclass of
                     longshore.scheduler.kv_cache.full.SingleTypeManager.
    settings:        defined by manager and worker.
    """

    page_size_bytes: int
    manager: str
    settings: dict[str, int | float | str] = {}


KVCacheSpec: TypeAlias = (
    FullAttentionSpec
    | SinkFullAttentionSpec
    | SlidingWindowSpec
    | ChunkedLocalAttentionSpec
    | MLAAttentionSpec
    | MambaSpec
    | CrossAttentionSpec
    | CustomSpec
)


def of_all_ranks(spec: KVCacheSpec, context_parallel_size: int) -> KVCacheSpec:
    """`spec` with the `block_size` of all `context_parallel_size` ranks that share a block."""
    if context_parallel_size == 1:
        return spec
    return msgspec.structs.replace(spec, block_size=spec.block_size * context_parallel_size)


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers with the same kind of attention, which share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return len(self.layer_names) * self.spec.page_size_bytes


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of one rank: all groups share one pool of `num_blocks` blocks."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    dtype: str
    layout: str = CROSS_LAYER_LAYOUT


def max_encoder_tokens(groups: tuple[KVCacheGroup, ...]) -> int | None:
    """Maximum number of encoder tokens per request; None without a cross attention group."""
    limits = [g.spec.max_encoder_tokens for g in groups if isinstance(g.spec, CrossAttentionSpec)]
    return min(limits, default=None)


def max_blocks(
    groups: Sequence[KVCacheGroup],
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    *,
    context_parallel_size: int = 1,
) -> int:
    """Maximum number of blocks that one request holds, over all groups; see KVCacheSpec.max_blocks.

    context_parallel_size: number of ranks that share the tokens of a block; the block holds this
                           many times the tokens of its spec.
    """
    longest = (max_model_len, max_num_batched_tokens, num_steps)
    return sum(of_all_ranks(g.spec, context_parallel_size).max_blocks(*longest) for g in groups)


def tokens_that_fit(
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    *,
    context_parallel_size: int = 1,
) -> int:
    """Number of tokens that a pool of `num_blocks` blocks holds if all its requests have
    `max_model_len` tokens; see `max_blocks`."""
    usable = max(0, num_blocks - num_reserved_blocks(groups))
    longest = (max_model_len, max_num_batched_tokens, num_steps)
    needed = max_blocks(groups, *longest, context_parallel_size=context_parallel_size)
    return usable * max_model_len // needed


def num_blocks_needed(
    groups: Sequence[KVCacheGroup],
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    *,
    context_parallel_size: int = 1,
) -> int:
    """Size of a pool that can hold one request of `max_model_len` tokens; see `max_blocks`."""
    longest = (max_model_len, max_num_batched_tokens, num_steps)
    held = max_blocks(groups, *longest, context_parallel_size=context_parallel_size)
    return held + num_reserved_blocks(groups)


def check_holds_one_request(
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_steps: int,
    *,
    context_parallel_size: int = 1,
) -> None:
    """Raise KVCacheTooSmall unless an empty pool can hold one request of `max_model_len` tokens.

    Otherwise such a request would be admitted and could never finish, even alone.
    """
    needed, with_little_in_flight = (
        num_blocks_needed(
            groups, max_model_len, *in_flight, context_parallel_size=context_parallel_size
        )
        for in_flight in ((max_num_batched_tokens, num_steps), (1, 1))
    )
    if num_blocks >= needed:
        return
    cause, remedy = "", ""
    if with_little_in_flight < needed:
        cause = (
            f", because windows and states also hold what is in flight (here "
            f"{max_num_batched_tokens} tokens in {num_steps} steps)"
        )
        remedy = " or max_num_batched_tokens"
    raise KVCacheTooSmall(
        f"num_blocks={num_blocks} are too few: a request of max_model_len={max_model_len} tokens "
        f"needs {needed}, including {num_reserved_blocks(groups)} reserved{cause}. Give the "
        f"cache more memory, or lower max_model_len{remedy}."
    )


def num_reserved_blocks(groups: Sequence[KVCacheGroup]) -> int:
    """The null block and the blocks of all sinks."""
    return 1 + sum(map(len, sink_block_ids(tuple(groups))))


def sink_block_ids(groups: tuple[KVCacheGroup, ...]) -> tuple[range, ...]:
    """The blocks of each group's sink: they follow the null block, in order of group. Scheduler and
    workers both use this."""
    first, ranges = NULL_BLOCK + 1, []
    for group in groups:
        count = group.spec.num_sink_blocks if isinstance(group.spec, SinkFullAttentionSpec) else 0
        ranges.append(range(first, first + count))
        first += count
    return tuple(ranges)
