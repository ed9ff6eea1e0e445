"""The debug log lines of a worker about the requests on its rows."""

import logging
from typing import Any

import pytest

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.plan import Rewind, RowStart, SchedulerOutput
from longshore.protocol.sampling import SamplingParams
from longshore.worker.process.row_log import RowLog


def plan(step: int, **changes: Any) -> SchedulerOutput:
    return SchedulerOutput(1, step, step - 1, 1, 1, 0, **changes)


def start(row: int, request_id: str) -> RowStart:
    return RowStart(
        row=row,
        generation=1,
        request_id=request_id,
        num_computed_tokens=0,
        last_computed=9,
        prompt_token_ids=int32_array([5, 6]),
        block_ids=(EMPTY_INT32,),
        sampling=SamplingParams(),
    )


def test_begin_and_end_of_each_row_carry_request_and_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "longshore.worker.process.row_log")
    log = RowLog()
    log.log_plan(plan(1, added=(start(0, "a"), start(1, "b"))))
    log.log_plan(plan(2, rewound=(Rewind(1, 4, 2),)))
    log.log_plan(plan(3, finished_rows=int32_array([0]), added=(start(0, "c"),)))
    log.log_plan(plan(4, preempted_rows=int32_array([0])))
    told = [(vars(record)["fields"], record.getMessage()) for record in caplog.records]
    assert [(about["request_id"], about["step_id"], text) for about, text in told] == [
        ("a", 1, "started"),
        ("b", 1, "started"),
        ("b", 2, "rewound"),
        ("a", 3, "ended; the row is free"),
        ("c", 3, "started"),
        ("c", 4, "preempted; the row is free"),
    ]
