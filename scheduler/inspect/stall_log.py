"""Warnings for operators when no request of an engine advances."""

import logging
from typing import Final

from longshore.protocol.logs.records import fields
from longshore.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STALL_S: Final = 10.0
MAX_STALL_LINES: Final = 10


class StallLog:
    """Logs what the waiting requests wait for, at growing intervals."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._next_stall_s = STALL_S

    def check(self, now: float, engine_id: str) -> None:
        """Warn if it is time to."""
        idle_s = self._scheduler.idle_s(now)
        if idle_s < self._next_stall_s:
            if idle_s < STALL_S:
                self._next_stall_s = STALL_S
            return
        self._next_stall_s *= 2
        report = self._scheduler.make_report(now, engine_id)
        logger.warning(
            "stalled: no request has advanced for %.0f s; %d run, %d wait, %d plans are unanswered",
            idle_s,
            report.num_running,
            report.num_waiting,
            report.steps_in_flight,
            extra=fields(step_id=self._scheduler.num_steps, idle_s=idle_s),
        )
        for waiting in report.waiting[:MAX_STALL_LINES]:
            about = fields(request_id=waiting.request_id, waited_s=waiting.waited_s)
            logger.warning("request waits for %s", waiting.waits_for, extra=about)
