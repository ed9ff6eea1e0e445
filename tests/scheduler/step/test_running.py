"""The columns of running requests."""

import numpy as np
import pytest

from longshore.protocol.arrays import int32_array
from longshore.scheduler.request import Request, RequestChange, RequestStatus
from longshore.scheduler.step.running import NO_STOP_ID, RunningTable
from tests.scheduler.test_request import make_request


def admit(running: RunningTable, request: Request, num_computed: int = 0) -> int:
    if request.status is RequestStatus.RUNNING:  # it was preempted since
        request.change(RequestChange.PREEMPTED)
    return running.admit(request, num_computed, (int32_array([1, 2]),)).row


def test_rows_are_reused_lowest_first_and_order_is_that_of_admission() -> None:
    running = RunningTable(3, 64)
    requests = [make_request(name) for name in "abc"]
    assert [admit(running, request) for request in requests] == [0, 1, 2]
    assert running.num_rows == 3
    running.release([requests[0]])
    running.release([requests[1]])
    assert running.next_row == 0
    late = make_request("d")
    assert admit(running, late) == 0
    assert running.order.tolist() == [2, 0]
    assert [request.request_id for request in running.requests_in_order()] == ["c", "d"]
    assert int(running.generation[0]) == 4


def test_each_admission_gets_a_greater_generation_even_of_the_same_request() -> None:
    running = RunningTable(2, 64)
    request = make_request()
    generations = []
    for _ in range(3):
        row = admit(running, request)
        generations.append(int(running.generation[row]))
        running.release([request])
    assert generations == [1, 2, 3]
    assert running.num_rows == 0


def test_what_the_workers_are_told_is_the_whole_request() -> None:
    running = RunningTable(2, 64)
    request = make_request(prompt=5, outputs=2, sampling={"max_tokens": 4, "top_k": 3})
    request.is_resumed = True
    start = running.admit(request, 4, (int32_array([7, 8]),))
    assert start.prompt_token_ids.tolist() == [0, 1, 2, 3, 4]
    assert start.output_token_ids.tolist() == [50, 51]
    assert start.block_ids[0].tolist() == [7, 8]
    assert (start.num_computed_tokens, start.last_computed) == (4, 8)
    assert (start.sampling, start.resumed) == (request.sampling, True)
    assert request.status is RequestStatus.RUNNING
    assert request.row == start.row


def test_a_request_takes_its_tokens_along_when_it_leaves() -> None:
    running = RunningTable(2, 64)
    request = make_request(prompt=3)
    row = admit(running, request)
    running.append_tokens(np.array([row]), np.array([9], np.int32))
    running.release([request])
    assert request.token_ids.tolist() == [0, 1, 2, 9]
    other = make_request("other", prompt=2)
    assert admit(running, other) == row
    assert running.tokens_of(row).tolist() == [0, 1]
    assert request.token_ids.tolist() == [0, 1, 2, 9]
    assert int(running.num_placeholders[row]) == 0


def test_stop_ids_are_as_wide_as_the_longest_list_and_cleared_for_the_next_occupant() -> None:
    running = RunningTable(2, 64)
    many = make_request("many", sampling={"stop_token_ids": (5, 6, 7)})
    few = make_request("few", sampling={"ignore_eos": True})
    assert admit(running, few) == 0
    assert admit(running, many) == 1
    assert running.stop_ids[1].tolist() == [5, 6, 7, 2]
    assert running.stop_ids[0].tolist() == [NO_STOP_ID] * 4
    running.release([many])
    assert admit(running, make_request("plain")) == 1
    assert running.stop_ids.tolist() == [[NO_STOP_ID], [2]]


@pytest.mark.parametrize(
    ("token", "sampling", "ends"),
    [
        (9, {"max_tokens": 1}, True),
        (9, {"max_tokens": 2}, False),
        (2, {"max_tokens": 5}, True),
        (2, {"max_tokens": 5, "ignore_eos": True}, False),
        (8, {"max_tokens": 5, "stop_token_ids": (8,)}, True),
        (8, {"max_tokens": 5, "stop_token_ids": (8,), "min_tokens": 2}, False),
        (8, {"max_tokens": 1, "stop_token_ids": (8,), "min_tokens": 1}, True),
    ],
)
def test_a_token_ends_a_request_by_limit_or_by_stop_id(
    token: int, sampling: dict[str, object], ends: bool
) -> None:
    running = RunningTable(2, 64)
    row = admit(running, make_request(sampling=sampling))
    rows, tokens = np.array([row]), np.array([token], np.int32)
    running.append_tokens(rows, tokens)
    assert running.stopped(rows, tokens).tolist() == ([row] if ends else [])


def test_a_full_row_is_noticed_although_it_was_not_checked_before() -> None:
    running = RunningTable(3, 64)
    for name, max_tokens in (("a", 4), ("b", 3)):
        admit(running, make_request(name, sampling={"max_tokens": max_tokens}))
    rows, tokens = np.array([0, 1]), np.array([9, 9], np.int32)
    noticed = []
    for _ in range(3):
        running.append_tokens(rows, tokens)
        noticed.append(running.fewest_left <= 0)
    assert noticed == [False, False, True]
    assert running.stopped(rows, tokens).tolist() == [1]
    running.release([running.request_on(1)])
    assert running.fewest_left > 0
    running.append_tokens(slice(0, 1), np.array([9], np.int32))
    assert running.fewest_left <= 0
    assert running.stopped(np.array([0]), np.array([9])).tolist() == [0]


def test_requests_that_end_together_end_in_admission_order() -> None:
    running = RunningTable(3, 64)
    first, second, third = (make_request(name, sampling={"max_tokens": 1}) for name in "abc")
    for request in (first, second, third):
        admit(running, request)
    running.release([first])
    admit(running, first)  # row 0, but the youngest now
    rows, tokens = np.array([0, 1, 2]), np.array([9, 9, 9], np.int32)
    running.append_tokens(rows, tokens)
    assert running.stopped(rows, tokens).tolist() == [1, 2, 0]
