"""Encoder inputs in plans: applied exactly, or rejected."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.step.encoder_rows import (
    CrossBlockTable,
    EncoderInput,
    EncoderRows,
)
from tests.worker.audio_plans import AudioPlanner
from tests.worker.models.tiny_whisper import sound
from tests.worker.plans import Entry

NUM_ROWS, BLOCK_SIZE, MAX_TOKENS, MAX_SAMPLES = 4, 8, 50, 16_000
SAMPLES = sound(0)


def tables() -> MultiGroupBlockTable:
    shape = {"max_num_seqs": NUM_ROWS, "block_size": BLOCK_SIZE, "device": torch.device("cpu")}
    own = BlockTable(max_model_len=64, **shape)
    return MultiGroupBlockTable([own, CrossBlockTable(max_model_len=MAX_TOKENS, **shape)])


def encoder_rows(held: MultiGroupBlockTable, max_tokens: int = MAX_TOKENS) -> EncoderRows:
    return EncoderRows(
        held.tables,
        max_num_seqs=NUM_ROWS,
        max_tokens=max_tokens,
        max_samples=MAX_SAMPLES,
        pin_memory=False,
    )


def plan_of(rows: list[int], *, num_tokens: int = MAX_TOKENS) -> SchedulerOutput:
    planner = AudioPlanner(
        num_encoder_tokens=num_tokens,
        num_blocks=60,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_ROWS,
        max_model_len=64,
    )
    planner.sounds = dict.fromkeys(rows, SAMPLES)
    return planner.plan(dict.fromkeys(rows, 3), added=[Entry(row, [1, 2, 3]) for row in rows])


def take(
    plan: SchedulerOutput, count: int = 3, **settings: Any
) -> tuple[EncoderRows, list[EncoderInput]]:
    held = tables()
    for start in plan.added:
        held.add_row(start.row, start.block_ids)
    rows = encoder_rows(held, **settings)
    return rows, rows.take(plan, np.full(NUM_ROWS, count))


def with_items(plan: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    starts = [
        msgspec.structs.replace(
            start, multimodal=tuple(msgspec.structs.replace(i, **changes) for i in start.multimodal)
        )
        for start in plan.added
    ]
    return msgspec.structs.replace(plan, added=tuple(starts))


def encoding(*inputs: tuple[int, int]) -> Callable[[SchedulerOutput], SchedulerOutput]:
    return lambda plan: msgspec.structs.replace(plan, encoder_inputs=inputs)


def without_blocks(plan: SchedulerOutput) -> SchedulerOutput:
    starts = [
        msgspec.structs.replace(start, block_ids=(start.block_ids[0], start.block_ids[1][:-1]))
        for start in plan.added
    ]
    return msgspec.structs.replace(plan, added=tuple(starts))


REFUSED: dict[str, tuple[Callable[[SchedulerOutput], SchedulerOutput], str]] = {
    "no item": (encoding(), r"encodes an item of rows \[\] and starts rows \[1, 2\]"),
    "one row's alone": (encoding((2, 0)), r"rows \[2\] and starts"),
    "a row twice": (encoding((1, 0), (2, 0), (2, 0)), r"rows \[1, 2, 2\] and starts"),
    "an unknown row": (encoding((1, 0), (2, 0), (3, 0)), r"rows \[1, 2, 3\] and starts"),
    "an unknown item": (encoding((1, 0), (2, 1)), "item 1 of row 2, whose request has 1"),
    "an item before the first": (encoding((1, -1), (2, 0)), "item -1 of row 1"),
    "more tokens than the encoder's": (
        lambda plan: with_items(plan, num_tokens=51),
        "51 tokens for row 1; its blocks and the encoder, which produces 50, allow 1 to 50",
    ),
    "no tokens": (lambda plan: with_items(plan, num_tokens=0), "encodes 0 tokens"),
    "too few blocks": (without_blocks, "allow 1 to 48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_encoder_inputs_that_do_not_match_the_rows_are_rejected(case: str) -> None:
    change, reason = REFUSED[case]
    with pytest.raises(PlanMismatch, match=reason):
        take(change(plan_of([1, 2])))


def test_an_item_of_a_row_that_computes_nothing_is_rejected() -> None:
    with pytest.raises(PlanMismatch, match="row 1, which computes nothing"):
        take(plan_of([1, 2]), count=0)


def test_items_are_rejected_where_there_is_no_encoder() -> None:
    with pytest.raises(PlanMismatch, match="does not support multimodal inputs"):
        take(plan_of([1]), max_tokens=0)
    rows, _ = take(msgspec.structs.replace(plan_of([1]), encoder_inputs=()), max_tokens=0)
    assert not len(rows.lens_of(np.array([1, 1])))


@pytest.mark.req("KVM-11")
def test_rows_attend_to_as_many_tokens_as_their_item_says() -> None:
    rows, taken = take(plan_of([3, 1], num_tokens=41))
    assert [each.row for each in taken] == [3, 1]
    assert rows.lens_of(np.array([1, 1, 3])).tolist() == [41, 41, 41]


def test_samples_are_padded_with_silence() -> None:
    data = SAMPLES[:5].copy()
    data[1:3] = np.nan, np.inf
    raw = data.view(np.uint8)
    loud = np.float32([1e38, -1e10, 2**31, -3.5, -(2.0**31)]).view(np.uint8)
    for given, wanted in (
        (loud, [2**31, -(2**31), 2**31, -3.5, -(2**31), 0]),  # back to integers' scale
        (raw, [data[0], 0, 0, data[3], data[4], 0]),
        (raw[:19], [data[0], 0, 0, data[3], 0, 0]),  # no whole number of samples
        (raw[:0], [0] * 6),
        (np.resize(raw[:4], 8 * MAX_SAMPLES), [data[0]] * 6),
    ):
        _, (taken,) = take(with_items(plan_of([1]), data=given))
        assert taken.samples.shape == (MAX_SAMPLES,)
        np.testing.assert_array_equal(taken.samples[:6].numpy(), np.float32(wanted))


def test_blocks_of_the_encoders_tokens_follow_no_positions() -> None:
    """A rewind does not affect them, they do not limit the row's length, and a step has no slots in
    them."""
    held = tables()
    held.add_row(1, [int32_array([5]), int32_array([2, 9, 4])])
    held.append_rows(0, np.array([1]), int32_array([6]))
    held.truncate_row(1, 0)
    assert [ids.tolist() for ids in held.allocated(1)] == [[], [2, 9, 4]]
    held.append_rows(0, np.array([1]), int32_array([7]))
    assert held.capacity().tolist() == [0, BLOCK_SIZE, 0, 0]
    own, cross = held.slots(np.ones(2, np.int64), np.array([0, 3]))
    assert own.tolist() == [7 * BLOCK_SIZE, 7 * BLOCK_SIZE + 3]
    assert not len(cross)
    with pytest.raises(PlanMismatch, match="the longest request needs 7"):
        held.add_row(2, [int32_array([5]), int32_array(list(range(10, 18)))])
