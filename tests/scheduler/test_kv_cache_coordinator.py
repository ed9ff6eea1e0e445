"""Which coordinator serves which groups."""

import pytest

from longshore.protocol.errors import ConfigError
from longshore.scheduler.block_pool import BlockPool
from longshore.scheduler.kv_cache_coordinator import (
    KVCacheCoordinator,
    NoPrefixCacheCoordinator,
    UnitaryCoordinator,
    make_coordinator,
)
from tests.scheduler.driver import kv_cache_config


def make(num_groups: int, enable_prefix_caching: bool) -> tuple[KVCacheCoordinator, BlockPool]:
    pool = BlockPool(8)
    coordinator = make_coordinator(
        kv_cache_config(8, num_groups=num_groups),
        pool,
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=2,
        max_model_len=16,
    )
    return coordinator, pool


def test_one_group_answers_for_itself() -> None:
    coordinator, pool = make(1, enable_prefix_caching=True)
    assert isinstance(coordinator, UnitaryCoordinator)
    pool.cache_full_blocks(pool.get_new_blocks(2), [b"a", b"b"], 0)
    assert coordinator.find_longest_hit([b"a", b"b", b"c"], 12) == ([[1, 2]], 8)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_without_prefix_caching_nothing_is_found_in_any_group(num_groups: int) -> None:
    coordinator, pool = make(num_groups, enable_prefix_caching=False)
    assert isinstance(coordinator, NoPrefixCacheCoordinator)
    pool.cache_full_blocks(pool.get_new_blocks(1), [b"a"], 0)
    assert coordinator.find_longest_hit([b"a"], 12) == ([[] for _ in range(num_groups)], 0)
    assert [manager.group for manager in coordinator.managers] == list(range(num_groups))


def test_prefix_caching_across_groups_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"2 KV cache groups.*--no-enable-prefix-caching"):
        make(2, enable_prefix_caching=True)
