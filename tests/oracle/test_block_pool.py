"""The textbook pool on the worked numbers of the checklist."""

import pytest

from tests.oracle.block_pool import Block, BlockNames, OutOfBlocks, TextbookBlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_taking_blocks_drops_their_names() -> None:  # NUM-01
    pool = TextbookBlockPool(6)
    pool.set_name(pool.blocks[2], 7)
    taken = pool.take(3)
    assert ids(taken) == [1, 2, 3]
    assert [(block.ref_count, block.name) for block in taken] == [(1, None)] * 3
    assert pool.find(7) is None
    assert ids(pool.free_queue) == [4, 5]


def test_freed_blocks_are_queued_in_the_order_given() -> None:  # NUM-02
    pool = TextbookBlockPool(15)
    pool.take(9)
    held = pool.take(5)
    assert ids(held) == [10, 11, 12, 13, 14]
    pool.free(reversed(held))
    assert ids(pool.free_queue) == [14, 13, 12, 11, 10]


def test_touched_blocks_leave_the_queue_and_keep_their_names() -> None:  # NUM-03
    pool = TextbookBlockPool(5)
    hits = pool.blocks[2:4]
    for block in hits:
        pool.set_name(block, block.block_id)
    pool.touch(hits)
    assert ids(pool.free_queue) == [1, 4]
    assert [(block.ref_count, block.name) for block in hits] == [(1, 2), (1, 3)]


def test_cached_blocks_without_a_holder_are_free() -> None:  # NUM-04
    pool = TextbookBlockPool(8)
    blocks = pool.take(7)
    for block in (blocks[2], blocks[5]):
        pool.set_name(block, block.block_id)
    pool.free([blocks[index] for index in (2, 3, 5, 6)])
    assert ids(pool.free_queue) == [3, 4, 6, 7]
    pool.check_invariants(blocks[index] for index in (0, 1, 4))


def test_of_equal_blocks_the_one_named_first_is_found_until_it_goes() -> None:
    pool = TextbookBlockPool(5)
    for block in pool.blocks[1:4]:
        pool.set_name(block, 7)
    assert pool.find(7) is pool.blocks[1]
    pool.take(1)
    assert pool.find(7) is pool.blocks[2]


def test_misuse_is_refused() -> None:
    pool = TextbookBlockPool(3)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.free([pool.blocks[1]])
    pool.set_name(pool.blocks[1], 7)
    with pytest.raises(ValueError, match="already has a name"):
        pool.set_name(pool.blocks[1], 8)


def test_names_are_equal_only_for_equal_prefix_and_salt() -> None:
    names = BlockNames(b"seed")
    plain = names.chain([1, 2, 3, 4, 5], 2, None)
    assert len(plain) == 2
    assert names.chain([1, 2, 3, 4], 2, None) == plain
    assert names.chain([9, 2, 3, 4], 2, None)[1] != plain[1]
    assert not set(names.chain([1, 2, 3, 4], 2, "salt")) & set(plain)
