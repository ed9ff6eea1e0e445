"""The KV cache plan: which layers of a model form a KV cache group, and the size of a block. Does
not import torch, so that a plan can be made without loading the model.

All groups take blocks from one pool, so a block has the bytes that the largest group needs; in
smaller groups the rest is padding. Padding is small if layers of one kind are divided into groups
of about equal size: 20 layers with a window and 4 without make 5 groups and 1 group of 4 layers
each. If a layer of one kind needs less than a layer of another, its blocks hold more tokens.

States are not divided by tokens: all layers with states make one group, in which a request has as
many blocks as its state fills. Only the last one has padding.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import msgspec

from longshore.protocol.kv_cache_spec import (
    FP8_E4M3,
    ChunkedLocalAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    KVCacheDtype,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.worker.errors import UnsupportedModel

BLOCK_ALIGNMENT_BYTES: Final = 8
"""Block size is a multiple of this, so that every element is aligned to its size."""

MAX_GROUPS: Final = 8
"""Each group adds a fixed cost to every step. A model with more kinds of layers has more groups."""

TOLERANCE: Final = 1.05
"""Among plans that need at most this factor times the least memory, the one with the smallest
blocks is chosen, because prefix hits end at block borders, then the one with the fewest groups."""

MAX_UNIT_BYTES: Final = 16 << 10
"""Of states; see StateSpec."""

MAX_STATE_PADDING: Final = 0.01
"""Units are smaller if more of a state's pages would be padding."""

MAX_EXPANDED_ELEMENTS: Final = 1 << 25
"""Size of the buffer, in addition to the cache, in which keys and values are expanded from latents:
some heads of one context at a time."""

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that models compute in."""


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Settings that determine, with the model, what a rank stores of a layer.

    block_size:  tokens per block; a plan may give some groups a multiple of it.
    dtype_bytes: bytes per element of keys, values and latents: `element_bytes`.
    num_shards:  tensor parallel ranks.
    """

    block_size: int
    dtype_bytes: int
    num_shards: int = 1


def element_bytes(kv_cache_dtype: KVCacheDtype, dtype_bytes: int) -> int:
    """Bytes per stored element. dtype_bytes: those of the dtype the model computes in."""
    return 1 if kv_cache_dtype == FP8_E4M3 else dtype_bytes


def check_cache_specs(specs: Mapping[str, KVCacheSpec], kv_cache_dtype: KVCacheDtype) -> None:
    """Raise UnsupportedModel if layers with these specs cannot be stored, or not in that dtype.
    specs: by layer name."""
    of_fp8 = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    for name, spec in specs.items():
        key_size, value_size = getattr(spec, "head_size", None), getattr(spec, "head_size_v", None)
        if value_size not in (None, key_size):
            raise UnsupportedModel(
                f"{name} has keys of {key_size} and values of {value_size} elements (head_dim and "
                "v_head_dim, or this family's keys for them, in config.json). The KV cache stores "
                "both in vectors of one size, so this model cannot be served."
            )
        if kv_cache_dtype == FP8_E4M3 and not isinstance(spec, of_fp8):
            raise UnsupportedModel(
                f"kv_cache_dtype={kv_cache_dtype!r} is for keys and values only, but this model "
                f"has layers of {type(spec).__name__} (latents, states, cross attention or a "
                "custom kind), which cannot be stored in fp8. Use kv_cache_dtype='auto'."
            )


def cache_name(layer: int) -> str:
    """Cache name of a layer of the model that has one entry in the KV cache."""
    return f"model.layers.{layer}"


def plan_groups(
    specs: Mapping[str, KVCacheSpec], *, max_model_len: int, max_num_batched_tokens: int
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers into groups in which a request of `max_model_len` tokens needs little
    memory.

    specs: spec of every cached layer of the model, by name, in order.

    Layers are assigned to groups in turn, so that every pipeline stage has a part of each group.
    """
    states = {name: spec for name, spec in specs.items() if isinstance(spec, StateSpec)}
    if states:
        others = {name: spec for name, spec in specs.items() if name not in states}
        groups: tuple[KVCacheGroup, ...] = ()
        if others:
            lengths = {"max_model_len": max_model_len}
            groups = plan_groups(others, **lengths, max_num_batched_tokens=max_num_batched_tokens)
        return (*groups, _state_group(states, groups))
    names: list[tuple[KVCacheSpec, list[str]]] = []  # a custom spec cannot be hashed
    for name, spec in specs.items():
        layers = next((layers for known, layers in names if known == spec), None)
        if layers is None:
            names.append((spec, [name]))
        else:
            layers.append(name)
    kinds = [_Kind(spec, len(layers)) for spec, layers in names]
    plans = [
        plan
        for size_bytes in sorted(set(_block_sizes(kinds)))
        if (plan := _fit(kinds, size_bytes, max_model_len, max_num_batched_tokens))
    ]
    limit = TOLERANCE * min(plan.cost for plan in plans)
    best = min((p for p in plans if p.cost <= limit), key=lambda p: (p.block_tokens, p.num_groups))
    return tuple(
        KVCacheGroup(tuple(layers[first :: part.num_groups]), part.spec)
        for part, (_, layers) in zip(best.parts, names, strict=True)
        for first in range(part.num_groups)
    )


def _state_group(specs: Mapping[str, StateSpec], others: Sequence[KVCacheGroup]) -> KVCacheGroup:
    """The group of all layers with states, in pages as large as the blocks of the `others`. Without
    others, a state is one page. Raises UnsupportedModel for states of several shapes."""
    names, spec = tuple(specs), next(iter(specs.values()))
    if any(each != spec for each in specs.values()):
        raise UnsupportedModel(
            "the layers with states of this model have states of different shapes, which is not "
            "supported"
        )
    state_bytes, page_bytes = len(names) * spec.state_size_bytes, None
    if others:
        spec = msgspec.structs.replace(spec, block_size=others[0].spec.block_size)
        page_bytes = max(group.block_size_bytes for group in others)
    sized = []
    for unit_bytes in _unit_sizes(spec):
        spec = _paged(spec, len(names), page_bytes, unit_bytes)
        group = KVCacheGroup(names, spec)
        sized.append((block_bytes((*others, group)) * spec.num_pages, group))
    limit = (1 + MAX_STATE_PADDING) * state_bytes
    fitting = (group for size, group in sized if size <= limit)
    return next(fitting, min(sized, key=itemgetter(0))[1])


def _unit_sizes(spec: StateSpec) -> Iterator[int]:
    """Powers of two, largest first, that divide each head's part of the first tensor."""
    head_bytes = math.prod(spec.shapes[0][1:]) * spec.dtype_bytes[0]
    unit_bytes = MAX_UNIT_BYTES
    while unit_bytes >= spec.dtype_bytes[0]:
        if head_bytes % unit_bytes == 0:
            yield unit_bytes
        unit_bytes //= 2


def _paged(spec: StateSpec, num_layers: int, page_bytes: int | None, unit_bytes: int) -> StateSpec:
    """The spec with these units. page_bytes: of a page; None: a state is one page."""
    spec = msgspec.structs.replace(spec, unit_bytes=unit_bytes, num_pages=1)
    if page_bytes is None:
        return spec
    num_pages = -(-num_layers * sum(spec.tensor_units) // -(-page_bytes // unit_bytes))
    return msgspec.structs.replace(spec, num_pages=num_pages)


@dataclass(frozen=True)
class _Kind:
    spec: KVCacheSpec
    num_layers: int

    @property
    def is_scalable(self) -> bool:
        """Whether the size of a block is proportional to its tokens."""
        return not isinstance(self.spec, CustomSpec)

    def group_bytes(self, num_groups: int) -> int:
        """Block bytes of the largest group if the layers are divided into `num_groups`."""
        return -(-self.num_layers // num_groups) * self.spec.page_size_bytes


@dataclass(frozen=True)
class _Part:
    """One kind of layers in a plan. spec: with the block size that the plan gives it."""

    spec: KVCacheSpec
    num_groups: int


@dataclass(frozen=True)
class _Plan:
    """cost: bytes of KV cache that the longest request holds."""

    parts: tuple[_Part, ...]
    cost: int

    @property
    def num_groups(self) -> int:
        return sum(part.num_groups for part in self.parts)

    @property
    def block_tokens(self) -> int:
        return max(part.spec.block_size for part in self.parts)


def _block_sizes(kinds: Sequence[_Kind]) -> Iterator[int]:
    """Candidate block sizes in bytes: those that fit a group of some kind exactly."""
    for kind in kinds:
        for num_groups in range(1, min(kind.num_layers, MAX_GROUPS) + 1):
            times = 1
            while times <= _max_times(kind, kinds):
                yield kind.group_bytes(num_groups) * times
                times *= 2


def _max_times(kind: _Kind, kinds: Sequence[_Kind]) -> int:
    """Largest factor for the block size of `kind`: the ratio of the largest layer to its layers."""
    if not kind.is_scalable:
        return 1
    largest = max(each.spec.page_size_bytes for each in kinds)
    return -(-largest // kind.spec.page_size_bytes)


def _fit(
    kinds: Sequence[_Kind], size_bytes: int, max_model_len: int, max_num_batched_tokens: int
) -> _Plan | None:
    """The cheapest plan with blocks of `size_bytes`; None if a kind does not fit or there would be
    too many groups."""

    def cost(part: _Part) -> int:
        num_blocks = part.spec.max_blocks(LongestRequest(max_model_len, max_num_batched_tokens))
        return num_blocks * part.num_groups * size_bytes

    def times(kind: _Kind, num_fitting: int) -> int:
        """Factor for the block size if `num_fitting` of the smallest blocks fit. It is a power of
        two, so that the block borders of groups coincide."""
        if not kind.is_scalable:
            return 1
        return 1 << (min(num_fitting, _max_times(kind, kinds)).bit_length() - 1)

    parts = []
    for kind in kinds:
        fitting = [
            _Part(_sized(kind.spec, kind.spec.block_size * times(kind, num_fitting)), num_groups)
            for num_groups in range(1, min(kind.num_layers, MAX_GROUPS) + 1)
            if (num_fitting := size_bytes // kind.group_bytes(num_groups))
        ]
        if not fitting:
            return None
        parts.append(min(fitting, key=lambda part: (cost(part), part.num_groups)))
    plan = _Plan(tuple(parts), sum(map(cost, parts)))
    return plan if plan.num_groups <= max(MAX_GROUPS, len(kinds)) else None


def _sized(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """The spec with another block size. Custom specs, which other packages define, are kept."""
    if isinstance(spec, CustomSpec):
        return spec
    return msgspec.structs.replace(spec, block_size=block_size)


def expanded_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Bytes that a rank allocates in addition to the cache when it first expands latents."""
    latents = [group.spec for group in groups if isinstance(group.spec, MLAAttentionSpec)]
    return sum(MAX_EXPANDED_ELEMENTS * spec.dtype_bytes for spec in latents)


def groups_of_rank(
    groups: Sequence[KVCacheGroup], names: Collection[str]
) -> tuple[KVCacheGroup, ...]:
    """The KV cache groups of one pipeline stage: `groups` with only the layers `names`."""
    return tuple(
        KVCacheGroup(tuple(name for name in group.layer_names if name in names), group.spec)
        for group in groups
    )


def block_bytes(groups: Sequence[KVCacheGroup]) -> int:
    """Bytes from one block of the pool to the next."""
    largest = max(group.block_size_bytes for group in groups)
    units = [group.spec.unit_bytes for group in groups if isinstance(group.spec, StateSpec)]
    alignment = max([BLOCK_ALIGNMENT_BYTES, *units])
    return -(-largest // alignment) * alignment
