"""Which blocks a hit needs: every kind of group against brute force over every possible hit."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.base.groups import StoredGroups
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    CustomSpec,
    KVCacheSpec,
    StateSpec,
    page_hashes,
)
from tests.harness.kv_groups import (
    chunked,
    cross,
    first_seen,
    full,
    latent,
    state,
    window,
)

GROUPS: dict[str, Sequence[KVCacheSpec]] = {
    "full": [full(4)],
    "latent": [latent(4)],
    "two": [full(4), full(8)],
    "window": [window(6, 4)],
    "short window": [window(1, 4)],
    "chunks": [chunked(12, 4)],
    "state": [state(8)],
    "full, window": [full(4), window(6, 4)],
    "full, aligned window": [full(4), window(9, 8)],
    "window, larger full": [window(11, 4), full(8)],
    "full, chunks": [full(4), chunked(8, 4)],
    "chunks across blocks": [chunked(6, 4), full(4)],
    "latent, state": [latent(8), state(8)],
    "full, state": [full(4), state(3, 4)],
    "window, state": [window(6, 4), full(8), state(2, 8)],
    "sizes without a common one": [full(6), window(5, 4)],
    "all": [full(8), window(6, 4), chunked(8, 4), state(8), latent(4)],
    "partial ones alone": [window(6, 4), chunked(8, 4), state(8)],
}


def hashes_of(num_tokens: int, step: int) -> list[bytes]:
    return [index.to_bytes(2, "big") + bytes(2) for index in range(num_tokens // step)]


def can_serve(
    specs: Sequence[KVCacheSpec], has: set[tuple[int, int]], num_computed: int, end: int, size: int
) -> bool:
    """Whether every block that the token at `end` and later ones read, and that begins at or after
    `num_computed`, can be loaded. has: (group, first token) of blocks. size: tokens per stored
    block, if not that of the spec."""
    for group, spec in enumerate(specs):
        step = size or spec.block_size
        first_read = end - 1 if isinstance(spec, StateSpec) else first_seen(spec, end)
        for start in range(0, end, step):
            is_read = start + step > first_read
            is_local = start + step <= num_computed
            if is_read and not is_local and (group, start) not in has:
                return False
    return True


@pytest.mark.req("LDS-01", "OFF-04", "OFF-10")
@pytest.mark.parametrize("hash_block_size", [None, 1, 2])
@pytest.mark.parametrize(
    ("name", "factor"), [*((name, 1) for name in GROUPS), ("full", 4), ("latent", 4)]
)
def test_the_longest_hit_is_the_longest_that_every_group_can_serve(
    name: str, hash_block_size: int | None, factor: int
) -> None:
    specs = GROUPS[name]
    hash_step = hash_block_size or math.gcd(*(spec.block_size for spec in specs))
    offloaded = factor * specs[0].block_size if factor > 1 else 0
    config = ConnectorConfig(specs=tuple(specs), hash_block_size=hash_step)
    groups = StoredGroups(config, offloaded or None)
    border = math.lcm(*(offloaded or spec.block_size for spec in specs))
    assert groups.border == border
    local_border = math.lcm(*(spec.block_size for spec in specs))
    chance = random.Random(f"{name}/{hash_step}/{factor}")
    for _ in range(400):
        num_tokens = chance.randrange(1, 90)
        num_computed = chance.randrange(0, num_tokens + 1) // local_border * local_border
        share = chance.choice([0.5, 0.9, 0.97, 1.0])
        hashes = hashes_of(num_tokens, hash_step)
        has = {
            (group.number, index * group.block_size)
            for group in groups.groups
            for index in range(num_tokens // group.block_size)
            if chance.random() < share
        }
        keys = {
            key
            for number, start in has
            if (group := groups.groups[number])
            for key in group.keys(hashes, start // group.block_size, start // group.block_size + 1)
        }
        pages = [key for key in keys if groups.groups[key[-1]].num_pages]
        for key in pages if chance.random() < 0.3 else ():  # some page of each state is missing
            if chance.random() < 0.1:
                keys.discard(key)
        has = {
            (number, start)
            for number, start in has
            if (group := groups.groups[number])
            and keys.issuperset(
                group.keys(hashes, start // group.block_size, start // group.block_size + 1)
            )
        }

        def count_leading(wanted: list[bytes], keys: set[bytes] = keys) -> int:
            return next((at for at, key in enumerate(wanted) if key not in keys), len(wanted))

        limit = num_tokens if groups.are_all_full else num_tokens - 1
        best = max(
            [
                end
                for end in range(border, limit + 1, border)
                if end > num_computed and can_serve(specs, has, num_computed, end, offloaded)
            ],
            default=num_computed,
        )
        found = groups.longest_hit(hashes, num_tokens, num_computed, count_leading)
        assert found == best, f"{num_tokens=} {num_computed=} {has=}"


@pytest.mark.parametrize("name", GROUPS)
def test_blocks_whose_hash_is_not_known_yet_are_no_hit(name: str) -> None:
    specs = GROUPS[name]
    step = math.gcd(*(spec.block_size for spec in specs))
    groups = StoredGroups(ConnectorConfig(specs=tuple(specs), hash_block_size=step), None)
    hashes = hashes_of(48, step)
    assert groups.longest_hit(hashes, 96, 0, len) == 48
    assert groups.longest_hit([], 96, 0, len) == 0


@pytest.mark.parametrize("spec", [cross(), CustomSpec(4, "theirs", 64)], ids=["cross", "custom"])
def test_a_group_whose_kv_does_not_follow_from_its_tokens_is_rejected(spec: KVCacheSpec) -> None:
    config = ConnectorConfig(specs=(full(4), spec), hash_block_size=4)
    with pytest.raises(ConfigError, match="cannot store KV cache group 1"):
        StoredGroups(config, None)


@pytest.mark.req("OFF-10", "CFG-05")
@pytest.mark.parametrize("block_size", [0, -4, 2, 6])
def test_an_offloaded_block_consists_of_whole_blocks(block_size: int) -> None:
    config = ConnectorConfig(specs=(full(4),), hash_block_size=4)
    with pytest.raises(
        ConfigError, match=f"block_size={block_size} .* must be a multiple of the 4"
    ):
        StoredGroups(config, block_size)


@pytest.mark.req("OFF-10")
def test_an_offloaded_block_of_several_blocks_has_the_hash_of_the_last_one() -> None:
    config = ConnectorConfig(specs=(full(4),), hash_block_size=2)
    (group,) = StoredGroups(config, 16).groups
    assert (group.factor, group.hash_step) == (4, 8)
    hashes = hashes_of(64, 2)
    assert group.keys(hashes, 1, 3) == [hashes[15] + b"\0", hashes[23] + b"\0"]


@pytest.mark.req("OFF-10", "STM-10")
def test_a_state_in_pages_has_a_key_per_page_at_the_end_of_a_hit() -> None:
    config = ConnectorConfig(specs=(full(4), state(3, 4)), hash_block_size=2)
    states = StoredGroups(config, None).groups[1]
    hashes = hashes_of(64, 2)
    pages = [page + b"\1" for page in page_hashes(hashes[5], 3)]
    assert len(set(pages)) == 3
    assert pages[0] == hashes[5] + b"\1"
    assert states.keys(hashes, 2, 3) == pages
    assert states.block_range(4, 12) == (2, 3)
    assert states.block_range(4, 13) == (3, 4), "within a block, as of a swapped request"
    assert states.rows(np.array([7, 5, 9], np.int32), 2, 3, 12).tolist() == [[7], [5], [9]]


@pytest.mark.req("OFF-10")
@pytest.mark.parametrize("spec", [window(6, 4), chunked(8, 4), state(4), state(2)], ids=str)
def test_several_blocks_are_one_offloaded_block_only_where_all_are_kept(spec: KVCacheSpec) -> None:
    config = ConnectorConfig(specs=(spec,), hash_block_size=4)
    with pytest.raises(ConfigError, match="block_size=16"):
        StoredGroups(config, 16)
