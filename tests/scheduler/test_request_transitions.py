"""The table of a request's status changes: complete, without dead ends, the only way to change."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import longshore.scheduler
from longshore.protocol.outputs import FinishReason
from longshore.scheduler.request import (
    FINISHED_STATUS,
    TRANSITIONS,
    Change,
    IllegalTransition,
    RequestChange,
    RequestStatus,
)
from tests.scheduler.test_request import make_request

CHANGES: list[Change] = [*RequestChange, *FinishReason]
LIVE = [status for status in RequestStatus if not status.is_finished]


def targets(status: RequestStatus) -> set[RequestStatus]:
    """Statuses one change away."""
    return {to for (source, _), to in TRANSITIONS.items() if source is status}


def reachable(start: RequestStatus) -> set[RequestStatus]:
    """Statuses any number of changes away."""
    found, new = {start}, {start}
    while new:
        new = {to for status in new for to in targets(status)} - found
        found |= new
    return found


@pytest.mark.req("REQ-09")
def test_every_status_can_be_reached_and_only_ends_are_final() -> None:
    assert reachable(RequestStatus.WAITING) == set(RequestStatus)
    assert {status for status in RequestStatus if not targets(status)} == {
        status for status in RequestStatus if status.is_finished
    }


@pytest.mark.req("REQ-10")
def test_every_live_request_can_end_for_every_reason() -> None:
    assert set(FINISHED_STATUS) == set(FinishReason)
    for status in LIVE:
        assert set(FINISHED_STATUS.values()) <= reachable(status)
        if status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            for reason, finished in FINISHED_STATUS.items():
                assert TRANSITIONS[status, reason] is finished


def test_a_load_is_abandoned_before_its_request_ends() -> None:
    loading = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert {change for status, change in TRANSITIONS if status is loading} == {
        RequestChange.LOAD_OVER
    }


def test_only_an_admission_leads_onto_a_row_and_only_a_row_can_be_preempted() -> None:
    running, preempted = RequestStatus.RUNNING, RequestStatus.PREEMPTED
    admitted = {change for (_, change), to in TRANSITIONS.items() if to is running}
    assert admitted == {RequestChange.ADMITTED}
    assert {source for (source, _), to in TRANSITIONS.items() if to is preempted} == {running}


@given(st.lists(st.sampled_from(CHANGES), max_size=30))
def test_a_request_takes_the_changes_that_are_listed_and_no_other(changes: list[Change]) -> None:
    request = make_request()
    for change in changes:
        before = request.status
        expected = TRANSITIONS.get((before, change))
        if expected is None:
            with pytest.raises(IllegalTransition, match=f"is {before.name}, .* {change.name}"):
                request.change(change)
            assert request.status is before
        else:
            request.change(change)
            assert request.status is expected


def test_nothing_but_the_table_sets_a_status() -> None:
    (folder,) = longshore.scheduler.__path__
    writers = [
        f"{path.name}:{node.lineno}"
        for path in Path(folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for one in ast.walk(target)
        if isinstance(one, ast.Attribute) and one.attr == "status"
    ]
    assert len(writers) == 1, writers
    assert writers[0].startswith("request.py:")
