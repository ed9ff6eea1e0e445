"""The map from hashes to the blocks that have them."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.scheduler.kv_cache.hash_map import BlockHashMap


@pytest.mark.req("HSH-02", "ERR-22")
def test_a_hash_has_one_block_or_several_in_the_order_of_caching() -> None:
    prefixes = BlockHashMap()
    prefixes.insert_n([b"hash"], [5])
    assert prefixes.holders(b"hash") == [5]
    prefixes.insert_n([b"hash"], [3])
    prefixes.insert_n([b"other", b"hash"], [4, 9])
    assert prefixes.holders(b"hash") == [5, 3, 9]
    assert prefixes.get_one_block(b"hash") == 5
    assert (len(prefixes), prefixes.num_holders) == (2, 4)


@pytest.mark.req("HSH-02")
def test_pop_removes_only_the_given_block() -> None:
    prefixes = BlockHashMap()
    prefixes.insert_n([b"hash"] * 3, [5, 3, 9])
    assert prefixes.pop(b"hash", 4) is False
    assert prefixes.pop(b"hash", 5) is True
    assert prefixes.get_one_block(b"hash") == 3
    assert prefixes.pop(b"hash", 3) is True
    assert prefixes.holders(b"hash") == [9]
    assert prefixes.pop(b"hash", 3) is False
    assert prefixes.pop(b"hash", 9) is True
    assert prefixes.pop(b"hash", 9) is False
    assert len(prefixes) == 0


class Hashes(list[bytes]):
    """Keeps its iterator, which shows how far it was read."""

    def __iter__(self) -> Iterator[bytes]:
        self.remaining = super().__iter__()
        return self.remaining


@pytest.mark.req("STM-05", "ERR-13")
def test_a_prefix_ends_at_its_first_missing_hash_and_no_later_one_is_looked_up() -> None:
    prefixes = BlockHashMap()
    hashes = Hashes(b"%d" % index for index in range(6))
    prefixes.insert_n([hashes[0], hashes[1], hashes[3]], [7, 8, 9])
    assert prefixes.find_prefix(hashes) == [7, 8]
    assert list(hashes.remaining) == hashes[3:]
    assert prefixes.find_prefix(hashes[:2]) == [7, 8]
    assert prefixes.find_prefix(hashes[2:]) == prefixes.find_prefix([]) == []


hashes = st.sampled_from([b"a", b"b", b"c"])
steps = st.lists(st.tuples(st.booleans(), st.lists(st.tuples(hashes, st.integers(0, 4)))))


@pytest.mark.req("HSH-02")
@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps)
def test_map_behaves_like_a_list_of_pairs(
    steps: list[tuple[bool, list[tuple[bytes, int]]]],
) -> None:
    prefixes = BlockHashMap()
    pairs: list[tuple[bytes, int]] = []
    for is_insert, drawn in steps:
        chosen = dict((block_id, (name, block_id)) for name, block_id in drawn)
        carriers = {block_id for _, block_id in pairs}
        if is_insert:
            batch = [pair for block_id, pair in chosen.items() if block_id not in carriers]
            prefixes.insert_n([name for name, _ in batch], [block_id for _, block_id in batch])
            pairs += batch
        else:
            batch = [pair for pair in chosen.values() if pair in pairs]
            prefixes.pop_n([name for name, _ in batch], [block_id for _, block_id in batch])
            pairs = [pair for pair in pairs if pair not in batch]
            for name, block_id in drawn:
                if (name, block_id) not in pairs:
                    assert prefixes.pop(name, block_id) is False
        for name in (b"a", b"b", b"c"):
            holders = [block_id for carried, block_id in pairs if carried == name]
            assert prefixes.holders(name) == holders
            assert prefixes.get_one_block(name) == (holders[0] if holders else None)
            assert (name in prefixes) is bool(holders)
        assert len(prefixes) == len({name for name, _ in pairs})
        assert prefixes.num_holders == len(pairs)
    prefixes.clear()
    assert (len(prefixes), prefixes.num_holders) == (0, 0)
