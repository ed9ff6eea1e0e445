"""What a request knows about itself while it waits."""

from typing import Any

import numpy as np
import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.request import FINISHED_STATUS, NOT_SCHEDULED, Request, RequestStatus


def make_request(
    request_id: str = "r",
    *,
    prompt: int = 5,
    outputs: int = 0,
    max_model_len: int = 64,
    now: float = 100.0,
    sampling: dict[str, Any] | None = None,
    age_s: float = 0.0,
    **options: Any,
) -> Request:
    message = AddRequest(
        request_id,
        7,
        int32_array(range(prompt)),
        SamplingParams(**(sampling or {})),
        RequestOptions(**options),
        int32_array(range(50, 50 + outputs)),
        age_s,
    )
    return Request(
        message, client_index=3, now=now, max_model_len=max_model_len, eos_token_ids=(2,)
    )


@pytest.mark.req("REQ-09")
def test_statuses_stand_in_the_order_that_makes_finished_a_comparison() -> None:
    assert [status.name for status in RequestStatus] == [
        "WAITING",
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING_FOR_STREAMING_REQ",
        "RUNNING",
        "PREEMPTED",
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_IGNORED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ]
    assert sorted(RequestStatus) == list(RequestStatus)
    for status in RequestStatus:
        assert status.is_finished == (status > RequestStatus.PREEMPTED)
        assert status.is_finished == status.name.startswith("FINISHED")


@pytest.mark.req("REQ-10")
def test_every_finish_reason_has_its_status() -> None:
    assert {reason.name for reason in FinishReason} == {
        "STOPPED", "LENGTH_CAPPED", "ABORTED", "IGNORED", "ERROR", "REPETITION"
    }  # fmt: skip
    for reason in FinishReason:
        assert FINISHED_STATUS[reason].name == f"FINISHED_{reason.name}"


def test_a_new_request_waits_on_no_row_with_nothing_counted() -> None:
    request = make_request(priority=2, cache_salt="s", trace_headers={"a": "b"})
    assert request.status is RequestStatus.WAITING
    assert not request.is_finished
    assert (request.row, request.num_preemptions) == (-1, 0)
    assert request.num_cached_tokens == NOT_SCHEDULED == -1
    assert (request.request_id, request.client_index, request.handle) == ("r", 3, 7)
    assert (request.options.priority, request.options.cache_salt) == (2, "s")
    assert request.options.trace_headers == {"a": "b"}
    assert request.block_hashes == []


def test_numbers_of_tokens_count_outputs_of_an_earlier_life() -> None:
    request = make_request(prompt=5, outputs=3, sampling={"max_tokens": 10})
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (5, 8, 3)
    assert request.max_total_tokens == 15
    request.append_token(9)
    assert (request.num_tokens, request.num_output_tokens) == (9, 4)
    np.testing.assert_array_equal(request.token_ids, [0, 1, 2, 3, 4, 50, 51, 52, 9])
    assert request.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "limit"), [(4, 64, 9), (None, 64, 64), (100, 64, 64)]
)
def test_the_end_is_the_nearer_of_max_tokens_and_model_length(
    max_tokens: int | None, max_model_len: int, limit: int
) -> None:
    request = make_request(max_model_len=max_model_len, sampling={"max_tokens": max_tokens})
    assert request.max_total_tokens == limit


def test_stop_ids_are_those_asked_for_and_the_models_own_unless_ignored() -> None:
    assert make_request(sampling={"stop_token_ids": (8, 9)}).stop_ids == (8, 9, 2)
    ignoring = {"stop_token_ids": (8,), "ignore_eos": True}
    assert make_request(sampling=ignoring).stop_ids == (8,)


def test_arrival_is_a_duration_before_now() -> None:
    assert make_request(now=100.0, age_s=2.5).arrival_time == 97.5
