"""Blocks of several groups go back tail first, in one order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.scheduler.kv_cache.free_order import FreeOrder


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_whatever_ends_at_a_later_token_goes_first_and_null_blocks_do_not_go(
    data: st.DataObject,
) -> None:
    num_groups = data.draw(st.integers(2, 4))
    sizes = data.draw(
        st.one_of(
            st.just([4] * num_groups),
            st.lists(st.sampled_from([2, 3, 4, 8]), min_size=num_groups, max_size=num_groups),
        )
    )
    length = data.draw(st.one_of(st.integers(0, 8), st.integers(90, 300)))
    tables, frees_skipped, next_id = [], [], 1
    for _ in range(num_groups):
        count = data.draw(st.one_of(st.just(length), st.integers(0, length)))
        table = np.arange(next_id, next_id + count)
        next_id += count
        frees_skipped.append(data.draw(st.booleans()))
        if frees_skipped[-1]:
            table[: data.draw(st.integers(0, count))] = 0
            for position in data.draw(st.lists(st.integers(0, 300), max_size=3)):
                table[position:][:1] = 0
        tables.append(int32_array(table))
    wanted = sorted(
        (-(index + 1) * size, group, block_id)
        for group, (size, table) in enumerate(zip(sizes, tables, strict=True))
        for index, block_id in enumerate(table.tolist())
        if block_id
    )
    order = FreeOrder(sizes, frees_skipped).tail_first(tables)
    assert order.tolist() == [block_id for _, _, block_id in wanted]
