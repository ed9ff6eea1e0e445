"""When processes that have died are started again, and when not any more."""

import math
from dataclasses import dataclass
from typing import Final

from longshore.deploy.supervisor.restart_history import RestartReason

FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0

STABLE_S: Final = 60.0
"""Processes that ran for so long begin anew: their next death is the first one."""


@dataclass
class Restarts:
    """The restarts of one group of processes.

    max_in_a_row: restarts without STABLE_S of running between them.
    max_delay_s:  before a restart.
    num_in_a_row: restarts so far since the group was stable.
    running_since_s: when the group was last ready; None while it is not.
    next_start_s: when it is started again; None while it runs.
    deadline_s:   when it must be ready.
    stop_deadline_s: when it must have ended, for an ordered restart; None: no such restart has
                  begun.
    reason: of the last restart.
    """

    max_in_a_row: int
    num_in_a_row: int = 0
    running_since_s: float | None = 0.0
    next_start_s: float | None = None
    deadline_s: float = math.inf
    stop_deadline_s: float | None = None
    reason: RestartReason = "death"
    max_delay_s: float = MAX_DELAY_S

    def died(
        self, now_s: float, reason: RestartReason = "death", *, has_remedy: bool = False
    ) -> bool:
        """The group has died. Returns whether it is to be started again, at `next_start_s`: the
        first time at once, then after growing delays.

        has_remedy: it will not die of the same again. It is started at once, and this is no death
                    in a row.
        """
        if self.running_since_s is not None and now_s - self.running_since_s >= STABLE_S:
            self.num_in_a_row = 0
        self.running_since_s, self.reason = None, reason
        if has_remedy and self.max_in_a_row:
            self.next_start_s = now_s
            return True
        if self.num_in_a_row >= self.max_in_a_row:
            return False
        delay_s = 0.0
        if self.num_in_a_row:
            delay_s = min(FIRST_DELAY_S * 2.0 ** min(self.num_in_a_row - 1, 20), self.max_delay_s)
        self.num_in_a_row += 1
        self.next_start_s = now_s + delay_s
        return True

    def stopping(self, *, deadline_s: float) -> None:
        """An operator restarts its processes, which were told to end. The row of deaths is over."""
        self.running_since_s, self.stop_deadline_s = None, deadline_s
        self.num_in_a_row, self.reason = 0, "operator"

    def stopped(self, now_s: float) -> None:
        """They have ended."""
        self.stop_deadline_s, self.next_start_s = None, now_s

    def started(self, *, deadline_s: float) -> None:
        """Its processes have been started, and must be ready at the deadline."""
        self.next_start_s, self.deadline_s = None, deadline_s

    def became_ready(self, now_s: float) -> None:
        """All of its processes are ready."""
        self.running_since_s, self.deadline_s = now_s, math.inf

    @property
    def due_s(self) -> float:
        """When something is to be done, if no process reports before."""
        return self.deadline_s if self.next_start_s is None else self.next_start_s
