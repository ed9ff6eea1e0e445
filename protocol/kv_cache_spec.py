"""What a block of the KV cache is: sizes per kind of attention, and the groups of one model.

The worker derives the groups from the model; the scheduler plans blocks from them and never learns
what a tensor is. Specs are immutable, and two layers with equal specs can share a group.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

from longshore.protocol.errors import ConfigError, KVCacheTooSmall

KVCacheDtype: TypeAlias = Literal["auto", "fp8_e4m3"]
"""Of keys and values; auto is what the model computes in."""

FP8_E4M3: Final = "fp8_e4m3"

NULL_BLOCK: Final = 0
"""Placeholder in block tables, padding target of kernels: never holds data, never handed out."""

DEFAULT_STEPS_IN_FLIGHT: Final = 2
"""Plans that may be unanswered where nobody says: one is planned ahead of the tokens."""

CROSS_LAYER_LAYOUT: Final = "num_blocks,num_layers,2,block_size,num_kv_heads,head_size"
"""A block's bytes are contiguous over all layers of its group, so one copy moves one block."""


class BadSpec(ConfigError, ValueError):
    """A spec that contradicts itself. Being a ValueError, it makes a message malformed."""


class _Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every integer of a spec is at least 1, but for `may_be_0`. Raises BadSpec."""

    may_be_0: ClassVar[tuple[str, ...]] = ()

    block_size: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value < (0 if name in self.may_be_0 else 1):
                raise BadSpec(f"{type(self).__name__}.{name}={value} is too small")

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        """Blocks that one request of `max_model_len` tokens can hold at most, if the `num_steps`
        steps in flight compute at most `max_num_batched_tokens` (None: all of them) of it."""
        return -(-max_model_len // self.block_size)


class _AttentionSpec(_Spec, frozen=True):
    """A key and a value vector per token and head. Sizes in tokens, heads, elements.

    head_size_v: of the values; None: as the keys'.
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


class FullAttentionSpec(_AttentionSpec, frozen=True, tag="full"):
    """Layers whose every token attends to all earlier ones.

    sliding_window, attention_chunk_size: what the layers really attend to, if they stand in a full
        group because their model is planned without groups that forget; it keeps every block.
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
    """Full attention behind `sink_tokens` learned tokens that every request sees and none computes.
    Their blocks, `num_sink_blocks`, are set aside for good: see `sink_block_ids`."""

    sink_tokens: int

    @property
    def num_sink_blocks(self) -> int:
        """Blocks that the group's sink takes out of the pool."""
        return -(-self.sink_tokens // self.block_size)


class SlidingWindowSpec(_AttentionSpec, frozen=True, tag="sliding_window", kw_only=True):
    """Layers whose tokens attend to themselves and the `sliding_window - 1` tokens before."""

    sliding_window: int

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        computed = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        num_tokens = min(self.sliding_window - 1 + computed, max_model_len)
        return -(-num_tokens // self.block_size) + 1  # they need not begin at a block border


class ChunkedLocalAttentionSpec(_AttentionSpec, frozen=True, tag="chunked_local", kw_only=True):
    """Layers whose tokens attend to those before them in the same chunk; chunks of
    `attention_chunk_size` tokens follow each other from the first token on."""

    attention_chunk_size: int

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        computed = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        num_tokens = min(self.attention_chunk_size + computed, max_model_len)
        return -(-num_tokens // self.block_size) + 1


class MLAAttentionSpec(_Spec, frozen=True, tag="mla"):
    """Layers whose every token attends to all earlier ones by one latent vector per token, which
    stands for the keys and values of all heads; `head_size` counts its rotary part."""

    num_kv_heads: ClassVar[int] = 1

    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * self.head_size * self.dtype_bytes


class MambaSpec(_Spec, frozen=True, tag="mamba"):
    """Layers with a state in place of KV. A block holds the state behind the last token that was
    computed in its `block_size` tokens; once the next block is begun, behind its last token.

    shapes:            of a layer's state tensors.
    dtype_bytes:       of the elements of each.
    padded_size_bytes: bytes that a state takes of a block; None: no more than it needs.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype_bytes: tuple[int, ...]
    padded_size_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtype_bytes):
            raise BadSpec(
                f"{len(self.shapes)} shapes have {len(self.dtype_bytes)} element sizes; a state "
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

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        """The state to go on from, and the one that each step in flight computes."""
        num_new = 1
        if max_num_batched_tokens is not None:
            num_new = min(-(-max_num_batched_tokens // self.block_size), num_steps)
        return min(super().max_blocks(max_model_len), 1 + num_new)


class CrossAttentionSpec(_AttentionSpec, frozen=True, tag="cross", kw_only=True):
    """Layers whose tokens attend to the encoder's, of which a request has at most
    `max_encoder_tokens`; their KV is computed once."""

    max_encoder_tokens: int

    def max_blocks(
        self,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    ) -> int:
        """As many as the encoder's tokens fill, however long the request is."""
        return -(-self.max_encoder_tokens // self.block_size)


class CustomSpec(_Spec, frozen=True, tag="custom"):
    """A kind of attention from another package.

    page_size_bytes: of one block of one layer.
    manager:         `package.module:Class`, who plans its blocks in the scheduler; it extends
                     longshore.scheduler.kv_cache.full.SingleTypeManager.
    settings:        whatever manager and worker agree on.
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
    """What a block id stands for in all ranks together that share the tokens of a block."""
    if context_parallel_size == 1:
        return spec
    return msgspec.structs.replace(spec, block_size=spec.block_size * context_parallel_size)


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table because they have the same kind of attention."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return len(self.layer_names) * self.spec.page_size_bytes


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of one rank: every group takes its blocks from one pool of `num_blocks`."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    dtype: str
    layout: str = CROSS_LAYER_LAYOUT


def max_encoder_tokens(groups: tuple[KVCacheGroup, ...]) -> int | None:
    """Encoder tokens that one request may bring at most; None: no group keeps their KV."""
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
    """Blocks that one request can hold at most, over all groups; see KVCacheSpec.max_blocks.

    context_parallel_size: ranks that share the tokens of a block, which holds so many times those
                           of its spec.
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
    """Of requests of `max_model_len` tokens, in a pool of `num_blocks`; see max_blocks."""
    usable = max(0, num_blocks - num_reserved_blocks(groups))
    needed = max_blocks(
        groups,
        max_model_len,
        max_num_batched_tokens,
        num_steps,
        context_parallel_size=context_parallel_size,
    )
    return usable * max_model_len // needed


def num_blocks_needed(
    groups: Sequence[KVCacheGroup],
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    num_steps: int = DEFAULT_STEPS_IN_FLIGHT,
    *,
    context_parallel_size: int = 1,
) -> int:
    """Of a pool that can hold one request of `max_model_len` tokens; see `max_blocks`."""
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

    Otherwise such a request would be admitted and could never finish, whatever gave way to it.
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
            f", as windows and states also hold what is in flight (here {max_num_batched_tokens} "
            f"tokens in {num_steps} steps)"
        )
        remedy = " or max_num_batched_tokens"
    raise KVCacheTooSmall(
        f"num_blocks={num_blocks} are too few: a request of max_model_len={max_model_len} tokens "
        f"needs {needed}, {num_reserved_blocks(groups)} set aside among them{cause}. Give the "
        f"cache more memory, or lower max_model_len{remedy}."
    )


def num_reserved_blocks(groups: Sequence[KVCacheGroup]) -> int:
    """The null block, and the sinks'."""
    return 1 + sum(map(len, sink_block_ids(tuple(groups))))


def sink_block_ids(groups: tuple[KVCacheGroup, ...]) -> tuple[range, ...]:
    """Per group, the blocks that hold its sink: those behind the null block, in order of group.
    Scheduler and workers both go by this."""
    first, ranges = NULL_BLOCK + 1, []
    for group in groups:
        count = group.spec.num_sink_blocks if isinstance(group.spec, SinkFullAttentionSpec) else 0
        ranges.append(range(first, first + count))
        first += count
    return tuple(ranges)
