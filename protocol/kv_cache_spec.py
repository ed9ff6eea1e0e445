"""KV cache specs: the size of a block per kind of attention, and the KV cache groups of a model.

The worker derives the groups from the model; the scheduler plans blocks from them without knowing
any tensor. Specs are immutable, and layers with equal specs can share a group.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias

import msgspec

from longshore.protocol.errors import ConfigError, KVCacheTooSmall

KVCacheDtype: TypeAlias = Literal["auto", "fp8_e4m3"]
"""The dtype of keys and values; "auto" is the model's dtype."""

FP8_E4M3: Final = "fp8_e4m3"

NULL_BLOCK: Final = 0
"""Placeholder in block tables and padding target of kernels. Holds no data, is never allocated."""

DEFAULT_STEPS_IN_FLIGHT: Final = 2
"""Default for the number of unanswered plans: one step is planned ahead."""

CROSS_LAYER_LAYOUT: Final = "num_blocks,num_kv_heads,num_layers,2,block_size,head_size"
"""A block's bytes are contiguous over all layers of its group, so one copy moves one block. KV
heads are outermost, so one copy moves any tensor parallel share of it too."""


class LongestRequest(NamedTuple):
    """What bounds the blocks of one request.

    num_tokens:    tokens of prompt and output together.
    num_in_flight: how many of them unanswered steps may compute; None: all.
    num_steps:     unanswered steps.
    context_parallel_size: ranks that share the tokens of a block, which holds this many times the
                   tokens of its spec.
    """

    num_tokens: int
    num_in_flight: int | None = None
    num_steps: int = DEFAULT_STEPS_IN_FLIGHT
    context_parallel_size: int = 1


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

    def max_blocks(self, longest: LongestRequest) -> int:
        """Maximum number of blocks of `block_size` tokens that the request holds at a time."""
        return -(-longest.num_tokens // self.block_size)


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

    def _max_window_blocks(self, num_kept: int, longest: LongestRequest) -> int:
        """Blocks of a request that keeps `num_kept` tokens in addition to those in flight."""
        num_tokens = longest.num_tokens
        if longest.num_in_flight is not None:
            num_tokens = min(num_kept + longest.num_in_flight, num_tokens)
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

    def max_blocks(self, longest: LongestRequest) -> int:
        return self._max_window_blocks(self.sliding_window - 1, longest)


class ChunkedLocalAttentionSpec(_AttentionSpec, frozen=True, tag="chunked_local", kw_only=True):
    """Layers whose tokens attend to earlier ones of the same chunk. Chunks of
    `attention_chunk_size` tokens begin at the first token."""

    attention_chunk_size: int

    def max_blocks(self, longest: LongestRequest) -> int:
        return self._max_window_blocks(self.attention_chunk_size, longest)


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


Channels: TypeAlias = tuple[Literal["head", "group"], int]
"""See StateSpec."""


class StateSpec(_Spec, frozen=True, tag="state", kw_only=True):
    """Layers with a recurrent state instead of KV, which is not tied to tokens: a request has one
    state of all layers of the group, in `num_pages` blocks of the pool, wherever they are.

    A state is divided into units of `unit_bytes`, and a page holds as many whole units as fit. Each
    tensor of a layer begins with a unit; layers follow each other.

    block_size:  states are kept for other requests at multiples of this many tokens.
    shapes:      shapes of a layer's state tensors.
    dtype_bytes: element size of each state tensor.
    channels:    what a line of the second tensor consists of, which says how a state is divided
                 among tensor parallel ranks: in order, ("head", width) for a vector per head, that
                 is per part of the first dimension of the first tensor, and ("group", width) for a
                 vector per group of heads, which several ranks may have. Empty: it is not known.
    num_pages:   blocks of one state, below 2**16; the same on all ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype_bytes: tuple[int, ...]
    channels: tuple[Channels, ...] = ()
    num_pages: int = 1
    unit_bytes: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.shapes) != len(self.dtype_bytes):
            raise BadSpec(
                f"{len(self.shapes)} shapes but {len(self.dtype_bytes)} element sizes; each state "
                "tensor has one of each"
            )
        if self.num_pages >= 1 << 16:
            raise BadSpec(f"num_pages={self.num_pages}: a state has at most {(1 << 16) - 1} pages")

    @property
    def tensor_units(self) -> tuple[int, ...]:
        """Units of each tensor of a layer."""
        pairs = zip(self.shapes, self.dtype_bytes, strict=True)
        return tuple(-(-math.prod(shape) * size // self.unit_bytes) for shape, size in pairs)

    @property
    def first_units(self) -> tuple[int, ...]:
        """The first unit of each tensor, counted from the first of its layer."""
        return tuple(accumulate(self.tensor_units[:-1], initial=0))

    @property
    def state_size_bytes(self) -> int:
        """Bytes of one layer's state."""
        pairs = zip(self.shapes, self.dtype_bytes, strict=True)
        return sum(math.prod(shape) * size for shape, size in pairs)

    @property
    def num_groups(self) -> int:
        """Groups of heads, by `channels`."""
        of_heads = sum(width for kind, width in self.channels if kind == "head")
        of_groups = sum(width for kind, width in self.channels if kind == "group")
        return (self.shapes[1][-1] - self.shapes[0][0] * of_heads) // of_groups if of_groups else 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page that one layer needs, on average."""
        return -(-sum(self.tensor_units) * self.unit_bytes // self.num_pages)

    def page_bytes(self, num_layers: int) -> int:
        """Bytes of a page of states of so many layers."""
        return -(-num_layers * sum(self.tensor_units) // self.num_pages) * self.unit_bytes

    def max_blocks(self, longest: LongestRequest) -> int:
        return self.num_pages


def page_hashes(block_hash: bytes, num_pages: int) -> list[bytes]:
    """Names of the pages of the state after the block with this hash: the hash itself, and the same
    with the number of the page in its last two bytes."""
    last = int.from_bytes(block_hash[-2:], "big")
    return [block_hash[:-2] + (last ^ page).to_bytes(2, "big") for page in range(num_pages)]


class CrossAttentionSpec(_AttentionSpec, frozen=True, tag="cross", kw_only=True):
    """Layers whose tokens attend to the encoder's tokens, at most `max_encoder_tokens` per request.
    Their KV is computed once."""

    max_encoder_tokens: int

    def max_blocks(self, longest: LongestRequest) -> int:
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
    | StateSpec
    | CrossAttentionSpec
    | CustomSpec
)


def of_all_ranks(spec: KVCacheSpec, context_parallel_size: int) -> KVCacheSpec:
    """`spec` with the `block_size` of all `context_parallel_size` ranks that share a block."""
    if context_parallel_size == 1 or isinstance(spec, StateSpec):
        return spec
    return msgspec.structs.replace(spec, block_size=spec.block_size * context_parallel_size)


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers with the same kind of attention, which share one block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        if isinstance(self.spec, StateSpec):
            return self.spec.page_bytes(len(self.layer_names))
        return len(self.layer_names) * self.spec.page_size_bytes


DRAFT_PREFIX: Final = "draft."
"""Begins the names of the layers of a drafter, which has KV heads of its own."""


class HeadShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV heads of the model that a rank holds: `count` heads from `first` on, of `total`.

    Ranks hold copies of a head if there are fewer heads than shards. Latents are one head. Raises
    BadSpec.
    """

    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.first + self.count <= self.total:
            raise BadSpec(
                f"{self.count} KV heads from {self.first} on are not part of {self.total} heads"
            )

    @classmethod
    def of_shard(cls, shard: int, num_shards: int, total: int) -> "HeadShare":
        """The share of a tensor parallel shard. `total` is a multiple or a divisor of
        `num_shards`."""
        return cls(shard * total // num_shards, max(1, total // num_shards), total)


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of one rank: all groups share one pool of `num_blocks` blocks.

    rotation: by what keys are rotated, where the model's files leave a choice; empty: they do not.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    dtype: str
    layout: str = CROSS_LAYER_LAYOUT
    rotation: str = ""

    @property
    def largest_block_bytes(self) -> int:
        """Bytes that a block of any group needs on this rank."""
        return max(group.block_size_bytes for group in self.groups)


def max_encoder_tokens(groups: tuple[KVCacheGroup, ...]) -> int | None:
    """Maximum number of encoder tokens per request; None without a cross attention group."""
    limits = [g.spec.max_encoder_tokens for g in groups if isinstance(g.spec, CrossAttentionSpec)]
    return min(limits, default=None)


def max_blocks(groups: Sequence[KVCacheGroup], longest: LongestRequest) -> int:
    """Maximum number of blocks that one request holds at a time, over all groups."""
    return _max_blocks([group.spec for group in groups], longest)


def _max_blocks(specs: Sequence[KVCacheSpec], longest: LongestRequest) -> int:
    size = longest.context_parallel_size
    return sum(of_all_ranks(spec, size).max_blocks(longest) for spec in specs)


def num_blocks_needed(groups: Sequence[KVCacheGroup], longest: LongestRequest) -> int:
    """Size of a pool that can hold one such request."""
    return max_blocks(groups, longest) + num_reserved_blocks(groups)


def tokens_that_fit(
    groups: Sequence[KVCacheGroup], num_blocks: int, longest: LongestRequest
) -> int:
    """Number of tokens that a pool of `num_blocks` blocks holds if every request is this long."""
    usable = max(0, num_blocks - num_reserved_blocks(groups))
    return usable * longest.num_tokens // max_blocks(groups, longest)


class KVCapacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many blocks the requests of an engine can hold, and how many each of them needs.

    num_blocks:           of the pool, without reserved ones.
    num_leasable_blocks:  of these, how many may be kept for other engines when requests have ended.
    specs:                of the groups.
    longest:              the longest request that may run.
    num_lookahead_tokens: slots that a request has after its tokens.
    """

    num_blocks: int
    num_leasable_blocks: int
    specs: tuple[KVCacheSpec, ...]
    longest: LongestRequest
    num_lookahead_tokens: int = 0

    @classmethod
    def of_pool(
        cls,
        kv_cache: KVCacheConfig,
        longest: LongestRequest,
        *,
        num_leasable_blocks: int,
        num_lookahead_tokens: int,
    ) -> "KVCapacity":
        """The capacity of an empty pool."""
        num_blocks = max(0, kv_cache.num_blocks - num_reserved_blocks(kv_cache.groups))
        specs = tuple(group.spec for group in kv_cache.groups)
        num_leasable_blocks = min(num_leasable_blocks, num_blocks)
        return cls(num_blocks, num_leasable_blocks, specs, longest, num_lookahead_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        """Maximum number of blocks, over all groups, that a request holds for its first
        `num_tokens` tokens."""
        num_tokens += self.num_lookahead_tokens
        return _max_blocks(self.specs, self.longest._replace(num_tokens=num_tokens))


def check_holds_one_request(
    groups: Sequence[KVCacheGroup], num_blocks: int, longest: LongestRequest
) -> None:
    """Raise KVCacheTooSmall unless an empty pool can hold one such request.

    Otherwise it would be admitted and could never finish, even alone.
    """
    needed = num_blocks_needed(groups, longest)
    if num_blocks >= needed:
        return
    cause, remedy = "", ""
    if num_blocks_needed(groups, longest._replace(num_in_flight=1, num_steps=1)) < needed:
        cause = (
            f", because windows and states also hold what is in flight (here "
            f"{longest.num_in_flight} tokens in {longest.num_steps} steps)"
        )
        remedy = " or max_num_batched_tokens"
    raise KVCacheTooSmall(
        f"num_blocks={num_blocks} are too few: a request of max_model_len={longest.num_tokens} "
        f"tokens needs {needed}, including {num_reserved_blocks(groups)} reserved{cause}. Give the "
        f"cache more memory, or lower max_model_len{remedy}."
    )


def num_reserved_blocks(groups: Sequence[KVCacheGroup]) -> int:
    """The null block and the blocks of all sinks."""
    return 1 + sum(map(len, sink_block_ids(groups)))


def sink_block_ids(groups: Sequence[KVCacheGroup]) -> tuple[range, ...]:
    """The blocks of each group's sink: they follow the null block, in order of group. Scheduler and
    workers both use this."""
    first, ranges = NULL_BLOCK + 1, []
    for group in groups:
        count = group.spec.num_sink_blocks if isinstance(group.spec, SinkFullAttentionSpec) else 0
        ranges.append(range(first, first + count))
        first += count
    return tuple(ranges)
