"""Which rank stores which token, and where: worked examples, and tokens assigned one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.kv_cache.context_share import ContextShare, check_context_parallel

FULL = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype_bytes=2)
FIT: dict[str, Any] = {
    "size": 2,
    "interleave": 1,
    "block_size": 16,
    "num_shards": 4,
    "num_kv_heads": 2,
}


def table_of(
    rows: list[list[int]],
    share: ContextShare,
    *,
    block_size: int,
    max_model_len: int = 64,
    **more: Any,
) -> BlockTable:
    table = BlockTable(
        max_num_seqs=max(2, len(rows)),
        max_model_len=max_model_len,
        block_size=block_size,
        device=torch.device("cpu"),
        share=share,
        **more,
    )
    for row, block_ids in enumerate(rows):
        table.add_row(row, np.array(block_ids, np.int32))
    return table


def slots_of_row_0(table: BlockTable, num_tokens: int) -> list[int]:
    """The slots as a step computes them."""
    positions = np.arange(num_tokens)
    (slots,) = MultiGroupBlockTable([table]).slots(np.zeros_like(positions), positions)
    return slots.tolist()


@pytest.mark.req("WBT-05")
def test_two_ranks_keep_every_other_token() -> None:
    """Blocks of 4 tokens per rank, so of 8 in both; the row has blocks 5 and 2."""
    even, odd = (
        slots_of_row_0(table_of([[5, 2]], ContextShare(rank, 2), block_size=4), 11)
        for rank in (0, 1)
    )
    assert even == [20, -1, 21, -1, 22, -1, 23, -1, 8, -1, 9]
    assert odd == [-1, 20, -1, 21, -1, 22, -1, 23, -1, 8, -1]


@pytest.mark.req("WBT-05")
def test_two_ranks_keep_two_neighbouring_tokens_in_turn() -> None:
    first, second = (
        slots_of_row_0(table_of([[5, 2]], ContextShare(rank, 2, 2), block_size=4), 11)
        for rank in (0, 1)
    )
    assert first == [20, 21, -1, -1, 22, 23, -1, -1, 8, 9, -1]
    assert second == [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1, 8]


@pytest.mark.req("WBT-05")
@pytest.mark.parametrize(
    ("pcp_rank", "dcp_rank", "rank"), [(0, 0, 0), (0, 2, 2), (1, 0, 3), (1, 1, 4)]
)
def test_decode_ranks_are_neighbours_among_prefill_ranks(
    pcp_rank: int, dcp_rank: int, rank: int
) -> None:
    share = ContextShare.of_ranks(
        pcp_rank=pcp_rank, pcp_size=2, dcp_rank=dcp_rank, dcp_size=3, interleave=4
    )
    assert share == ContextShare(rank, 6, 4)


@pytest.mark.req("WBT-05")
@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8]),
    st.integers(1, 150),
)  # fmt: skip
def test_slots_equal_those_of_tokens_assigned_one_by_one(
    pcp_size: int, dcp_size: int, interleave: int, block_size: int, num_tokens: int
) -> None:
    world = pcp_size * dcp_size
    num_blocks = -(-num_tokens // (block_size * world))
    block_ids = list(range(3, 3 + 2 * num_blocks, 2))
    expected = np.full((world, num_tokens), -1)
    num_kept = [0] * world
    for position in range(num_tokens):
        rank = position // interleave % world
        column, offset = divmod(num_kept[rank], block_size)
        expected[rank, position] = block_ids[column] * block_size + offset
        num_kept[rank] += 1
    for rank in range(world):
        share = ContextShare.of_ranks(
            pcp_rank=rank // dcp_size,
            pcp_size=pcp_size,
            dcp_rank=rank % dcp_size,
            dcp_size=dcp_size,
            interleave=interleave,
        )
        table = table_of([block_ids], share, block_size=block_size, max_model_len=1000)
        assert slots_of_row_0(table, num_tokens) == expected[rank].tolist()
        counts = np.arange(num_tokens + 1)
        by_count = [(expected[rank, :count] >= 0).sum() for count in counts]
        assert share.num_kept(counts).tolist() == by_count
        assert share.num_kept(torch.from_numpy(counts)).tolist() == by_count


@pytest.mark.req("WBT-05")
@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.data())
def test_every_token_has_a_slot_of_its_own_on_one_rank(
    size: int, interleave: int, data: st.DataObject
) -> None:
    block_size, num_blocks = 8, 3
    rank_of = np.full(num_blocks * block_size * size, -1)
    for rank in range(size):
        share = ContextShare(rank, size, interleave)
        table = table_of([[4, 7, 1]], share, block_size=block_size, max_model_len=1000)
        slots = np.array(slots_of_row_0(table, len(rank_of)))
        assert len(set(slots[slots >= 0])) == num_blocks * block_size
        assert (rank_of[slots >= 0] == -1).all()
        rank_of[slots >= 0] = rank
    position = data.draw(st.integers(0, len(rank_of) - 1))
    assert rank_of[position] == position // interleave % size


@pytest.mark.req("WBT-05")
def test_a_table_counts_in_blocks_of_all_ranks() -> None:
    table = table_of([[5, 2, 9]], ContextShare(1, 2), block_size=4, max_model_len=25)
    assert (table.block_size, table.max_blocks) == (8, 4)
    assert table.capacity().tolist() == [24, 0]
    table.truncate_row(0, 9)
    assert table.allocated(0).tolist() == [5, 2]
    tables = MultiGroupBlockTable([table])
    assert tables.block_sizes == (8,)
    assert tables.capacity().tolist() == [16, 0]
    (slots,) = tables.slots(np.zeros(3, np.int64), np.array([7, 8, 9]))
    assert slots.tolist() == [23, -1, 8]


@pytest.mark.req("WBT-05", "WBT-04")
def test_an_allocated_block_is_several_kernel_blocks_on_each_rank() -> None:
    """An id covers 8 tokens on each of 2 ranks, as 2 entries of 4 tokens each."""
    share = ContextShare(1, 2, 2)
    table = table_of([[3, 1]], share, block_size=8, kernel_block_size=4)
    assert table.host[0, :4].tolist() == [6, 7, 2, 3]
    whole = table_of([[3, 1]], share, block_size=8)
    assert slots_of_row_0(table, 32) == slots_of_row_0(whole, 32)


def test_the_interleave_must_divide_the_block() -> None:
    with pytest.raises(ValueError, match="interleave=3"):
        table_of([], ContextShare(0, 2, 3), block_size=4)


def test_ranks_that_fit_are_accepted() -> None:
    check_context_parallel({"a": FULL}, **FIT)
    latents = MLAAttentionSpec(16, head_size=24, dtype_bytes=2)
    check_context_parallel({"a": latents}, **FIT | {"size": 4, "num_kv_heads": 1})
    window = SlidingWindowSpec(16, 1, 8, 2, sliding_window=4)
    check_context_parallel({"a": window}, **FIT | {"size": 1})


@pytest.mark.parametrize(
    "spec",
    [
        SlidingWindowSpec(16, 1, 8, 2, sliding_window=4),
        FullAttentionSpec(16, 1, 8, 2, sliding_window=4),
        FullAttentionSpec(16, 1, 8, 2, attention_chunk_size=4),
        StateSpec(block_size=16, shapes=((2, 2),), dtype_bytes=(4,)),
        CrossAttentionSpec(16, 1, 8, 2, max_encoder_tokens=4),
    ],
)
def test_layers_without_full_attention_are_rejected_by_name(spec: KVCacheSpec) -> None:
    with pytest.raises(
        UnsupportedModel,
        match=f"decode_context_parallel_size=2: b of this model has a {type(spec).__name__}",
    ):
        check_context_parallel({"a": FULL, "b": spec}, **FIT)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 4}, "decode_context_parallel_size=4 does not divide the 2 copies"),
        ({"num_kv_heads": 8}, "divide the 1 copies .* of the 8 KV heads"),
        ({"interleave": 3}, "cp_kv_cache_interleave_size=3 does not divide block_size=16"),
        ({"interleave": 32}, "cp_kv_cache_interleave_size=32 does not divide block_size=16"),
    ],
)
def test_ranks_that_do_not_fit_are_rejected_by_name(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_context_parallel({"a": FULL}, **FIT | changes)
