"""Connectors that were written for version 1 of the contract.

There, `StepView.cached` had the blocks that a plan computes, and a connector held them until the
plan was answered. Now it has blocks of answered plans, so that such a connector stores them some
steps later than one of version 2.
"""

from collections.abc import Sequence
from functools import wraps

import msgspec

from longshore.connectors.base import (
    AdmittedRequest,
    SchedulerConnector,
    StepView,
    StorableBlocks,
)


class FormerStepView(msgspec.Struct, frozen=True):
    """`StepView` of version 1. cached: hold these blocks, and do not store them before `step` is
    answered, or if a later plan lists them in `uncached`."""

    step: int
    answered_step: int
    admitted: Sequence[AdmittedRequest] = ()
    uncached: Sequence[int] = ()
    cached: Sequence[StorableBlocks] = ()
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()


def adapt(connector: SchedulerConnector) -> None:
    """Have a connector of version 1 called as it expects."""
    build = connector.build_connector_meta
    views = _FormerViews()

    @wraps(build)
    def build_connector_meta(step: StepView) -> bytes:
        return build(views.of(step))  # type: ignore[arg-type]  # it expects the former view

    connector.build_connector_meta = build_connector_meta  # type: ignore[method-assign]


class _FormerViews:
    """Leaves out blocks that a request computed before its last admission: a connector that keeps
    block tables would take them for blocks of the new one."""

    def __init__(self) -> None:
        self._first_steps: dict[str, int] = {}  # of requests that have a row

    def of(self, step: StepView) -> FormerStepView:
        if step.step == 1:  # a new epoch
            self._first_steps.clear()
        for request_id in (*step.preempted, *step.finished):
            self._first_steps.pop(request_id, None)
        for admitted in step.admitted:
            self._first_steps[admitted.request_id] = step.step
        return FormerStepView(
            step=step.step,
            answered_step=step.answered_step,
            admitted=step.admitted,
            uncached=step.uncached,
            cached=[
                blocks
                for blocks in step.storable
                if blocks.step >= self._first_steps.get(blocks.request_id, 0)
            ],
            preempted=step.preempted,
            finished=step.finished,
        )
