"""An internal error of the engine writes the record and says how to repeat it."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.process.engine_loop import Engine
from longshore.scheduler.recorder.replay import Replay
from longshore.scheduler.step.planner import StepPlanner
from tests.harness.tokens import prompt_of
from tests.scheduler.recorder.recorded_runs import recorded_driver


def test_an_internal_error_writes_the_record_and_logs_how_to_replay_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    driver, recorder = recorded_driver(path)
    engine: Any = object.__new__(Engine)
    engine._scheduler, engine._recorder = driver.scheduler, recorder
    engine._epoch, engine._stopping = 1, asyncio.Event()
    plan_step = StepPlanner.plan_step

    def fail_with_two(planner: StepPlanner, now: float) -> SchedulerOutput | None:
        if any(request.request_id == "two" for request in planner.waiting):
            raise ZeroDivisionError
        return plan_step(planner, now)

    monkeypatch.setattr(StepPlanner, "plan_step", fail_with_two)
    driver.add("one", prompt_of(5))
    driver.step()
    driver.add("two", prompt_of(6))
    with caplog.at_level(logging.ERROR):
        engine._guarded(lambda: driver.scheduler.schedule(driver.now))()
    assert f"longshore replay {path}" in caplog.text
    result = Replay(path).run()  # before the recorder is closed
    assert result.is_equal
    assert result.raised == "ZeroDivisionError"
    recorder.close()
