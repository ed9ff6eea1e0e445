"""Plans that have not been answered: who is to sample in each, and what a late token means.

A plan remembers the (row, generation) pairs that sample in it. When the answer comes, a pair that
still matches gets its token. One that does not match belongs to a request that left its row: if it
was preempted its token is delivered all the same, if it has ended the token is dropped.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.scheduler.request import Request
from longshore.scheduler.step.sampling_rows import SamplingRows

if TYPE_CHECKING:  # it knows plans in flight
    from longshore.scheduler.features.logprobs import ScoredRows


@dataclass(slots=True)
class PlannedStep:
    """A plan on its way; nothing of it is ever changed.

    sampling:   rows that sample in it, and who held them then.
    num_drafts: drafts verified per row; None if there are none.
    drafts:     their ids, one row after the other; -1 for those that only the worker knows.
    is_masked:  rows whose token a grammar restricts; None if there are none.
    loads:      generations that began with tokens loaded within this step.
    scored:     rows that are to be scored; None if nobody that runs asks for log probabilities.
    """

    step: int
    sampling: SamplingRows
    num_drafts: Int64Array | None = None
    drafts: Int32Array | None = None
    is_masked: BoolArray | None = None
    loads: tuple[int, ...] = ()
    scored: "ScoredRows | None" = None

    @property
    def rows(self) -> Int64Array:
        """Of `sampling`."""
        return self.sampling.rows

    @property
    def generations(self) -> Int64Array:
        """Of `sampling`."""
        return self.sampling.generations

    def draft_token_ids(self, index: int) -> list[int]:
        """Drafts of the row at `index` of `rows`."""
        if self.num_drafts is None or self.drafts is None:
            return []
        end = int(self.num_drafts[: index + 1].sum())
        ids: list[int] = self.drafts[end - int(self.num_drafts[index]) : end].tolist()
        return ids


@dataclass(slots=True)
class PastOccupant:
    """A request that left its row while plans that may compute on it were unanswered.

    last_step: the newest of them.
    tables, num_hit_tokens: what it held, and how much of that others had computed.
    void_through: tokens of plans up to this one mean nothing.
    """

    request: Request
    last_step: int
    tables: tuple[Int32Array, ...]
    num_hit_tokens: int
    void_through: int


class StepsInFlight:
    """The unanswered plans, oldest first, and the requests that left their rows under them."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()
        self._past_occupants: dict[int, PastOccupant] = {}
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
        if self._past_occupants:
            for generation, departure in list(self._past_occupants.items()):
                if departure.last_step <= self.last_answered_step:
                    del self._past_occupants[generation]

    def note_vacated(
        self,
        request: Request,
        generation: int,
        *,
        tables: tuple[Int32Array, ...],
        expects_tokens: bool,
        void_through: int,
    ) -> None:
        """A request leaves its row. If tokens are still to come that mean something, it is not
        admitted again before they have."""
        if not self._steps:
            return
        if expects_tokens and void_through < self.newest_step:
            request.resume_after_step = self.newest_step
        self._past_occupants[generation] = PastOccupant(
            request, self.newest_step, tables, request.num_hit_tokens, void_through
        )

    def past_occupant(self, generation: int) -> PastOccupant:
        """Who held a row under this generation when an unanswered plan was made."""
        return self._past_occupants[generation]

    def past_occupants(self) -> list[tuple[int, PastOccupant]]:
        """(generation, who left) for all that left their rows under unanswered plans."""
        return list(self._past_occupants.items())

    def void_past_occupants(self, request: Request | None = None) -> None:
        """Tokens still to come for requests that left their rows (or for this one) mean nothing."""
        for left in self._past_occupants.values():
            if request is None or left.request is request:
                left.void_through = left.last_step

    def reset(self) -> None:
        """The workers are gone; no answer will come."""
        self._steps.clear()
        self._past_occupants.clear()
        self.last_answered_step = 0
