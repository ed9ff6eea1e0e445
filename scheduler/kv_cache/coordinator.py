"""Across KV cache groups: the prefix that all of them can serve.

Without prefix caching nothing is looked up or named; groups that cache nothing (cross attention)
have no say. Of the others one alone decides, and several must agree.
"""

import math
from collections.abc import Sequence

import numpy as np

# Registers its managers; nothing of it is used by name.
import longshore.scheduler.kv_cache.windowed  # noqa: F401
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import DEFAULT_STEPS_IN_FLIGHT, NULL_BLOCK, KVCacheConfig
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_pool import (
    FEW_BLOCKS,
    BlockIds,
    BlockPool,
)
from longshore.scheduler.kv_cache.full import SingleTypeManager, manager_class


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
        self._num_dropped = self.alignment if use_eagle else 0
        self._no_hits: tuple[BlockIds, ...] = tuple([] for _ in managers)

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        """Blocks per group of the longest prefix of at most `max_tokens` tokens that every caching
        group can serve, and its tokens: a multiple of all their block sizes, or 0. Null blocks
        stand where a group needs none."""
        raise NotImplementedError


class NoPrefixCacheCoordinator(KVCacheCoordinator):
    """Any number of groups, nothing cached."""

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        return self._no_hits, 0


class HybridCoordinator(KVCacheCoordinator):
    """Several groups that cache: each kind of attention accepts the length at hand or shortens it,
    until all accept. It only falls, so that ends.

    Kinds that keep every block serve each prefix of what they serve: they are asked once, first,
    and cut to what comes out.
    """

    def __init__(
        self,
        managers: Sequence[SingleTypeManager],
        caching: Sequence[SingleTypeManager] = (),
        *,
        use_eagle: bool = False,
    ) -> None:
        super().__init__(managers, caching, use_eagle=use_eagle)
        kinds: list[list[SingleTypeManager]] = []
        for manager in caching:
            equal = (kind for kind in kinds if kind[0].spec == manager.spec)
            kind = next(equal, None)
            if kind is None:
                kinds.append([manager])
            else:
                kind.append(manager)
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

    def _kept(
        self,
        kind: list[SingleTypeManager],
        hashes: Sequence[bytes],
        max_tokens: int,
        hits: list[BlockIds],
    ) -> int:
        """`_shorten` for a kind that keeps every block; its hits may reach beyond."""
        size = kind[0].block_size
        wanted = kind[0].hashes_of_blocks(hashes, 0, max_tokens // size)
        num_tokens = self._find_all(kind, wanted, hits) * size
        return num_tokens - num_tokens % self.alignment

    @staticmethod
    def _find_all(
        kind: list[SingleTypeManager], hashes: Sequence[bytes], hits: list[BlockIds]
    ) -> int:
        """How many of these blocks, from the first on, all groups of one kind have; those of each,
        and maybe more, go into `hits`."""
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
        """The longest prefix of at most `max_tokens` tokens that all groups of one kind can serve,
        and still can when the last tokens are dropped; their blocks go into `hits`.

        A prefix needs the blocks from `first_needed` on, which never falls as the prefix grows. So
        if one of them is missing, no prefix that ends behind the missing one and is shorter than
        this one will do.
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
                    hits[manager.group] = _behind_nulls(start, hits[manager.group], reach)
                return reach * size
            end = reach
        return 0


class UnitaryCoordinator(HybridCoordinator):
    """One group that caches: its manager's answer is the answer."""

    def find_longest_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        manager = self.caching[0]
        if len(self.managers) > 1 or self._num_dropped or manager.frees_skipped:
            return super().find_longest_hit(hashes, max_tokens)
        hits = manager.find(manager.hashes_of_blocks(hashes, 0, max_tokens // self.alignment))
        return (hits,), len(hits) * self.alignment


def _behind_nulls(count: int, block_ids: BlockIds, end: int) -> BlockIds:
    """The table entries up to `end` whose first `count` are null blocks."""
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
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    max_steps_in_flight: int = DEFAULT_STEPS_IN_FLIGHT,
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
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
            context_parallel_size=cache.context_parallel_size,
            tokens_per_hash=cache.tokens_per_hash,
        )
        for index, group in enumerate(kv_cache.groups)
    ]
    caching = [manager for manager in managers if manager.caches_prefixes]
    if not cache.enable_prefix_caching or not caching:
        return NoPrefixCacheCoordinator(managers)
    for manager in caching:
        if manager.block_size % cache.tokens_per_hash:
            raise ConfigError(
                f"blocks of group {manager.group} hold {manager.block_size} tokens, which is no "
                f"multiple of the {cache.tokens_per_hash} tokens of a block name. Set "
                "hash_block_size to a number that divides the blocks of all groups."
            )
    coordinator = UnitaryCoordinator if len(caching) == 1 else HybridCoordinator
    return coordinator(managers, caching, use_eagle=cache.use_eagle)
