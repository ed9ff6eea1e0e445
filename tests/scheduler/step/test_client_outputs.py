"""Columns per client."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.outputs import EngineOutputs, FinishReason
from longshore.scheduler.step.client_outputs import ClientOutputs
from tests.scheduler.test_request import make_request


def columns(outputs: EngineOutputs) -> list[tuple[int, int]]:
    return list(zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True))


def add(buckets: ClientOutputs, rows: list[tuple[int, int, int]]) -> None:
    array = np.array(rows, np.int64).reshape(-1, 3)
    buckets.add_tokens(array[:, 0], array[:, 1], array[:, 2].astype(np.int32))


@pytest.mark.req("SYS-06")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 99)), max_size=8),
        max_size=4,
    )
)
def test_each_client_gets_one_message_with_its_own_tokens_in_order(
    steps: list[list[tuple[int, int, int]]],
) -> None:
    buckets = ClientOutputs()
    for rows in steps:
        add(buckets, rows)
    taken = buckets.take()
    clients = [client for client, _ in taken]
    assert len(clients) == len(set(clients))
    everything = [row for rows in steps for row in rows]
    assert set(clients) == {client for client, _, _ in everything}
    for client, outputs in taken:
        assert columns(outputs) == [(h, t) for c, h, t in everything if c == client]
        assert outputs.handles.dtype == outputs.tokens.dtype == np.int32
    assert buckets.take() == []


@pytest.mark.req("SYS-06")
def test_an_end_goes_to_its_client_and_says_everything_once() -> None:
    buckets = ClientOutputs()
    request = make_request(prompt=5, outputs=3)
    request.num_cached_tokens, request.num_preemptions = 4, 1
    add(buckets, [(3, 7, 50), (4, 1, 60)])
    request.stop_reason = 50
    buckets.add_finish(request, FinishReason.STOPPED)
    taken = dict(buckets.take())
    assert set(taken) == {3, 4}
    assert taken[4].finished == ()
    (end,) = taken[3].finished
    assert (end.handle, end.reason, end.stop_token_id) == (7, FinishReason.STOPPED, 50)
    assert (end.num_output_tokens, end.num_cached_tokens, end.num_preemptions) == (3, 4, 1)


def test_a_request_that_never_ran_reports_no_cached_tokens() -> None:
    buckets = ClientOutputs()
    buckets.add_finish(make_request(), FinishReason.ABORTED)
    assert buckets.take()[0][1].finished[0].num_cached_tokens == 0


def test_a_rejection_carries_its_text() -> None:
    buckets = ClientOutputs()
    buckets.add_rejection(1, 9, FinishReason.IGNORED, "too long", 2)
    ((client, outputs),) = buckets.take()
    (end,) = outputs.finished
    assert (client, end.handle, end.reason) == (1, 9, FinishReason.IGNORED)
    assert (end.message, end.num_output_tokens) == ("too long", 2)
