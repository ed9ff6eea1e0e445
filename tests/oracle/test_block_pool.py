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


def test_freed_blocks_with_names_are_queued_in_the_order_given() -> None:  # NUM-02
    pool = TextbookBlockPool(15)
    pool.take(9)
    held = pool.take(5)
    assert ids(held) == [10, 11, 12, 13, 14]
    for block in held:
        pool.set_name(block, block.block_id)
    pool.free(reversed(held))
    assert ids(pool.free_queue) == [14, 13, 12, 11, 10]


def test_freed_blocks_without_names_are_taken_before_all_others_the_last_one_first() -> None:
    pool = TextbookBlockPool(6)
    held = pool.take(4)
    pool.set_name(held[1], 7)
    pool.free(reversed(held))
    assert ids(pool.free_queue) == [1, 3, 4, 5, 2]
    pool.remove_name(held[1])
    assert ids(pool.free_queue) == [2, 1, 3, 4, 5]


def test_touched_blocks_leave_the_queue_and_keep_their_names() -> None:  # NUM-03
    pool = TextbookBlockPool(5)
    hits = pool.blocks[2:4]
    for block in hits:
        pool.set_name(block, block.block_id)
    pool.touch(hits)
    assert ids(pool.free_queue) == [1, 4]
    assert [(block.ref_count, block.name) for block in hits] == [(1, 2), (1, 3)]


def test_blocks_with_names_are_free_too_but_taken_last() -> None:  # NUM-04
    pool = TextbookBlockPool(8)
    blocks = pool.take(7)
    for block in (blocks[2], blocks[5]):
        pool.set_name(block, block.block_id)
    pool.free([blocks[index] for index in (2, 3, 5, 6)])
    assert ids(pool.free_queue) == [7, 4, 3, 6]
    pool.check_invariants(blocks[index] for index in (0, 1, 4))


def test_of_equal_blocks_the_one_named_first_is_found_until_it_goes() -> None:
    pool = TextbookBlockPool(5)
    for block in pool.blocks[1:4]:
        pool.set_name(block, 7)
    assert pool.find(7) is pool.blocks[1]
    pool.take(1)
    assert pool.find(7) is pool.blocks[2]


def test_misuse_is_rejected() -> None:
    pool = TextbookBlockPool(3)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.free([pool.blocks[1]])
    pool.set_name(pool.blocks[1], 7)
    with pytest.raises(ValueError, match="already has a name"):
        pool.set_name(pool.blocks[1], 8)


def test_a_load_takes_the_oldest_blocks_after_their_fences() -> None:  # DESIGN 9.3
    pool = TextbookBlockPool(6)
    for block, fence in zip(pool.blocks[1:], (0, 4, 2, 5, 3), strict=True):
        block.fence = fence
    assert ids(pool.available(3)) == [1, 3, 5]
    assert ids(pool.take(2, answered_step=3)) == [1, 3]
    assert ids(pool.free_queue) == [2, 4, 5]
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 are free"):
        pool.take(2, answered_step=3)


def chain(names: BlockNames, token_ids: list[int], salt: str | None) -> list[int]:
    chained: list[int] = []
    names.extend(chained, token_ids, 2, lambda first, last: salt if first == 0 else None)
    return chained


def test_names_are_equal_only_for_equal_prefix_and_extra_key() -> None:
    names = BlockNames(b"seed")
    plain = chain(names, [1, 2, 3, 4, 5], None)
    assert len(plain) == 2
    assert chain(names, [1, 2, 3, 4], None) == plain
    assert chain(names, [9, 2, 3, 4], None)[1] != plain[1]
    assert not set(chain(names, [1, 2, 3, 4], "salt")) & set(plain)
