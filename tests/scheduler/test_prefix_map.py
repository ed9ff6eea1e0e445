"""Names to the blocks that carry them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.errors import LongshoreError
from longshore.scheduler.prefix_map import PrefixMap


@pytest.mark.req("HSH-02")
def test_one_holder_is_stored_as_its_id_and_several_as_a_dict() -> None:
    prefixes = PrefixMap()
    prefixes.insert(b"key", 5)
    assert prefixes._holders[b"key"] == 5
    prefixes.insert(b"key", 3)
    prefixes.insert(b"key", 9)
    assert prefixes._holders[b"key"] == {5: None, 3: None, 9: None}
    assert prefixes.get_one_block(b"key") == 5
    assert len(prefixes) == 1


@pytest.mark.req("HSH-02")
def test_pop_removes_only_the_block_it_names_and_puts_the_rest_back() -> None:
    prefixes = PrefixMap()
    for block_id in (5, 3, 9):
        prefixes.insert(b"key", block_id)
    assert prefixes.pop(b"key", 4) is False
    assert prefixes.pop(b"key", 5) is True
    assert prefixes.get_one_block(b"key") == 3
    assert prefixes.pop(b"key", 3) is True
    assert prefixes._holders[b"key"] == 9
    assert prefixes.pop(b"key", 3) is False
    assert prefixes.pop(b"key", 9) is True
    assert prefixes.pop(b"key", 9) is False
    assert len(prefixes) == 0


def test_a_key_is_forgotten_with_all_its_holders() -> None:
    prefixes = PrefixMap()
    for key, block_id in ((b"many", 5), (b"many", 3), (b"one", 4)):
        prefixes.insert(key, block_id)
    assert prefixes.pop_all(b"many") == [5, 3]
    assert prefixes.pop_all(b"many") == []
    assert prefixes.pop_all(b"one") == [4]
    assert len(prefixes) == 0


@pytest.mark.parametrize("others", [[], [7], [7, 8]])
def test_a_block_cannot_carry_a_key_twice(others: list[int]) -> None:
    prefixes = PrefixMap()
    for block_id in (5, *others):
        prefixes.insert(b"key", block_id)
    with pytest.raises(LongshoreError, match="block 5 already carries this key"):
        prefixes.insert(b"key", 5)


@pytest.mark.req("HSH-02")
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([b"a", b"b"]), st.integers(0, 3)), max_size=30
    )
)
def test_map_behaves_like_a_list_of_pairs(steps: list[tuple[bool, bytes, int]]) -> None:
    prefixes, pairs = PrefixMap(), []
    for is_insert, key, block_id in steps:
        if is_insert and (key, block_id) not in pairs:
            prefixes.insert(key, block_id)
            pairs.append((key, block_id))
        elif not is_insert:
            assert prefixes.pop(key, block_id) is ((key, block_id) in pairs)
            pairs = [pair for pair in pairs if pair != (key, block_id)]
        for name in (b"a", b"b"):
            holders = [block_id for key, block_id in pairs if key == name]
            assert prefixes.get_one_block(name) == (holders[0] if holders else None)
        assert len(prefixes) == len({key for key, _ in pairs})
    prefixes.clear()
    assert len(prefixes) == 0
