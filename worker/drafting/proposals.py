"""The drafts of all rows: how many each gets, and what the drafter learns of each step.

A draft pays if it is accepted more often than it costs. Its price is its share of the step's time,
from the measured times of steps with more and with fewer tokens; how often a row's drafts are
accepted, the row itself shows. Drafts change no token, so that both may depend on time.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.drafting.drafter import Drafter

logger = logging.getLogger(__name__)

_GivenT = TypeVar("_GivenT")
_ResultT = TypeVar("_ResultT")

MEMORY: Final = 0.9
"""What a row's acceptance, and the times of steps, keep of their value with each new one."""

FIRST_ACCEPTANCE: Final = 0.7
"""Of a row that has had no drafts."""

MAX_PAUSE: Final = 64
"""Steps for which a row whose drafts are always wrong gets none."""

MIN_SPREAD: Final = 0.02
"""Relative to the mean number of tokens: steps that differ less do not show what a token costs."""


@dataclass(slots=True)
class StepCosts:
    """A line through the times of decode steps by their number of tokens, with least squares in
    which earlier steps count less and less; and the time of a drafter with weights, per draft of
    all rows."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    _drafting_s: float = 0.0

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step of decodes and drafts, at least one, has taken so long, without the drafter."""
        values = (1.0, num_tokens, num_tokens**2, seconds, num_tokens * seconds)
        self._sums = [MEMORY * old + new for old, new in zip(self._sums, values, strict=True)]

    def drafted(self, num_drafts: int, seconds: float) -> None:
        """A drafter with weights has taken so long for so many drafts of each row, at least one."""
        new = seconds / num_drafts
        kept = MEMORY if self._drafting_s else 0.0
        self._drafting_s = kept * self._drafting_s + (1 - kept) * new

    def price(self, num_outputs: float, num_rows: int) -> float:
        """The time of one more draft of a row, relative to the time per output token of a step with
        `num_rows` rows that gives `num_outputs` of them; 0 while it is unknown."""
        weight, tokens, squares, seconds, products = self._sums
        if not weight or seconds <= 0:
            return 0.0
        mean = tokens / weight
        variance = squares / weight - mean**2
        slope = 0.0
        if variance >= (MIN_SPREAD * mean) ** 2:
            slope = max(0.0, (products / weight - mean * seconds / weight) / variance)
        return (slope + self._drafting_s / num_rows) * num_outputs / (seconds / weight)


@dataclass(slots=True)
class _Row:
    """acceptance: of its drafts, the probability of one whose predecessors are right.
    pause: steps without drafts from now on; num_misses: steps in a row that accepted none.
    wanted: the limit of the next drafts, if it has been decided."""

    acceptance: float = FIRST_ACCEPTANCE
    pause: int = 0
    num_misses: int = 0
    wanted: int | None = None

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A step has verified so many drafts."""
        if not num_drafts:
            return
        num_tried = min(num_accepted + 1, num_drafts)  # those after a wrong one say nothing
        kept = MEMORY**num_tried
        self.acceptance = kept * self.acceptance + (1 - kept) * num_accepted / num_tried
        if num_accepted:
            self.num_misses = 0
        else:
            self.num_misses += 1
            self.pause = min(2**self.num_misses - 1, MAX_PAUSE)

    def limit(self, max_drafts: int, price: float) -> int:
        """How many drafts pay: the last is right if all before it are."""
        if self.pause:
            self.pause -= 1
            return 0
        if price <= 0 or self.acceptance >= 1:
            return max_drafts
        if self.acceptance <= price:
            return 0 if price >= 1 else 1
        return min(max_drafts, max(1, int(np.log(price) / np.log(self.acceptance))))


@dataclass(frozen=True)
class SampledTokens:
    """What a step has sampled, by ascending row. num_drafts, num_tokens: (n,), the drafts that each
    row verified, and its valid tokens, concatenated in `token_ids`."""

    rows: Int64Array
    num_drafts: Int64Array
    num_tokens: Int64Array
    token_ids: Int32Array


class Proposals:
    """The drafts that a rank proposes. All calls are on the thread that answers steps, in the order
    of the plans.

    An error of the drafter is logged, and costs drafts: it gets no further call.
    """

    def __init__(self, drafter: Drafter, *, max_drafts: int, vocab_size: int) -> None:
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}
        self._costs = StepCosts()
        self._price = 0.0
        self._has_failed = False

    def begin(self, plan: SchedulerOutput) -> None:
        """Take the changes of rows of the plan that is being answered."""
        self._try(self._begin, plan)

    @property
    def costs(self) -> StepCosts:
        """Takes the times of steps."""
        return self._costs

    def num_wanted(self, rows: Sequence[int]) -> int:
        """Decide how many drafts these rows get at most after the step that is about to run, for a
        drafter that makes them in it. Returns the largest number. Called when the step before has
        been answered."""
        largest = 0
        for row in rows:
            wanted = self._max_drafts
            if (state := self._rows.get(row)) is not None:
                wanted = state.wanted = state.limit(self._max_drafts, self._price)
            largest = max(largest, wanted)
        return largest

    def propose(self, sampled: SampledTokens) -> tuple[Int32Array, Int32Array]:
        """The drafts for the next step, after what this one has sampled: the row of each, and its
        id."""
        proposed = self._try(self._propose, sampled)
        if not proposed:
            return EMPTY_INT32, EMPTY_INT32
        rows = [row for row, ids in proposed.items() for _ in ids]
        return int32_array(rows), int32_array([each for ids in proposed.values() for each in ids])

    def _try(self, call: Callable[[_GivenT], _ResultT], given: _GivenT) -> _ResultT | None:
        if self._has_failed:
            return None
        try:
            return call(given)
        except Exception:
            self._has_failed = True
            name = type(self._drafter).__name__
            logger.exception("the drafter %s has failed; there are no drafts from now on", name)
            return None

    def _begin(self, plan: SchedulerOutput) -> None:
        for rows, is_finished in ((plan.finished_rows, True), (plan.preempted_rows, False)):
            for row in rows.tolist():
                if self._rows.pop(row, None) is not None:
                    self._drafter.end(row, is_finished=is_finished)
        for rewind in plan.rewound:
            if rewind.row in self._rows:
                self._drafter.rewind(rewind.row, rewind.num_known_tokens)
        for start in plan.added:
            if start.pooling is None:
                known = np.concatenate((start.prompt_token_ids, start.output_token_ids))
                self._rows[start.row] = _Row()
                self._drafter.start(start.row, known, len(start.prompt_token_ids))

    def _propose(self, sampled: SampledTokens) -> dict[int, list[int]]:
        """The drafts of each row."""
        if len(sampled.rows):
            self._price = self._costs.price(len(sampled.token_ids), len(sampled.rows))
        proposed: dict[int, list[int]] = {}
        ends = np.cumsum(sampled.num_tokens).tolist()
        columns = (sampled.rows, sampled.num_drafts, sampled.num_tokens)
        lists = (column.tolist() for column in columns)
        for row, num_drafts, num_tokens, end in zip(*lists, ends, strict=True):
            state = self._rows.get(row)
            if state is None:
                continue
            self._drafter.append(row, sampled.token_ids[end - num_tokens : end].tolist())
            state.verified(num_drafts, num_tokens - 1)
            limit, state.wanted = state.wanted, None
            if limit is None:
                limit = state.limit(self._max_drafts, self._price)
            if limit:
                proposed[row] = ids = list(self._drafter.propose(row, limit))[:limit]
                if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                    raise ValueError(f"drafts {ids} are not in 0..{self._vocab_size - 1}")
        return proposed
