"""Across KV cache groups: the prefix that all of them can serve.

Without prefix caching nothing is looked up or named; groups that cache nothing (cross attention)
have no say. Of the others one alone decides, and several must agree.
"""

import math
from collections.abc import Sequence

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.scheduler.block_pool import BlockIds, BlockPool
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.single_type_manager import SingleTypeManager, manager_class


class KVCacheCoordinator:
    """The managers of all groups, and those among them whose blocks have names.

    use_eagle: a drafter needs the hidden states of the last hit block, so it is computed again.
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
        self._use_eagle = use_eagle
        self._no_hits: tuple[BlockIds, ...] = tuple([] for _ in managers)

    def find_longest_hit(
        self, names: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        """Blocks per group of the longest prefix of at most `max_tokens` tokens that every caching
        group has, and its tokens: a multiple of all their block sizes, or 0."""
        hits, length = self._find(names, max_tokens)
        if self._use_eagle:
            length = max(length - self.alignment, 0)
        if length == 0:
            return self._no_hits, 0
        nothing: BlockIds = []
        found = [
            hits.get(manager.group, nothing)[: length // manager.block_size]
            for manager in self.managers
        ]
        return tuple(found), length

    def _find(self, names: Sequence[bytes], max_tokens: int) -> tuple[dict[int, BlockIds], int]:
        """At least the blocks of each caching group, by group, and the number of tokens."""
        raise NotImplementedError


class NoPrefixCacheCoordinator(KVCacheCoordinator):
    """Any number of groups, nothing cached."""

    def _find(self, names: Sequence[bytes], max_tokens: int) -> tuple[dict[int, BlockIds], int]:
        return {}, 0


class UnitaryCoordinator(KVCacheCoordinator):
    """One group that caches: its manager's answer is the answer."""

    def find_longest_hit(
        self, names: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        if len(self.managers) > 1 or self._use_eagle:
            return super().find_longest_hit(names, max_tokens)
        hits = self.managers[0].find_longest_hit(names, max_tokens)
        return (hits,), len(hits) * self.alignment

    def _find(self, names: Sequence[bytes], max_tokens: int) -> tuple[dict[int, BlockIds], int]:
        (manager,) = self.caching
        hits = manager.find_longest_hit(names, max_tokens)
        return {manager.group: hits}, len(hits) * manager.block_size


class HybridCoordinator(KVCacheCoordinator):
    """Several groups that cache: each accepts the length at hand or shortens it, until all accept.
    It only falls, so that ends."""

    def _find(self, names: Sequence[bytes], max_tokens: int) -> tuple[dict[int, BlockIds], int]:
        length = max_tokens // self.alignment * self.alignment
        hits: dict[int, BlockIds] = {}
        pending = list(self.caching)
        while pending:
            manager = pending.pop(0)
            hits[manager.group] = manager.find_longest_hit(names, length)
            num_tokens = len(hits[manager.group]) * manager.block_size
            accepted = num_tokens // self.alignment * self.alignment
            if accepted < length:
                length = accepted
                pending = list(self.caching)
        return hits, length


def make_coordinator(
    kv_cache: KVCacheConfig,
    pool: BlockPool,
    cache: CacheConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> KVCacheCoordinator:
    """The coordinator for these groups. Raises ConfigError if nobody manages their kind of
    attention, or if their blocks do not consist of whole links of the chain of names."""
    managers = [
        manager_class(group.spec)(
            group.spec,
            pool,
            group=index,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            context_parallel_size=cache.context_parallel_size,
            tokens_per_name=cache.tokens_per_name,
        )
        for index, group in enumerate(kv_cache.groups)
    ]
    caching = [manager for manager in managers if manager.caches_prefixes]
    if not cache.enable_prefix_caching or not caching:
        return NoPrefixCacheCoordinator(managers)
    for manager in caching:
        if manager.block_size % cache.tokens_per_name:
            raise ConfigError(
                f"blocks of group {manager.group} hold {manager.block_size} tokens, which is no "
                f"multiple of the {cache.tokens_per_name} tokens of a block name. Set "
                "hash_block_size to a number that divides the blocks of all groups."
            )
    coordinator = UnitaryCoordinator if len(caching) == 1 else HybridCoordinator
    return coordinator(managers, caching, use_eagle=cache.use_eagle)
