"""Plans for several KV cache groups: the group of each copy, and whether rows have their blocks."""

import msgspec
import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import (
    AppendedBlocks,
    KeptState,
    RowStart,
    SchedulerOutput,
    digest_changes,
)
from longshore.protocol.sampling import SamplingParams
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable, StateTable
from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare
from longshore.worker.step.worker_rows import WorkerRows

NUM_ROWS = 4


def worker_rows(share: ContextShare = WHOLE_CONTEXT, *, num_pages: int = 0) -> WorkerRows:
    """Groups with blocks of 4 and of 8 tokens, and with a state of `num_pages`."""
    tables: list[BlockTable] = [
        BlockTable(
            max_num_seqs=NUM_ROWS,
            max_model_len=64,
            block_size=size,
            share=share,
            device=torch.device("cpu"),
        )
        for size in (4, 8)
    ]
    if num_pages:
        settings = {"max_num_seqs": NUM_ROWS, "device": torch.device("cpu")}
        tables.append(StateTable(max_model_len=4 * num_pages, block_size=4, **settings))
    return WorkerRows(
        tables=MultiGroupBlockTable(tables),
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=64,
        max_model_len=64,
        vocab_size=100,
        num_blocks=50,
        epoch=1,
    )


def start(row: int, num_computed: int, *block_ids: list[int]) -> RowStart:
    return RowStart(
        row=row,
        generation=row + 1,
        request_id=f"request {row}",
        num_computed_tokens=num_computed,
        last_computed=63,
        prompt_token_ids=int32_array(list(range(1, 12))),
        output_token_ids=int32_array([]),
        block_ids=tuple(int32_array(ids) for ids in block_ids),
        sampling=SamplingParams(),
    )


def plan_of(
    added: list[RowStart],
    copies: list[tuple[int, int, int]] | None = None,
    appended: tuple[AppendedBlocks, ...] = (),
) -> SchedulerOutput:
    """The first plan of an epoch; every row computes all its remaining tokens."""
    columns = [int32_array(list(column)) for column in zip(*copies or [], strict=True)] or [
        int32_array([]) for _ in range(3)
    ]
    scheduled = {each.row: 11 - each.num_computed_tokens for each in added}
    changes = {
        "finished_rows": int32_array([]),
        "rewound": (),
        "added": tuple(added),
        "appended": appended,
        "scheduled_rows": int32_array(list(scheduled)),
        "scheduled_tokens": int32_array(list(scheduled.values())),
        "copy_source_ids": columns[0],
        "copy_target_ids": columns[1],
        "copy_num_tokens": columns[2],
    }
    return SchedulerOutput(
        epoch=1,
        step=1,
        previous_step=0,
        num_rows=len(added),
        num_scheduled_tokens=sum(scheduled.values()),
        digest=digest_changes(0, **changes),
        **changes,
    )


def test_a_copy_belongs_to_the_group_in_whose_table_its_target_is() -> None:
    rows = worker_rows()
    added = [start(0, 6, [1, 2, 3], [4, 5]), start(1, 5, [1, 7, 8], [9, 10])]
    plan = plan_of(added, [(20, 9, 5), (21, 2, 2), (22, 4, 6), (23, 7, 1)])
    assert rows.apply(plan).tolist() == [5, 6, 0, 0]
    copies = rows.copies(plan)
    assert copies.num_of_group == [2, 2]
    assert copies.blocks.reshape(3, -1).tolist() == [[21, 23, 20, 22], [2, 7, 9, 4], [2, 1, 5, 6]]


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize(("rank", "kept"), [(0, [2, 4]), (1, [1, 3])])
def test_a_rank_copies_those_of_the_tokens_that_it_keeps(rank: int, kept: list[int]) -> None:
    """With two ranks, blocks have 8 and 16 tokens, of which 3 and 7 are copied."""
    rows = worker_rows(ContextShare(rank, 2))
    plan = plan_of([start(0, 7, [1, 2], [4])], [(21, 2, 3), (22, 4, 7)])
    rows.apply(plan)
    assert rows.copies(plan).blocks.reshape(3, -1).tolist() == [[21, 22], [2, 4], kept]


def test_a_plan_without_copies_has_none() -> None:
    rows = worker_rows()
    plan = plan_of([start(0, 0, [1, 2, 3], [4, 5])])
    rows.apply(plan)
    assert len(rows.copies(plan).blocks) == 0


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        ([(20, 30, 1)], "in the table of a row that the step starts"),
        ([(20, 1, 8)], "number of copied tokens"),
    ],
    ids=["nobody's", "more than a block of its group"],
)
def test_a_copy_that_no_started_row_takes_whole_is_rejected(
    copies: list[tuple[int, int, int]], reason: str
) -> None:
    rows = worker_rows()
    plan = plan_of([start(0, 6, [1, 2, 3], [4, 5])], copies)
    rows.apply(plan)
    with pytest.raises(PlanMismatch, match=reason):
        rows.copies(plan)


def test_a_row_needs_blocks_in_every_group_for_what_it_computes() -> None:
    worker_rows().apply(plan_of([start(0, 0, [1, 2, 3], [4, 5])]))
    with pytest.raises(PlanMismatch, match="row 0 without blocks"):
        worker_rows().apply(plan_of([start(0, 0, [1, 2, 3], [4])]))
    with pytest.raises(PlanMismatch, match="row 0 without blocks"):
        worker_rows().apply(plan_of([start(0, 0, [1, 2], [4, 5])]))
    with pytest.raises(PlanMismatch, match="has blocks for 1 KV cache groups"):
        worker_rows().apply(plan_of([start(0, 0, [1, 2, 3])]))


def test_appended_blocks_reach_the_group_they_are_for() -> None:
    rows = worker_rows()
    more = AppendedBlocks(1, int32_array([0]), int32_array([5]))
    rows.apply(plan_of([start(0, 0, [1, 2, 3], [4])], appended=(more,)))
    assert [ids.tolist() for ids in rows.tables.allocated(0)] == [[1, 2, 3], [4, 5]]
    slots = rows.tables.slots(np.zeros(3, np.int64), np.array([0, 5, 10]))
    assert [of_group.tolist() for of_group in slots] == [[4, 9, 14], [32, 37, 42]]


@pytest.mark.parametrize("num_computed", [0, 10])
def test_the_state_after_any_token_of_a_step_can_be_kept(num_computed: int) -> None:
    """Also after the only one."""
    rows = worker_rows(num_pages=2)
    plan = plan_of([start(0, num_computed, [1, 2, 3], [4, 5], [6, 7])])
    num_scheduled = rows.apply(plan)
    kept = KeptState(0, 11, int32_array([8, 9]))
    plan = msgspec.structs.replace(plan, kept_states=(kept,))
    assert rows.kept_states(plan, num_scheduled) == {0: [kept]}


@pytest.mark.parametrize(
    "kept",
    [
        [KeptState(0, 6, int32_array([8, 9]))],
        [KeptState(0, 12, int32_array([8, 9]))],
        [KeptState(1, 1, int32_array([8, 9]))],
        [KeptState(0, 9, int32_array([8]))],
        [KeptState(0, 9, int32_array([8, 9])), KeptState(0, 9, int32_array([10, 11]))],
    ],
    ids=["before the step", "after it", "of an empty row", "one page", "twice"],
)
def test_a_state_that_the_step_does_not_compute_is_not_kept(kept: list[KeptState]) -> None:
    rows = worker_rows(num_pages=2)
    plan = plan_of([start(0, 6, [1, 2, 3], [4, 5], [6, 7])])
    num_scheduled = rows.apply(plan)
    with pytest.raises(PlanMismatch, match="keeps the state of row"):
        rows.kept_states(msgspec.structs.replace(plan, kept_states=tuple(kept)), num_scheduled)
