"""The digest that chains each plan to all previous plans."""

from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.handshake import ToWorker
from longshore.protocol.plan import (
    AppendedBlocks,
    Rewind,
    RowStart,
    SchedulerOutput,
    digest_changes,
    plan_digest,
)
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from tests.protocol.messages import as_received, plans

replace = msgspec.structs.replace
START = RowStart(
    row=1,
    generation=2,
    request_id="r",
    num_computed_tokens=0,
    last_computed=9,
    prompt_token_ids=int32_array([1, 2, 3]),
    block_ids=(int32_array([4, 5]),),
    sampling=SamplingParams(),
    output_token_ids=int32_array([6]),
)
CHANGES: dict[str, Any] = {
    "finished_rows": int32_array([1, 2]),
    "preempted_rows": int32_array([3]),
    "rewound": (Rewind(4, 5, 9),),
    "added": (START,),
    "appended": (AppendedBlocks(0, int32_array([6]), int32_array([7])),),
    "scheduled_rows": int32_array([8, 9]),
    "scheduled_tokens": int32_array([1, 2]),
    "copy_source_ids": int32_array([10, 11]),
    "copy_target_ids": int32_array([12, 13]),
    "copy_num_tokens": int32_array([3, 4]),
}


@pytest.mark.parametrize(
    "changed",
    [
        {"finished_rows": int32_array([1])},
        {"finished_rows": int32_array([1, 2, 3]), "preempted_rows": EMPTY_INT32},
        {"preempted_rows": int32_array([4])},
        {"rewound": ()},
        {"rewound": (Rewind(3, 5, 9),)},
        {"rewound": (Rewind(4, 6, 9),)},
        {"rewound": (Rewind(4, 5, 8),)},
        {"added": ()},
        {"added": (START, START)},
        {"added": (replace(START, row=2),)},
        {"added": (replace(START, generation=3),)},
        {"added": (replace(START, num_computed_tokens=1),)},
        {"added": (replace(START, last_computed=8),)},
        {"added": (replace(START, request_id="s"),)},
        {"added": (replace(START, resumed=True),)},
        {"added": (replace(START, sampling=SamplingParams(seed=1)),)},
        {
            "added": (
                replace(
                    START,
                    prompt_token_ids=int32_array([1, 2]),
                    output_token_ids=int32_array([3, 6]),
                ),
            )
        },
        {"added": (replace(START, block_ids=(int32_array([4]), int32_array([5]))),)},
        {"appended": (AppendedBlocks(1, int32_array([6]), int32_array([7])),)},
        {"appended": (AppendedBlocks(0, int32_array([7]), int32_array([6])),)},
        {"scheduled_rows": int32_array([8, 9, 1]), "scheduled_tokens": int32_array([2])},
        {"scheduled_tokens": int32_array([2, 1])},
        {"copy_source_ids": int32_array([11, 10])},
        {"copy_source_ids": EMPTY_INT32},
        {"copy_target_ids": int32_array([12, 14])},
        {"copy_num_tokens": int32_array([3, 5])},
        {"copy_source_ids": int32_array([10]), "copy_target_ids": int32_array([11, 12, 13])},
    ],
)
def test_different_changes_have_different_digests(changed: dict[str, Any]) -> None:
    assert digest_changes(0, **CHANGES) != digest_changes(0, **(CHANGES | changed))


def test_a_digest_depends_on_all_previous_plans() -> None:
    assert digest_changes(0, **CHANGES) == digest_changes(0, **CHANGES)
    assert digest_changes(1, **CHANGES) != digest_changes(2, **CHANGES)
    assert digest_changes(1) != digest_changes(2)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plans)
def test_a_plan_has_the_same_digest_on_both_sides_of_the_wire(plan: SchedulerOutput) -> None:
    frames = as_received(Encoder[ToWorker]().encode(plan))
    received = Decoder[ToWorker](ToWorker).decode(frames)
    assert isinstance(received, SchedulerOutput)
    assert plan_digest(7, received) == plan_digest(7, plan)


def test_a_default_array_and_its_copy_have_the_same_digest() -> None:
    start = replace(START, output_token_ids=EMPTY_INT32)
    assert digest_changes(0, added=(start,)) == digest_changes(0, added=(deepcopy(start),))


def test_known_tokens_are_the_prompt_and_the_emitted_output() -> None:
    assert START.num_known_tokens == 4
    assert replace(START, output_token_ids=EMPTY_INT32).num_known_tokens == 3


def test_a_steady_step_is_a_message_of_a_few_hundred_bytes_for_a_thousand_requests() -> None:
    rows = np.arange(0, 1000, 16, dtype=np.int32)  # rows that need a new block
    plan = SchedulerOutput(
        1, 1001, 1000, 1000, 1000, 2**32 - 1, appended=(AppendedBlocks(0, rows, rows + 5000),)
    )
    assert sum(map(len, as_received(Encoder[ToWorker]().encode(plan)))) < 700
