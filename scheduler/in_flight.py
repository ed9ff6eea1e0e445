"""Plans that have not been answered: who is to sample in each, and what a late token means.

A plan remembers the (row, generation) pairs that sample in it. When the answer comes, a pair that
still matches gets its token. One that does not match belongs to a request that left its row: if it
was preempted its token is delivered all the same, if it has ended the token is dropped.
"""

from collections import deque
from dataclasses import dataclass

from longshore.protocol.arrays import Int64Array
from longshore.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan on its way. `rows`, ascending, sample in it; `generations` held them then."""

    step: int
    rows: Int64Array
    generations: Int64Array


class StepsInFlight:
    """The unanswered plans, oldest first, and the requests that left their rows under them."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()
        # generation -> (request, newest plan that may bring a token of that generation)
        self._departed: dict[int, tuple[Request, int]] = {}
        self.last_answered_step = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest_step(self) -> int:
        """The last plan built."""
        return self._steps[-1].step if self._steps else self.last_answered_step

    def add(self, planned: PlannedStep) -> None:
        """A plan has been built."""
        self._steps.append(planned)

    def oldest(self) -> PlannedStep | None:
        """The plan whose answer must come next."""
        return self._steps[0] if self._steps else None

    def answered(self) -> None:
        """The oldest plan's answer has been applied."""
        self.last_answered_step = self._steps.popleft().step
        for generation, (_, last_step) in list(self._departed.items()):
            if last_step <= self.last_answered_step:
                del self._departed[generation]

    def note_departure(self, request: Request, generation: int) -> None:
        """The request left its row with tokens still to come; it is not admitted before."""
        request.resume_after_step = self.newest_step
        self._departed[generation] = (request, self.newest_step)

    def departed_request(self, generation: int) -> Request:
        """Who held a row under this generation when an unanswered plan was made."""
        return self._departed[generation][0]
