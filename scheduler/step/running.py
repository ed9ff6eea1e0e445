"""The running requests, as columns indexed by row.

A step reads and writes whole columns; a `Request` object is used only when a request starts, is
preempted or ends. The workers keep the first four columns as well (`RowTable`).
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, BoolArray, Int32Array, Int64Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.plan import Rewind, RowStart
from longshore.protocol.rows import EMPTY_ROW, RowTable
from longshore.scheduler.request import Request, RequestChange, RequestStatus

NO_STOP_ID = -1
_NEVER: Final = 1 << 62


class _Row(NamedTuple):
    """The columns of `RunningTable`, in order, with their values in an empty row.

    num_tokens:       prompt and verified output.
    num_placeholders: tokens sampled in unanswered plans, including drafts.
    num_drafts:       drafts for the next step.
    num_rejected:     drafts that answers have rejected since the last plan.
    num_verified, num_accepted: drafts that steps have verified since the request was admitted, and
                      those that were right.
    void_through:     a step; tokens of plans up to it are void, because the row was rewound.
    num_prompt:       prompt tokens.
    max_total:        the request ends when num_tokens reaches this number.
    min_total:        stop ids have no effect before num_tokens reaches this number.
    client, handle:   where its tokens go.
    """

    generation: int = EMPTY_ROW
    num_computed: int = 0
    num_known: int = 0
    last_computed: int = 0
    num_tokens: int = 0
    num_placeholders: int = 0
    num_drafts: int = 0
    num_rejected: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    void_through: int = 0
    num_prompt: int = 0
    max_total: int = _NEVER
    min_total: int = 0
    client: int = 0
    handle: int = 0


@dataclass(slots=True)
class Occupant:
    """The request that holds, or held, a row under one generation.

    void_through: a step; its tokens of plans up to it are void, because it was rewound or ended.
    """

    request: Request
    void_through: int

    def expects_output_of(self, step: int) -> bool:
        """Whether its tokens of plan `step` are applied."""
        return step > self.void_through and not self.request.is_finished


_EMPTY: Final = np.array([_Row()], np.int64).T


class RunningTable(RowTable):
    """A RowTable with the scheduler's own columns, (max_num_seqs,) int64; see `_Row`.

    drafts:      (max_num_seqs, num_speculative_tokens) int32; -1 if only the worker knows it.
    has_grammar: (max_num_seqs,) bool; a grammar restricts its tokens.
    is_special:  (max_num_seqs,) bool; see `Request`.
    stop_ids:    (max_num_seqs, width) int64, padded with NO_STOP_ID, no wider than necessary.
    token_ids:   (max_num_seqs, max_model_len) int32; memory is used only as far as it is written.
    requests:    the Request on each row, or None.
    scored:      by row, the requests that ask for log probabilities.
    version:     changes when a request is admitted, ends, is preempted or rewound.
    fewest_left: lower bound of the tokens that a row has left; at 0, `stopped` finds the rows.
    num_of_width: rows with stop ids, by how many they have.
    num_drafted_rows, num_draft_tokens, accepted_by_position: see SchedulerStats.
    withheld:    a row that gets no tokens; -1: none.

    Generations increase with every admission and define the admission order; rows have no order.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, num_speculative_tokens: int = 0
    ) -> None:
        super().__init__(max_num_seqs)
        # One array, so that one assignment fills a row, and one empties several.
        self._columns = np.repeat(_EMPTY, max_num_seqs, axis=1)
        columns = iter(self._columns)  # in the order of `_Row`
        self.generation: Int64Array = next(columns)
        self.num_computed: Int64Array = next(columns)
        self.num_known: Int64Array = next(columns)
        self.last_computed: Int64Array = next(columns)
        self.num_tokens: Int64Array = next(columns)
        self.num_placeholders: Int64Array = next(columns)
        self.num_drafts: Int64Array = next(columns)
        self.num_rejected: Int64Array = next(columns)
        self.num_verified: Int64Array = next(columns)
        self.num_accepted: Int64Array = next(columns)
        self.void_through: Int64Array = next(columns)
        self.num_prompt: Int64Array = next(columns)
        self.max_total: Int64Array = next(columns)
        self.min_total: Int64Array = next(columns)
        self.client: Int64Array = next(columns)
        self.handle: Int64Array = next(columns)
        self.drafts = np.zeros((max_num_seqs, num_speculative_tokens), np.int32)
        self.has_grammar: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.is_special: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.stop_ids = np.full((max_num_seqs, 1), NO_STOP_ID, np.int64)
        self.token_ids = np.empty((max_num_seqs, max_model_len), np.int32)
        self._token_slots: Int32Array = self.token_ids.reshape(-1)
        self._first_slot: Int64Array = np.arange(max_num_seqs) * max_model_len
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.scored: dict[int, Request] = {}
        self.version = 0
        self.fewest_left = _NEVER
        self.num_of_width: Counter[int] = Counter()
        self.num_drafted_rows = self.num_draft_tokens = 0
        self.accepted_by_position: Int64Array = np.zeros(num_speculative_tokens, np.int64)
        self.withheld = -1
        self._free_rows = list(range(max_num_seqs))
        self._last_generation = 0
        self._order: Int64Array | None = None

    @property
    def next_row(self) -> int:
        """The row of the next admission: the lowest free one."""
        return self._free_rows[0]

    @property
    def order(self) -> Int64Array:
        """Rows with a request, in admission order; recomputed only after membership changes."""
        if self._order is None:
            rows = self.generation.nonzero()[0]
            self._order = rows[self.generation[rows].argsort()]
        return self._order

    def admit(
        self, request: Request, num_computed_tokens: int, block_ids: tuple[Int32Array, ...]
    ) -> RowStart:
        """Give a waiting request `next_row`; returns what the workers need."""
        row = heapq.heappop(self._free_rows)
        self._last_generation += 1
        self.version += 1
        self._order = None
        sampling, token_ids = request.sampling, request.token_ids
        num_tokens, num_prompt = len(token_ids), request.num_prompt_tokens
        max_total = request.max_total_tokens
        values = _Row(
            generation=self._last_generation,
            num_computed=num_computed_tokens,
            num_known=num_tokens,
            last_computed=max_total - 1,
            num_tokens=num_tokens,
            num_prompt=num_prompt,
            max_total=max_total,
            min_total=min(num_prompt + sampling.min_tokens, max_total),
            client=request.client_index,
            handle=request.handle,
        )
        self._columns[:, row] = tuple(values)  # NumPy reads a NamedTuple six times slower
        self.num_rows += 1
        self.fewest_left = min(self.fewest_left, max_total - num_tokens)
        self.token_ids[row, :num_tokens] = token_ids
        if request.is_special:
            self.is_special[row] = True
            self.has_grammar[row] = request.options.structured_output is not None
        if request.is_scored:
            self.scored[row] = request
        if request.stop_ids:
            self._set_stop_ids(row, request.stop_ids)
        self.requests[row] = request
        request.row = row
        request.change(RequestChange.ADMITTED)
        resumed, request.is_resumed = request.is_resumed, False
        return RowStart(
            row=row,
            generation=self._last_generation,
            request_id=request.request_id,
            num_computed_tokens=num_computed_tokens,
            last_computed=max_total - 1,
            prompt_token_ids=token_ids[:num_prompt],
            output_token_ids=token_ids[num_prompt:] if num_tokens > num_prompt else EMPTY_INT32,
            block_ids=block_ids,
            sampling=sampling,
            resumed=resumed,
            lora=request.options.lora,
            multimodal=request.options.multimodal,
            prompt_embeds=request.options.prompt_embeds,
            pooling=request.options.pooling,
            has_structured_output=request.options.structured_output is not None,
        )

    def release(self, requests: Sequence[Request]) -> None:
        """Empty the rows of these requests, and copy their tokens back to the requests."""
        rows = []
        for request in requests:
            row = request.row
            rows.append(row)
            request.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
            request.has_new_token = bool(self.num_tokens[row] > self.num_known[row])
            request.num_computed_on_row = int(self.num_computed[row])
            request.num_draft_tokens += int(self.num_verified[row])
            request.num_accepted_tokens += int(self.num_accepted[row])
            request.row = -1
            self.requests[row] = None
            heapq.heappush(self._free_rows, row)
            if request.is_special:
                self.is_special[row] = self.has_grammar[row] = False
            if request.is_scored:
                del self.scored[row]
            if request.stop_ids:
                self._drop_stop_ids(row, request.stop_ids)
        self._columns[:, rows] = _EMPTY
        self.num_rows -= len(rows)
        self.version += 1
        self._order = None

    def check(self) -> None:
        """Raise LongshoreError if a count or column differs from the requests on the rows."""
        rows = [row for row, request in enumerate(self.requests) if request is not None]
        requests = [self.request_on(row) for row in rows]
        widths = Counter(len(request.stop_ids) for request in requests if request.stop_ids)
        left = (self.max_total - self.num_tokens)[rows]
        is_right = {
            "num_rows": self.num_rows == len(rows),
            "generation": self.generation.nonzero()[0].tolist() == rows,
            "row": [request.row for request in requests] == rows,
            "free rows": sorted([*self._free_rows, *rows]) == list(range(self.max_num_seqs)),
            "num_of_width": widths == self.num_of_width,
            "fewest_left": self.fewest_left <= int(left.min(initial=_NEVER)),
            "scored": set(self.scored.values()) == {each for each in requests if each.is_scored},
            "is_special": self.is_special[rows].tolist() == [r.is_special for r in requests]
            and np.count_nonzero(self.is_special) == sum(r.is_special for r in requests),
            "status": all(r.status is RequestStatus.RUNNING for r in requests),
            "hold": not any(r.hold for r in requests),
        }
        wrong = [name for name, right in is_right.items() if not right]
        if wrong:
            raise LongshoreError(f"{', '.join(wrong)} of the rows differ from their requests")

    def tokens_of(self, row: int) -> Int32Array:
        """A view of the row's verified token ids."""
        ids: Int32Array = self.token_ids[row, : self.num_tokens[row]]
        return ids

    def request_on(self, row: int) -> Request:
        """The request on a held row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def generation_of(self, request: Request) -> int:
        """The generation of the row that the request holds; EMPTY_ROW if it does not run."""
        return int(self.generation[request.row]) if request.row >= 0 else EMPTY_ROW

    def occupant(self, row: int) -> Occupant:
        """The occupant of a held row."""
        return Occupant(self.request_on(row), int(self.void_through[row]))

    def requests_in_order(self) -> list[Request]:
        """All running requests in admission order."""
        return list(filter(None, map(self.requests.__getitem__, self.order.tolist())))

    def wanted(self) -> Int64Array:
        """(max_num_seqs,) tokens that each row could compute now."""
        known = self.num_tokens + self.num_placeholders + self.num_drafts
        wanted: Int64Array = np.minimum(known, self.last_computed) - self.num_computed
        if self.withheld >= 0:
            wanted[self.withheld] = 0
        return wanted

    def grant(self, wanted: Int64Array, num_tokens: int) -> Int64Array:
        """The part of `wanted` (max_num_seqs,) that fits `num_tokens`, in admission order."""
        if int(wanted.sum()) <= num_tokens:
            return wanted
        order = self.order
        before = np.cumsum(wanted[order]) - wanted[order]
        granted = np.zeros_like(wanted)
        granted[order] = np.clip(num_tokens - before, 0, wanted[order])
        return granted

    def num_drafts_in(self, num_scheduled: Int64Array) -> Int64Array:
        """(max_num_seqs,) drafts among the tokens that a step computes: those after the verified
        tokens and their placeholders."""
        beyond = self.num_computed + num_scheduled - self.num_tokens - self.num_placeholders
        num_drafts: Int64Array = np.where(num_scheduled > 0, np.maximum(beyond, 0), 0)
        return num_drafts

    def settle_drafts(
        self, rows: Int64Array, num_drafts: Int64Array, num_accepted: Int64Array
    ) -> None:
        """So many of the drafts that a step has verified for each of `rows` were accepted."""
        num_rejected = num_drafts - num_accepted
        self.num_computed[rows] -= num_rejected
        self.num_placeholders[rows] -= num_rejected
        self.num_rejected[rows] += num_rejected
        self.num_verified[rows] += num_drafts
        self.num_accepted[rows] += num_accepted
        self.num_drafted_rows += int(np.count_nonzero(num_drafts))
        self.num_draft_tokens += int(num_drafts.sum())
        num_positions = len(self.accepted_by_position)
        num_ending = np.bincount(num_accepted, minlength=num_positions + 1)  # before each position
        self.accepted_by_position += len(rows) - num_ending.cumsum()[:num_positions]

    def take_rejected(self) -> tuple[Int32Array, Int32Array]:
        """The rows with rejected drafts since the last call, and their numbers."""
        rows = self.num_rejected.nonzero()[0]
        counts = self.num_rejected[rows]
        self.num_rejected[rows] = 0
        return int32_array(rows), int32_array(counts)

    def append_several(
        self, rows: Int64Array, counts: Int64Array, token_ids: Int32Array
    ) -> tuple[Int64Array, Int64Array]:
        """Append the verified tokens of each of `rows`, all different, up to one that ends it.

        counts: (n,) tokens of each. token_ids: (counts.sum(),), one row after the other. Returns
        how many were appended to each row, and the rows that end with them.
        """
        ends = counts.cumsum()
        offsets = np.arange(len(token_ids)) - (ends - counts).repeat(counts)
        lines = rows.repeat(counts)
        num_before = self.num_tokens[lines] + offsets
        self._token_slots[self._first_slot[lines] + num_before] = token_ids
        is_last = num_before + 1 >= self.max_total[lines]
        if self.num_of_width:
            hit = (self.stop_ids[lines] == token_ids[:, None]).any(axis=1)
            is_last |= hit & (num_before + 1 >= self.min_total[lines])
        ending = rows[:0]
        if np.count_nonzero(is_last):
            ended = lines[is_last]
            ending, first = np.unique(ended, return_index=True)
            counts = counts.copy()
            counts[rows.searchsorted(ending)] = offsets[is_last][first] + 1
        self.num_tokens[rows] += counts
        self.num_placeholders[rows] -= counts
        self.fewest_left -= int(counts.max(initial=0))
        return counts, ending[self.generation[ending].argsort()]

    def append_tokens(self, rows: Int64Array | slice, token_ids: Int32Array) -> None:
        """Append one verified token to each of `rows`, all different."""
        self._token_slots[self._first_slot[rows] + self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        self.num_placeholders[rows] -= 1
        self.fewest_left -= 1

    def rewind_row(self, row: int, num_computed_tokens: int, newest_step: int) -> Rewind:
        """Rewind the row to `num_computed_tokens`; what it samples in the unanswered plans up to
        `newest_step` is void."""
        rewind = Rewind(row, num_computed_tokens, int(self.num_tokens[row]))
        self.rewind(rewind)
        self.num_placeholders[row] = 0
        self.num_drafts[row] = self.num_rejected[row] = 0
        self.void_through[row] = newest_step
        self.version += 1
        return rewind

    def stopped(self, rows: Int64Array, token_ids: Int32Array | None) -> Int64Array:
        """The rows of `rows` that end with the tokens they just got, in admission order.
        `token_ids` may be None if none of them is a stop id."""
        num_tokens = self.num_tokens[rows]
        ended = num_tokens >= self.max_total[rows]
        if token_ids is not None:
            hit = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
            ended |= hit & (num_tokens >= self.min_total[rows])
        ending = rows[ended]
        if self.fewest_left <= 0:
            left = self.max_total - self.num_tokens
            left[left <= 0] = _NEVER
            self.fewest_left = int(left.min())
        return ending[self.generation[ending].argsort()]

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        count = len(stop_ids)
        self.num_of_width[count] += 1
        if count > self.stop_ids.shape[1]:
            self._set_stop_width(count)
        self.stop_ids[row, :count] = stop_ids

    def _drop_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Each step compares all columns, so the table is narrowed when the widest row ends."""
        count = len(stop_ids)
        self.stop_ids[row, :count] = NO_STOP_ID
        self.num_of_width[count] -= 1
        if not self.num_of_width[count]:
            del self.num_of_width[count]
            if count == self.stop_ids.shape[1]:
                self._set_stop_width(max(self.num_of_width, default=1))

    def _set_stop_width(self, width: int) -> None:
        before = self.stop_ids
        self.stop_ids = np.full((self.max_num_seqs, width), NO_STOP_ID, np.int64)
        kept = min(width, before.shape[1])
        self.stop_ids[:, :kept] = before[:, :kept]
