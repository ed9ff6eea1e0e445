"""Which coordinator serves which groups, and what it finds."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
)
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_pool import BlockIds, BlockPool
from longshore.scheduler.kv_cache.coordinator import (
    HybridCoordinator,
    KVCacheCoordinator,
    UnitaryCoordinator,
    make_coordinator,
)
from tests.harness.kv_groups import chunked, first_seen, latent, state, window

NAMES = [b"H%d" % index for index in range(16)]
CROSS = CrossAttentionSpec(4, 1, 8, 4, max_encoder_tokens=16)


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, 8, 4)


def make(*specs: KVCacheSpec, **settings: int | bool) -> tuple[KVCacheCoordinator, BlockPool]:
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    pool = BlockPool(40, num_groups=len(specs))
    cache = CacheConfig(**{"block_size": 4, **settings})  # type: ignore[arg-type]
    coordinator = make_coordinator(
        KVCacheConfig(40, groups, "float32"),
        pool,
        cache,
        max_num_seqs=2,
        longest=LongestRequest(64, context_parallel_size=cache.context_parallel_size),
    )
    return coordinator, pool


def found(coordinator: KVCacheCoordinator, max_tokens: int) -> tuple[list[list[int]], int]:
    hits, num_tokens = coordinator.find_longest_hit(NAMES, max_tokens)
    return [list(block_ids) for block_ids in hits], num_tokens


@pytest.mark.req("COO-01")
@pytest.mark.parametrize(
    ("specs", "enable_prefix_caching", "expected"),
    [
        ((full(),), False, KVCacheCoordinator),
        ((full(), full()), False, KVCacheCoordinator),
        ((CROSS,), True, KVCacheCoordinator),
        ((full(),), True, UnitaryCoordinator),
        ((full(), CROSS), True, UnitaryCoordinator),
        ((CROSS, CROSS, full()), True, UnitaryCoordinator),
        ((full(), full()), True, HybridCoordinator),
        ((full(), CROSS, full(8)), True, HybridCoordinator),
    ],
)
def test_the_groups_that_cache_choose_the_coordinator(
    specs: tuple[KVCacheSpec, ...], enable_prefix_caching: bool, expected: type
) -> None:
    coordinator, _ = make(*specs, enable_prefix_caching=enable_prefix_caching)
    assert type(coordinator) is expected
    assert [manager.group for manager in coordinator.managers] == list(range(len(specs)))


@pytest.mark.req("COO-02")
def test_the_hit_of_a_single_group_is_the_result() -> None:
    coordinator, pool = make(full())
    pool.cache_blocks(pool.get_new_blocks(2), NAMES[:2])
    assert found(coordinator, 12) == ([[1, 2]], 8)
    assert found(coordinator, 7) == ([[1]], 4)


@pytest.mark.req("COO-02", "ERR-20")
def test_hit_length_counts_the_tokens_of_a_block_over_all_ranks_that_share_it() -> None:
    coordinator, pool = make(
        full(), decode_context_parallel_size=2, prefill_context_parallel_size=3
    )
    pool.cache_blocks(pool.get_new_blocks(2), NAMES[:2])
    assert found(coordinator, 64) == ([[1, 2]], 48)
    assert found(coordinator, 47) == ([[1]], 24)


@pytest.mark.req("KVM-11")
def test_a_full_group_decides_alone_beside_groups_that_cache_nothing() -> None:
    coordinator, pool = make(CROSS, full())
    pool.cache_blocks(pool.get_new_blocks(2), NAMES[:2], 1)
    assert found(coordinator, 12) == ([[], [1, 2]], 8)


def test_without_prefix_caching_nothing_is_found_in_any_group() -> None:
    coordinator, pool = make(full(), full(), enable_prefix_caching=False)
    pool.cache_blocks(pool.get_new_blocks(1), NAMES[:1])
    assert found(coordinator, 12) == ([[], []], 0)


@pytest.mark.req("STM-06")
def test_a_drafter_that_needs_hidden_states_computes_the_last_hit_block_again() -> None:
    coordinator, pool = make(full(), use_eagle=True)
    assert found(coordinator, 64) == ([[]], 0)
    pool.cache_blocks(pool.get_new_blocks(3), NAMES[:3])
    assert found(coordinator, 64) == ([[1, 2]], 8)
    assert found(coordinator, 4) == ([[]], 0)


@pytest.mark.req("COO-06")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(0, 16),
    st.integers(0, 8),
    st.integers(0, 16),
    st.integers(0, 64),
    st.booleans(),
)
def test_several_groups_find_what_all_of_them_have_in_whole_blocks_of_all(
    num_fours: int, num_eights: int, other_fours: int, max_tokens: int, use_eagle: bool
) -> None:
    coordinator, pool = make(full(), full(8), full(), use_eagle=use_eagle)
    tables = []
    for group, count in enumerate((num_fours, num_eights, other_fours)):
        names = NAMES[1::2] if group == 1 else NAMES
        tables.append(list(pool.get_new_blocks(count)))
        pool.cache_blocks(tables[-1], names[:count], group)
    length = min(4 * num_fours, 8 * num_eights, 4 * other_fours, max_tokens) // 8 * 8
    if use_eagle:
        length = max(length - 8, 0)
    expected = [tables[0][: length // 4], tables[1][: length // 8], tables[2][: length // 4]]
    assert found(coordinator, max_tokens) == (expected, length)


def test_several_groups_with_states_are_rejected() -> None:
    with pytest.raises(ConfigError, match="several KV cache groups have states"):
        make(full(), state(), state())


@pytest.mark.req("HSH-08")
def test_blocks_that_are_no_whole_number_of_hash_blocks_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match="group 1 hold 6 tokens, which is not a multiple of the 4"
    ):
        make(full(), full(6))
    make(full(), full(6), hash_block_size=2)


def needed(spec: KVCacheSpec, num_tokens: int, num_served: int) -> set[int]:
    """Blocks that must be there for a hit of `num_tokens`, to continue after `num_served` of them:
    all that the next token looks at, and those that are computed again."""
    seen = range(first_seen(spec, num_served), num_tokens)
    return {position // spec.block_size for position in seen}


kinds = st.one_of(
    st.builds(full, st.sampled_from([2, 4, 8])),
    st.builds(latent, st.sampled_from([2, 4])),
    st.builds(window, st.integers(1, 40), st.sampled_from([2, 4, 8])),
    st.builds(chunked, st.integers(1, 40), st.sampled_from([2, 4, 8])),
)
NUM_TOKENS = 64


@pytest.mark.req(
    "COO-03", "COO-04", "COO-05", "COO-06", "STM-05", "STM-06", "STM-07", "STM-08", "ERR-18",
    "ERR-19",
)  # fmt: skip
@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data(), st.lists(kinds, min_size=1, max_size=5), st.booleans())
def test_a_hit_is_the_longest_prefix_that_every_group_can_serve(
    data: st.DataObject, specs: list[KVCacheSpec], use_eagle: bool
) -> None:
    pool = BlockPool(40 * len(specs), num_groups=len(specs))
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    coordinator = make_coordinator(
        KVCacheConfig(pool.num_blocks, groups, "float32"),
        pool,
        CacheConfig(block_size=2, use_eagle=use_eagle),
        max_num_seqs=2,
        longest=LongestRequest(NUM_TOKENS),
    )
    links = [b"link-%d" % index for index in range(NUM_TOKENS // 2)]
    cached: list[dict[int, int]] = []
    for group, spec in enumerate(specs):
        count = NUM_TOKENS // spec.block_size
        # Mostly long runs with a few holes: that is where the groups disagree.
        holes = data.draw(st.sets(st.integers(0, count - 1), max_size=count // 3))
        length = data.draw(st.integers(0, count))
        present = [index for index in range(length) if index not in holes]
        block_ids = list(pool.get_new_blocks(len(present)))
        names = [links[(index + 1) * spec.block_size // 2 - 1] for index in present]
        pool.cache_blocks(block_ids, names, group)
        cached.append(dict(zip(present, block_ids, strict=True)))
    max_tokens = data.draw(st.integers(0, NUM_TOKENS))
    border = math.lcm(*(spec.block_size for spec in specs))
    dropped = border if use_eagle else 0

    longest = dropped
    for num_tokens in range(dropped + border, max_tokens + 1, border):
        if all(
            needed(spec, num_tokens, num_tokens - dropped) <= set(blocks)
            for spec, blocks in zip(specs, cached, strict=True)
        ):
            longest = num_tokens
    hits, num_tokens = coordinator.find_longest_hit(links, max_tokens)
    assert num_tokens == longest - dropped
    for spec, blocks, block_ids in zip(specs, cached, hits, strict=True):
        wanted = needed(spec, num_tokens, num_tokens) if num_tokens else set()
        assert len(block_ids) == num_tokens // spec.block_size
        for index, block_id in enumerate(block_ids):
            assert block_id == (blocks[index] if index in wanted else NULL_BLOCK)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(kinds, min_size=1, max_size=4), st.booleans())
def test_a_block_is_cached_if_and_only_if_some_hit_needs_it(
    specs: list[KVCacheSpec], use_eagle: bool
) -> None:
    coordinator, _ = make(*specs, block_size=2, use_eagle=use_eagle)
    border = math.lcm(*(spec.block_size for spec in specs))
    dropped = border if use_eagle else 0
    for spec, manager in zip(specs, coordinator.managers, strict=True):
        wanted: set[int] = set()
        for num_tokens in range(dropped + border, NUM_TOKENS + 2 * border + 1, border):
            wanted |= needed(spec, num_tokens, num_tokens - dropped)
        count = NUM_TOKENS // spec.block_size
        assert manager.serves_hits(0, count) == [index in wanted for index in range(count)]


@pytest.mark.parametrize(
    ("specs", "use_eagle", "group", "expected"),
    [
        # Hits end at every border of the window's blocks: its tail before each may be needed.
        ((window(5), full()), False, 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        ((window(5),), False, 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        # Hits end at every fourth border: ceil((window - 1) / block_size) blocks before it.
        ((window(5), full(16)), False, 0, [0, 0, 0, 1, 0, 0, 0, 1]),
        ((window(6), full(16)), False, 0, [0, 0, 1, 1, 0, 0, 1, 1]),
        ((window(17), full(16)), False, 0, [1, 1, 1, 1, 1, 1, 1, 1]),
        # The drafter's recomputed blocks must be found, too: all but some of the first 16 tokens.
        ((window(5), full(16)), True, 0, [0, 0, 0, 1, 1, 1, 1, 1]),
        # Nothing before a chunk's start is needed there.
        ((chunked(8), full()), False, 0, [1, 0, 1, 0, 1, 0, 1, 0]),
        ((chunked(8), full(8)), False, 0, [0, 0, 0, 0, 0, 0, 0, 0]),
        ((window(5), full(16)), False, 1, [1, 1]),
    ],
)
def test_which_blocks_can_serve_a_hit(
    specs: tuple[KVCacheSpec, ...], use_eagle: bool, group: int, expected: list[int]
) -> None:
    coordinator, _ = make(*specs, use_eagle=use_eagle)
    manager = coordinator.managers[group]
    assert manager.serves_hits(0, len(expected)) == [bool(is_kept) for is_kept in expected]


@pytest.mark.req("NUM-13", "STM-08", "ERR-18")
def test_a_window_is_served_by_the_blocks_before_its_end_and_nulls_before_them() -> None:
    for window_names, num_tokens, full_hits, window_hits in (
        (NAMES[1:3], 12, [1, 2, 3], [0, 4, 5]),
        (NAMES[0:2], 8, [1, 2], [4, 5]),  # the run that starts at block 0 counts
    ):
        coordinator, pool = make(full(), window(8))
        pool.cache_blocks(pool.get_new_blocks(3), NAMES[:3], 0)
        pool.cache_blocks(pool.get_new_blocks(2), window_names, 1)
        assert found(coordinator, 16) == ([full_hits, window_hits], num_tokens)


@pytest.mark.req("COO-03")
def test_groups_of_one_kind_are_asked_together_and_those_that_keep_everything_first() -> None:
    asked: list[int] = []

    class Watched(BlockPool):
        def find_cached_prefix(self, names: Sequence[bytes], group: int = 0) -> BlockIds:
            asked.append(group)
            return super().find_cached_prefix(names, group)

    specs = (window(8), full(), window(8), full())
    pool = Watched(40, num_groups=4)
    groups = tuple(KVCacheGroup((f"layer.{i}",), spec) for i, spec in enumerate(specs))
    coordinator = make_coordinator(
        KVCacheConfig(40, groups, "float32"),
        pool,
        CacheConfig(block_size=4),
        max_num_seqs=2,
        longest=LongestRequest(64),
    )
    for group in range(4):
        pool.cache_blocks(pool.get_new_blocks(3), NAMES[:3], group)
    assert coordinator.find_longest_hit(NAMES, 16)[1] == 12
    assert asked == [1, 3, 0, 2]
