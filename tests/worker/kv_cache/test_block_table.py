"""Block tables and slots: worked examples, every operation against lists, and the commit."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longshore.protocol.errors import PlanMismatch
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.queues.compute_queue import Completion, CpuComputeQueue
from longshore.worker.step.staging import StagingSet

CPU = torch.device("cpu")


def table_of(
    rows: Sequence[Sequence[int]] = (),
    *,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_model_len: int = 64,
    kernel_block_size: int | None = None,
) -> BlockTable:
    table = BlockTable(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        device=CPU,
        kernel_block_size=kernel_block_size,
    )
    for row, ids in enumerate(rows):
        table.add_row(row, ints(ids))
    return table


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32)


def slots_of(table: BlockTable, rows: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """The slots as a step computes them."""
    (slots,) = MultiGroupBlockTable([table]).slots(np.array(rows), np.array(positions))
    return slots


def committed(table: BlockTable) -> np.ndarray:
    upload = table.commit()
    if upload is not None:
        upload.run()
    return table.device_table.numpy()


@pytest.mark.req("NUM-05", "WBT-03")
def test_slots_of_three_requests_with_blocks_of_four() -> None:
    table = table_of([[5, 8], [2, 3, 10], [12]], block_size=4)
    slots = slots_of(table, [0, 0, 1, 1, 1, 2], [3, 7, 2, 5, 9, 1])
    assert slots.tolist() == [23, 35, 10, 13, 41, 49]


@pytest.mark.req("NUM-06", "WBT-03")
def test_slots_of_three_requests_with_blocks_of_two() -> None:
    table = table_of([[0, 1], [5, 6, 7], [10, 11]], block_size=2)
    rows = [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    positions = [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert slots_of(table, rows, positions).tolist() == [0, 1, 10, 11, 12, 13, 14, 20, 21, 22]


@pytest.mark.req("WBT-03")
@given(st.data(), st.sampled_from([1, 4, 16, 64]))
def test_a_slot_is_its_block_times_the_block_size_plus_the_offset(
    data: st.DataObject, block_size: int
) -> None:
    rows = [[0, 7, 14], [21, 28, 35]]
    table = table_of(rows, block_size=block_size, max_model_len=3 * block_size)
    row = data.draw(st.integers(0, 1))
    position = data.draw(st.integers(0, 3 * block_size - 1))
    (slot,) = slots_of(table, [row], [position])
    assert slot == rows[row][position // block_size] * block_size + position % block_size


@pytest.mark.req("WBT-01")
def test_slots_beyond_31_bits_do_not_wrap_around() -> None:
    block_id = 2**31 // 64 + 1
    assert slots_of(table_of([[block_id]], block_size=64), [0], [3]).tolist() == [2**31 + 64 + 3]


@pytest.mark.req("NUM-07", "WBT-04")
def test_an_allocated_block_is_several_kernel_blocks() -> None:
    table = table_of([[0, 1, 2]], block_size=32, kernel_block_size=16, max_model_len=96)
    assert table.host[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.num_blocks[0] == 6
    assert table.block_size == 16
    assert table.max_blocks == 6
    assert table.allocated(0).tolist() == [0, 1, 2]


@pytest.mark.req("WBT-04")
def test_a_kernel_block_must_divide_the_allocated_block() -> None:
    with pytest.raises(ValueError, match="kernel_block_size=12 does not divide block_size=32"):
        table_of(block_size=32, kernel_block_size=12)


@pytest.mark.req("WBT-04")
def test_expanded_blocks_are_appended_moved_and_cut_as_one() -> None:
    table = table_of([[4], [7]], block_size=32, kernel_block_size=16, max_model_len=128)
    table.append_rows(ints([1, 0, 1]), ints([9, 5, 3]))
    assert table.host[1, :6].tolist() == [14, 15, 18, 19, 6, 7]
    table.truncate_row(1, 33)  # 33 tokens need two allocated blocks
    assert table.allocated(1).tolist() == [7, 9]
    assert table.num_blocks[1] == 4, "with the half of the second that no token needs yet"
    table.move_row(1, 2)
    assert table.allocated(2).tolist() == [7, 9]


@pytest.mark.req("WBT-01")
def test_a_table_has_int32_entries_on_host_and_device_and_counts_per_row() -> None:
    table = table_of([[3, 1]], max_num_seqs=5, max_model_len=62, block_size=4)
    assert table.host.shape == tuple(table.device_table.shape) == (5, 16)
    assert table.host.dtype == np.int32
    assert table.device_table.dtype == torch.int32
    assert table.num_blocks.tolist() == [2, 0, 0, 0, 0]
    assert slots_of(table, [0], [5]).dtype == np.int64


@pytest.mark.req("WBT-02")
def test_an_empty_append_changes_nothing() -> None:
    table = table_of([[3, 1]])
    committed(table)
    table.append_row(0, ints([]))
    table.append_rows(ints([]), ints([]))
    assert table.allocated(0).tolist() == [3, 1]
    assert table.commit() is None


@pytest.mark.req("SYS-05")
@given(st.lists(st.lists(st.integers(1, 99), max_size=3), max_size=6))
def test_appending_never_changes_the_positions_before(appended: list[list[int]]) -> None:
    table = table_of()
    held: list[int] = []
    for ids in appended:
        if len(held) + len(ids) <= table.max_blocks:
            table.append_row(2, ints(ids))
            held += ids
        assert table.allocated(2).tolist() == held
        assert committed(table)[2, : len(held)].tolist() == held


def test_a_row_never_holds_more_than_the_longest_request_needs() -> None:
    table = table_of([[1, 2, 3]], max_model_len=16, block_size=4)
    table.append_row(0, ints([4]))
    with pytest.raises(PlanMismatch, match="row 0 would hold 5 blocks"):
        table.append_row(0, ints([5]))


@pytest.mark.req("WBT-06")
def test_a_commit_carries_the_new_blocks_of_all_rows_in_bulk_and_nothing_else() -> None:
    table = table_of([[1, 2], [3], [4]], max_num_seqs=6)
    first = table.commit()
    assert first is not None
    first.run()
    table.append_rows(ints([2, 0]), ints([8, 9]))
    upload = table.commit()
    assert upload is not None
    assert upload.entries.tolist() == [9, 8]
    upload.run()
    np.testing.assert_array_equal(table.device_table.numpy(), table.host)
    assert table.commit() is None


@pytest.mark.parametrize("num_blocks", [10, 1000])
def test_a_commit_costs_the_same_however_long_the_row_is(num_blocks: int) -> None:
    table = table_of([[1] * num_blocks, [2]], max_model_len=1024 * 4)
    committed(table)
    table.append_rows(ints([0, 1, 0]), ints([8, 9, 10]))
    upload = table.commit()
    assert upload is not None
    assert len(upload.entries) == 2 * 2  # as many of each row
    upload.run()
    np.testing.assert_array_equal(table.device_table.numpy(), table.host)


def check_device(tables: MultiGroupBlockTable) -> None:
    """A commit brings all rows of both groups to the device."""
    uploads = tables.commit()
    assert len(uploads) == 2
    for upload in uploads:
        upload.run()
    for table in tables.tables:
        for row in range(4):
            held = table.allocated(row)
            assert table.device_table[row, : len(held)].tolist() == held.tolist()
    assert tables.commit() == []


@pytest.mark.req("WBT-06")
def test_every_change_reaches_the_tables_of_all_groups() -> None:
    tables = MultiGroupBlockTable([table_of(block_size=4), table_of(block_size=2)])
    tables.add_row(0, [ints([1]), ints([2, 3])])
    tables.add_row(1, [ints([4]), ints([5, 6])])
    tables.append_row(0, [ints([7]), ints([8])])
    tables.append_rows(1, ints([1, 0]), ints([9, 10]))
    assert [ids.tolist() for ids in tables.allocated(0)] == [[1, 7], [2, 3, 8, 10]]
    check_device(tables)
    tables.swap_row(0, 1)
    assert [ids.tolist() for ids in tables.allocated(0)] == [[4], [5, 6, 9]]
    check_device(tables)
    tables.move_row(0, 2)
    assert [ids.tolist() for ids in tables.allocated(2)] == [[4], [5, 6, 9]]
    assert [ids.tolist() for ids in tables.allocated(0)] == [[], []]
    assert tables.capacity().tolist() == [0, 8, 4, 0]
    slots = tables.slots(np.array([2]), np.array([3]))
    assert [part.tolist() for part in slots] == [[4 * 4 + 3], [6 * 2 + 1]]
    check_device(tables)
    tables.truncate_row(2, 3)
    assert [ids.tolist() for ids in tables.allocated(2)] == [[4], [5, 6]]
    tables.append_row(2, [ints([11]), ints([12])])  # where another block was
    check_device(tables)


def test_blocks_for_a_group_that_is_not_here_are_rejected() -> None:
    tables = MultiGroupBlockTable([table_of()])
    with pytest.raises(PlanMismatch, match="KV cache group 1; there are 1"):
        tables.append_rows(1, ints([0]), ints([1]))
    with pytest.raises(PlanMismatch, match="blocks for 2 KV cache groups"):
        tables.add_row(0, [ints([1]), ints([2])])


class TablesAgainstLists(RuleBasedStateMachine):
    """Any sequence of operations has the same result as on plain lists."""

    MAX_BLOCKS = 6
    rows = st.integers(0, 3)
    ids = st.lists(st.integers(1, 99), max_size=3)

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(max_model_len=self.MAX_BLOCKS * 4)
        self.lists: list[list[int]] = [[], [], [], []]

    @rule(row=rows, ids=ids)
    def add(self, row: int, ids: list[int]) -> None:
        self.table.add_row(row, ints(ids))
        self.lists[row] = ids

    @rule(row=rows, ids=ids)
    def append(self, row: int, ids: list[int]) -> None:
        if len(self.lists[row]) + len(ids) <= self.MAX_BLOCKS:
            self.table.append_row(row, ints(ids))
            self.lists[row] = self.lists[row] + ids

    @rule(pairs=st.lists(st.tuples(rows, st.integers(1, 99)), max_size=5))
    def append_columns(self, pairs: list[tuple[int, int]]) -> None:
        grown = [list(ids) for ids in self.lists]
        for row, block_id in pairs:
            grown[row].append(block_id)
        if max(map(len, grown)) <= self.MAX_BLOCKS:
            self.table.append_rows(ints([r for r, _ in pairs]), ints([b for _, b in pairs]))
            self.lists = grown

    @rule(row=rows, num_tokens=st.integers(0, 24))
    def truncate(self, row: int, num_tokens: int) -> None:
        self.table.truncate_row(row, num_tokens)
        self.lists[row] = self.lists[row][: -(-num_tokens // 4)]

    @rule(one=rows, other=rows)
    def swap(self, one: int, other: int) -> None:
        self.table.swap_row(one, other)
        self.lists[one], self.lists[other] = self.lists[other], self.lists[one]

    @precondition(lambda self: any(self.lists))
    @rule(source=rows, destination=rows)
    def move(self, source: int, destination: int) -> None:
        if source != destination:
            self.table.move_row(source, destination)
            self.lists[destination], self.lists[source] = self.lists[source], []

    @rule()
    def commit(self) -> None:
        device = committed(self.table)
        for row, ids in enumerate(self.lists):
            assert device[row, : len(ids)].tolist() == ids

    @invariant()
    def rows_hold_what_the_lists_hold(self) -> None:
        assert [self.table.allocated(row).tolist() for row in range(4)] == self.lists
        assert self.table.capacity().tolist() == [4 * len(ids) for ids in self.lists]


TestTablesAgainstLists = pytest.mark.req("WBT-02")(TablesAgainstLists.TestCase)


class SlowDevice:
    """A compute queue whose copies wait until the test releases them."""

    def __init__(self) -> None:
        self.may_copy = threading.Semaphore(0)
        self.queue = CpuComputeQueue(before_each=self.may_copy.acquire)

    def copy(self, table: BlockTable) -> Completion:
        upload = table.commit()
        assert upload is not None
        completion = self.queue.submit(upload.run)
        upload.guard(completion)
        return completion


def run_ahead(num_steps: int, device: SlowDevice) -> list[list[int]]:
    """The host changes a row in every step and waits only for the staging ring. Returns the
    device's table after each copy."""
    table = table_of(max_model_len=64)
    seen: list[list[int]] = []

    def look() -> None:
        seen.append([block_id for block_id in table.device_table[0].tolist() if block_id])

    host = threading.Thread(
        target=lambda: [
            (table.add_row(0, ints([step])), device.copy(table), device.queue.submit(look))
            for step in range(1, num_steps + 1)
        ]
    )
    host.start()
    host.join(timeout=0.2)  # as far ahead as possible while nothing is copied
    for _ in range(2 * num_steps):
        device.may_copy.release()
    host.join()
    device.queue.close()
    return seen


@pytest.mark.req("WBT-07")
def test_a_staging_buffer_is_not_refilled_while_a_copy_may_read_it() -> None:
    assert run_ahead(8, SlowDevice()) == [[step] for step in range(1, 9)]


@pytest.mark.req("WBT-07")
def test_without_the_fence_the_delayed_device_shows_the_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StagingSet, "wait_until_free", lambda self: None)
    seen = run_ahead(8, SlowDevice())
    assert seen[0] != [1], "copies read what the host wrote for later steps"
    assert seen[-1] == [8]
