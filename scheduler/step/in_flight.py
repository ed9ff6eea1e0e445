"""Unanswered plans: which requests sample in each, and how their tokens are treated.

A plan keeps the (row, generation) pairs that sample in it. When its output arrives, a pair that
still matches gets its token. A pair that does not match belongs to a past occupant of the row: if
that request was preempted, its token is delivered anyway; if it has ended, the token is dropped.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, Int64Array
from longshore.scheduler.features.logprobs import ScoredRows
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.request import Request
from longshore.scheduler.step.running import Occupant, RunningTable


class SamplingRows:
    """The sampling rows of a plan, with all that is needed to deliver their tokens.

    In steady decode the same rows sample in every step, so many plans share one object.

    rows:        (n,) ascending; `index` selects the same rows, by a slice if possible.
    generations: (n,) generations of their occupants.
    version:     of the table; while it is unchanged, the occupants and all else are too.
    is_plain:    no row `is_special`: each row gets one token and nothing else.
    clients, handles: (n,) where their tokens go; `client` if all have the same client, else None.
    """

    def __init__(self, running: RunningTable, rows: Int64Array) -> None:
        num_rows = len(rows)
        self.rows = rows
        self.index: Int64Array | slice = rows
        if num_rows and rows[-1] == num_rows - 1:
            self.index = slice(0, num_rows)
        self.generations: Int64Array = running.generation[rows]
        self.version = running.version
        self.is_plain = not np.count_nonzero(running.is_special[rows])
        self.handles: Int32Array = running.handle[rows].astype(np.int32)
        self.clients: Int64Array = running.client[rows]
        is_one_client = num_rows and np.count_nonzero(self.clients == self.clients[0]) == num_rows
        self.client = int(self.clients[0]) if is_one_client else None
        self._stop_ids = None
        if running.num_of_width:  # one line per column is compared faster
            self._stop_ids = np.ascontiguousarray(running.stop_ids[rows].T)

    def serves(self, running: RunningTable, rows: Int64Array) -> bool:
        """Whether this was made for these rows and nothing has changed since."""
        if self.version != running.version or len(self.rows) != len(rows):
            return False
        return not np.count_nonzero(self.rows != rows)

    def part(self, is_in: BoolArray) -> "SamplingRows":
        """The rows where `is_in` (n,) is set, whose occupants are still the same."""
        part = copy(self)
        part.rows = part.index = self.rows[is_in]
        part.generations = self.generations[is_in]
        part.handles, part.clients = self.handles[is_in], self.clients[is_in]
        if self._stop_ids is not None:
            part._stop_ids = self._stop_ids[:, is_in]
        return part

    def has_stop_id(self, token_ids: Int32Array) -> bool:
        """Whether any of the tokens, one per row, is a stop id of its row."""
        stop_ids = self._stop_ids
        return stop_ids is not None and bool(np.count_nonzero(stop_ids == token_ids))


@dataclass(slots=True)
class PlannedStep:
    """An unanswered plan. It does not change once it is in flight; before, features complete it.

    sampling:   rows that sample in it, and their occupants.
    num_scheduled: (max_num_seqs,) tokens that each row computes.
    num_drafts: drafts verified per row; None if there are none.
    drafts:     their ids, one row after the other; -1 for those that only the worker knows.
    is_masked:  rows whose token a grammar restricts; None if there are none.
    loads:      (row, generation) pairs that began with tokens loaded within this step.
    scored:     rows with log probabilities; None if no running request asks for them.
    """

    step: int
    sampling: SamplingRows
    num_scheduled: Int64Array
    num_drafts: Int64Array | None = None
    drafts: Int32Array | None = None
    is_masked: BoolArray | None = None
    loads: tuple[tuple[int, int], ...] = ()
    scored: ScoredRows | None = None

    @classmethod
    def of(
        cls,
        running: RunningTable,
        step: int,
        sampling: SamplingRows,
        num_scheduled: Int64Array,
        loads: tuple[tuple[int, int], ...],
    ) -> "PlannedStep":
        """A plan that was just built; the rows have advanced."""
        scored = ScoredRows(running, num_scheduled) if running.scored else None
        return cls(step, sampling, num_scheduled, loads=loads, scored=scored)

    def draft_token_ids(self, index: int) -> list[int]:
        """Drafts of the row at `index` of `sampling.rows`."""
        if self.num_drafts is None or self.drafts is None:
            return []
        end = int(self.num_drafts[: index + 1].sum())
        ids: list[int] = self.drafts[end - int(self.num_drafts[index]) : end].tolist()
        return ids


@dataclass(slots=True)
class PastOccupant(Occupant):
    """A request whose row was emptied while plans that may compute on it were unanswered.

    last_step: the newest of these plans.
    tables, num_hit_tokens: the blocks that it held, and how many of its tokens were prefix hits.
    state_source: see `Request`.
    """

    last_step: int
    tables: tuple[Int32Array, ...]
    num_hit_tokens: int
    state_source: tuple[int, int] | None


class StepsInFlight:
    """The unanswered plans and the past occupants of their rows. steps: oldest first; a plan that
    has been built is appended."""

    def __init__(self, running: RunningTable) -> None:
        self._running = running
        self.steps: deque[PlannedStep] = deque()
        self._past: dict[int, PastOccupant] = {}
        self.last_answered_step = 0

    @property
    def newest_step(self) -> int:
        """The last plan built."""
        return self.steps[-1].step if self.steps else self.last_answered_step

    def answered(self) -> None:
        """The output of the oldest plan has been applied."""
        self.last_answered_step = self.steps.popleft().step
        if self._past:
            for generation, occupant in list(self._past.items()):
                if occupant.last_step <= self.last_answered_step:
                    del self._past[generation]

    def occupant(self, row: int, generation: int) -> Occupant:
        """The request that held the row under this generation when an unanswered plan was built."""
        if self._running.generation[row] == generation:
            return self._running.occupant(row)
        return self._past[generation]

    def past_occupants(self) -> list[tuple[int, PastOccupant]]:
        """(generation, occupant) for all rows that were emptied under unanswered plans."""
        return list(self._past.items())

    def note_vacated(
        self, requests: Sequence[Request], blocks: Sequence[HeldBlocks], *, is_void: bool
    ) -> None:
        """The rows of these requests, with these blocks, are about to be emptied. A request that
        still expects tokens which are not void is not admitted again before they have arrived.
        is_void: all of them are void, because the requests or their outputs end."""
        running, newest_step = self._running, self.steps[-1].step
        rows = [request.row for request in requests]
        columns = zip(
            requests,
            blocks,
            running.generation[rows].tolist(),
            running.num_placeholders[rows].tolist(),
            running.void_through[rows].tolist(),
            strict=True,
        )
        for request, held, generation, num_expected, rewound_at in columns:
            void_through = newest_step if is_void else rewound_at
            if num_expected > 0 and void_through < newest_step:
                request.resume_after_step = newest_step
            self._past[generation] = PastOccupant(
                request,
                void_through,
                newest_step,
                held.block_ids,
                request.num_hit_tokens,
                request.state_source,
            )

    def void_past_occupants(self, request: Request | None = None) -> None:
        """Make the tokens that past occupants (or this one) still expect void."""
        for occupant in self._past.values():
            if request is None or occupant.request is request:
                occupant.void_through = occupant.last_step

    def reset(self) -> None:
        """The workers are gone; no output will arrive."""
        self.steps.clear()
        self._past.clear()
        self.last_answered_step = 0
