"""Across KV cache groups: the longest prefix that all groups have cached.

Without prefix caching nothing is looked up or cached. Groups that cache nothing (cross attention)
are left out of lookups; all others must have the prefix.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    KVCacheConfig,
    LongestRequest,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    of_all_ranks,
)
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS, BlockIds
from longshore.scheduler.kv_cache.full import (
    CrossAttentionManager,
    FullAttentionManager,
    SingleTypeManager,
)
from longshore.scheduler.kv_cache.states import StateManager
from longshore.scheduler.kv_cache.windowed import ChunkedLocalManager, SlidingWindowManager

_MANAGERS: Final[dict[type, type[SingleTypeManager]]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SinkFullAttentionSpec: FullAttentionManager,  # no table has the blocks of the sink
    CrossAttentionSpec: CrossAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalManager,
    StateSpec: StateManager,
}
_Manager = TypeVar("_Manager", bound=type[SingleTypeManager])


def register_manager(spec_type: type) -> Callable[[_Manager], _Manager]:
    """Class decorator: use this manager for groups of `spec_type`."""

    def register(manager: _Manager) -> _Manager:
        _MANAGERS[spec_type] = manager
        return manager

    return register


def manager_class(spec: object) -> type[SingleTypeManager]:
    """The manager class for groups of this spec. Raises ConfigError if there is none."""
    if isinstance(spec, CustomSpec):
        return _load(spec)
    try:
        return _MANAGERS[type(spec)]
    except KeyError:
        raise ConfigError(
            f"no block manager is registered for {type(spec).__name__}; there are managers for "
            f"{', '.join(sorted(known.__name__ for known in _MANAGERS))}"
        ) from None


def _load(spec: CustomSpec) -> type[SingleTypeManager]:
    from importlib.metadata import EntryPoint  # takes 20 ms, and few need it

    try:
        manager = EntryPoint("manager", spec.manager, "longshore").load()
    except Exception as error:
        raise ConfigError(
            f"the block manager {spec.manager!r} of a custom spec cannot be loaded: {error!r}; it "
            "must be package.module:Class"
        ) from error
    if not (isinstance(manager, type) and issubclass(manager, SingleTypeManager)):
        raise ConfigError(
            f"the block manager {spec.manager!r} of a custom spec does not extend "
            f"{SingleTypeManager.__module__}.{SingleTypeManager.__qualname__}"
        )
    return manager


class KVCacheCoordinator:
    """The managers of all groups, and those among them whose blocks are cached: here none.

    use_eagle: recompute the last hit block, because a drafter needs its hidden states.
    """

    def __init__(
        self,
        managers: Sequence[SingleTypeManager],
        caching: Sequence[SingleTypeManager] = (),
        *,
        use_eagle: bool = False,
    ) -> None:
        self.managers = tuple(managers)
        self.caching = tuple(caching)
        self.alignment = math.lcm(*(manager.block_size for manager in caching))
        self._num_dropped = self.alignment if use_eagle else 0
        self._no_hits: tuple[BlockIds, ...] = tuple([] for _ in managers)

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        """The longest prefix of at most `max_tokens` tokens that all caching groups have: its
        blocks per group, with null blocks where a group needs none, and its number of tokens, a
        multiple of all their block sizes, or 0."""
        return self._no_hits, 0

    def find_junction(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """The longest prefix of at most `max_tokens` tokens that all groups have that keep every
        block: another request had computed it, even if no state at its end was kept. A multiple of
        all block sizes, or 0."""
        return 0


class HybridCoordinator(KVCacheCoordinator):
    """Several caching groups: each kind of attention accepts the current length or shortens it,
    until all accept. The length only decreases, so the search ends.

    Kinds that keep every block have each prefix of what they have: they are searched once, first,
    and their hits are cut to the result.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        kinds: list[list[SingleTypeManager]] = []
        for manager in self.caching:
            for kind in kinds:
                if kind[0].spec == manager.spec:
                    kind.append(manager)
                    break
            else:
                kinds.append([manager])
        self._keeping = [kind for kind in kinds if not kind[0].frees_skipped]
        self._windowed = [kind for kind in kinds if kind[0].frees_skipped]

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        length, hits = max_tokens, list(self._no_hits)
        for kind in self._keeping:
            length = self._kept(kind, hashes, length, hits)
        accepted = -1
        while length > 0 and length != accepted:
            accepted = length
            for kind in self._windowed:
                length = self._shorten(kind, hashes, length, hits)
            if len(self._windowed) == 1:
                break
        length -= self._num_dropped
        if length <= 0:
            return self._no_hits, 0
        for group, manager in enumerate(self.managers):
            num_blocks = length // manager.block_size
            if len(hits[group]) > num_blocks:
                hits[group] = hits[group][:num_blocks]
        return tuple(hits), length

    def find_junction(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        length, hits = max_tokens if self._keeping else 0, list(self._no_hits)
        for kind in self._keeping:
            length = self._kept(kind, hashes, length, hits)
        return length

    def _kept(
        self,
        kind: list[SingleTypeManager],
        hashes: Sequence[bytes],
        max_tokens: int,
        hits: list[BlockIds],
    ) -> int:
        """`_shorten` for a kind that keeps every block; its hits may be longer."""
        size = kind[0].block_size
        wanted = kind[0].hashes_of_blocks(hashes, 0, max_tokens // size)
        num_tokens = self._find_all(kind, wanted, hits) * size
        return num_tokens - num_tokens % self.alignment

    @staticmethod
    def _find_all(
        kind: list[SingleTypeManager], hashes: Sequence[bytes], hits: list[BlockIds]
    ) -> int:
        """How many of these blocks, from the first on, all groups of one kind have. Writes the
        blocks of each group, and possibly more, to `hits`."""
        num_found = len(hashes)
        for manager in kind:
            hits[manager.group] = found = manager.find(hashes)
            if len(found) < num_found:
                num_found = len(found)
                hashes = hashes[:num_found]
        return num_found

    def _shorten(
        self,
        kind: list[SingleTypeManager],
        hashes: Sequence[bytes],
        max_tokens: int,
        hits: list[BlockIds],
    ) -> int:
        """The longest prefix of at most `max_tokens` tokens that all groups of one kind have, also
        after the last tokens are dropped (`use_eagle`). Writes their blocks to `hits`.

        A prefix needs the blocks from `first_needed` on, which never decreases as the prefix grows.
        So if one of them is missing, every shorter prefix that ends after it lacks it as well.
        """
        first, dropped = kind[0], self._num_dropped
        size = first.block_size
        step = self.alignment // size
        end = max_tokens // size
        if end * first.hashes_per_block > len(hashes):
            end = len(hashes) // first.hashes_per_block
        end -= end % step
        while end > 0:
            start = first.first_needed(end * size - dropped)
            num_found = self._find_all(kind, first.hashes_of_blocks(hashes, start, end), hits)
            reach = (start + num_found) // step * step
            if reach == end or (
                reach > start and first.first_needed(reach * size - dropped) == start
            ):
                for manager in kind:
                    hits[manager.group] = _after_nulls(start, hits[manager.group], reach)
                return reach * size
            end = reach
        return 0


class UnitaryCoordinator(HybridCoordinator):
    """One caching group, whose hit is the result."""

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        manager = self.caching[0]
        if len(self.managers) > 1 or self._num_dropped or manager.frees_skipped:
            return super().find_longest_hit(hashes, max_tokens)
        end = max_tokens // self.alignment
        if manager.hashes_per_block > 1:
            hashes, end = manager.hashes_of_blocks(hashes, 0, end), len(hashes)
        hits = manager.find(hashes[:end])
        return (hits,), len(hits) * self.alignment


def _after_nulls(count: int, block_ids: BlockIds, end: int) -> BlockIds:
    """The table entries up to `end`: `count` null blocks, then `block_ids`."""
    if isinstance(block_ids, list) and end <= FEW_BLOCKS:
        entries = [NULL_BLOCK] * count + block_ids
        return entries if len(entries) == end else entries[:end]
    table = np.zeros(end, np.int32)
    table[count:] = block_ids[: end - count]
    return table


def make_coordinator(
    kv_cache: KVCacheConfig,
    pool: BlockPool,
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    longest: LongestRequest,
) -> KVCacheCoordinator:
    """The coordinator for these groups. Raises ConfigError if a kind of attention has no manager,
    a block does not consist of whole hash blocks, or several groups have states."""
    classes = [manager_class(group.spec) for group in kv_cache.groups]
    if classes.count(StateManager) > 1:
        raise ConfigError("several KV cache groups have states; a model can have one such group")
    alignment = math.lcm(
        *(
            of_all_ranks(group.spec, longest.context_parallel_size).block_size
            for group, kind in zip(kv_cache.groups, classes, strict=True)
            if kind.caches_prefixes
        )
    )
    managers = [
        kind(
            group.spec,
            pool,
            group=index,
            max_num_seqs=max_num_seqs,
            longest=longest,
            tokens_per_hash=cache.tokens_per_hash,
            hit_alignment=alignment,
            num_dropped=alignment if cache.use_eagle else 0,
        )
        for index, (group, kind) in enumerate(zip(kv_cache.groups, classes, strict=True))
    ]
    caching = [manager for manager in managers if manager.caches_prefixes]
    if not cache.enable_prefix_caching or not caching:
        return KVCacheCoordinator(managers)
    for manager in caching:
        if manager.block_size % cache.tokens_per_hash:
            raise ConfigError(
                f"blocks of group {manager.group} hold {manager.block_size} tokens, which is not a "
                f"multiple of the {cache.tokens_per_hash} tokens of a block hash. Set "
                "hash_block_size to a number that divides the block sizes of all groups."
            )
    coordinator = UnitaryCoordinator if len(caching) == 1 else HybridCoordinator
    return coordinator(managers, caching, use_eagle=cache.use_eagle)
