"""Across KV cache groups: the prefix that all of them can serve.

Without prefix caching nothing is looked up or named; with one group its manager decides alone.
Several groups need a coordinator that intersects what each can serve.
"""

from collections.abc import Sequence

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.scheduler.block_pool import BlockPool
from longshore.scheduler.single_type_manager import FullAttentionManager


class KVCacheCoordinator:
    """The managers of all groups, and what they do together. This one does no prefix caching."""

    caches_prefixes = False

    def __init__(self, managers: Sequence[FullAttentionManager]) -> None:
        self.managers = tuple(managers)

    def find_longest_hit(
        self, names: Sequence[bytes], max_tokens: int
    ) -> tuple[list[list[int]], int]:
        """Blocks per group of the longest prefix every group has cached, and its tokens."""
        return [[] for _ in self.managers], 0


class NoPrefixCacheCoordinator(KVCacheCoordinator):
    """Any number of groups, nothing cached."""


class UnitaryCoordinator(KVCacheCoordinator):
    """One group: its manager's answer is the answer."""

    caches_prefixes = True

    def find_longest_hit(
        self, names: Sequence[bytes], max_tokens: int
    ) -> tuple[list[list[int]], int]:
        (manager,) = self.managers
        hits = manager.find_longest_hit(names, max_tokens)
        return [hits], len(hits) * manager.block_size


def make_coordinator(
    kv_cache: KVCacheConfig,
    pool: BlockPool,
    *,
    enable_prefix_caching: bool,
    max_num_seqs: int,
    max_model_len: int,
) -> KVCacheCoordinator:
    """The coordinator for these groups. Raises ConfigError for groups that need one we lack."""
    managers = [
        FullAttentionManager(
            group.spec,
            pool,
            group=index,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        for index, group in enumerate(kv_cache.groups)
    ]
    if not enable_prefix_caching:
        return NoPrefixCacheCoordinator(managers)
    if len(managers) == 1:
        return UnitaryCoordinator(managers)
    raise ConfigError(
        f"the model has {len(managers)} KV cache groups, and prefix caching across groups is not "
        "available. Start with --no-enable-prefix-caching."
    )
