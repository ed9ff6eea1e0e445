"""When KV proves wrong after others may have built on it: un-name it, and send back who used it.

A name is provisional until the output of its step is applied. A failed load or numbers that are not
finite make every block computed from the bad position on worthless, and with it every request that
holds one of them: also those that found it by its name while the step was in flight, and those that
have left their rows since, whose blocks may still be found.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, int32_array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import Request
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.plan_builder import PlanBuilder

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Holder:
    """A request and its blocks, on its row or as it left it. num_hits: leading blocks that others
    had computed, per group; num_good: leading tokens not spoilt."""

    request: Request
    generation: int
    is_running: bool
    tables: tuple[Int32Array, ...]
    num_hits: tuple[int, ...]
    num_good: int


@dataclass(frozen=True, slots=True)
class _Invalidated:
    """All bad blocks, and who holds one of them. With a running request come the leading tokens
    whose KV is good."""

    block_ids: Int32Array
    running: list[tuple[Request, int]]
    waiting: list[Request]


class Recovery:
    """Finds what bad blocks have spoilt, and rewinds rows."""

    def __init__(self, parts: Parts, plan: PlanBuilder, lifecycle: Lifecycle) -> None:
        self._load_failure_policy = parts.config.load_failure_policy
        self._running = parts.running
        self._waiting = parts.waiting
        self._kv_cache = parts.kv_cache
        self._in_flight = parts.in_flight
        self._encoder = parts.encoder
        self._transfers = parts.transfers
        self._plan = plan
        self._lifecycle = lifecycle
        self._border = math.lcm(*parts.kv_cache.block_sizes)
        self.num_rewinds = 0

    def fail_loads(self, failed: Int32Array, planned: PlannedStep) -> None:
        """Loads of the answered step did not fill these blocks."""
        sources = {}
        for generation in planned.loads:
            tables = self._tables_under(generation)
            firsts = [
                int(np.argmax(np.isin(table, failed))) * block_size
                for table, block_size in zip(tables, self._kv_cache.block_sizes, strict=True)
                if np.isin(table, failed).any()
            ]
            if firsts:
                sources[generation] = min(firsts)
        if not sources:
            about = fields(step_id=planned.step, blocks=len(failed))
            logger.warning("blocks failed to load that no load had", extra=about)
            return
        fails = self._load_failure_policy == "fail"
        self._invalidate(
            sources, planned.step, reason="its KV could not be loaded" if fails else None
        )

    def _tables_under(self, generation: int) -> tuple[Int32Array, ...]:
        rows = np.flatnonzero(self._running.generation == generation)
        if len(rows):
            return self._kv_cache.block_ids(int(rows[0]))
        return self._in_flight.past_occupant(generation).tables

    def fail_not_finite(self, output: ModelRunnerOutput, planned: PlannedStep) -> None:
        """The model's output was not a number for `output.nan_rows`. The eldest first: a younger
        one that had found its blocks is sent back with it, and its own output means nothing then.
        """
        num_nans = dict(zip(output.nan_rows.tolist(), output.num_nans.tolist(), strict=True))
        indices = np.flatnonzero(np.isin(planned.rows, output.nan_rows))
        for index in indices[np.argsort(planned.generations[indices])].tolist():
            row, generation = int(planned.rows[index]), int(planned.generations[index])
            self._fail_row(row, generation, num_nans[row], planned.step)

    def _fail_row(self, row: int, generation: int, num_nans: int, step: int) -> None:
        """Nothing that the row's request computed may be reused. What it had found, others have
        computed and got numbers from."""
        if self._running.generation[row] == generation:
            if step <= self._running.void_through[row]:
                return
            request = self._running.request_on(row)
            num_hit_tokens = request.num_hit_tokens
        else:
            left = self._in_flight.past_occupant(generation)
            request, num_hit_tokens = left.request, left.num_hit_tokens
            if step <= left.void_through and not request.is_finished:
                return
        if not request.is_finished:
            self._lifecycle.log.not_finite(request, step=step, num_nans=num_nans)
            request.num_nans_in_logits = num_nans
            text = (
                "the model produced logits that are not finite numbers for this request, or its "
                "settings forbid every token"
            )
            self._lifecycle.end(request, FinishReason.ERROR, message=text, step=step)
        self._invalidate({generation: num_hit_tokens}, step)

    def _invalidate(self, sources: dict[int, int], step: int, *, reason: str | None = None) -> None:
        """Everything that rests on bad KV is computed again; with `reason`, requests that hold some
        of it fail for it. step: whose answer says so. See `_find_invalid` for `sources`."""
        invalid = self._find_invalid(sources)
        self._plan.uncached += invalid.block_ids.tolist()
        self._transfers.note_invalid(invalid.block_ids)
        for request in invalid.waiting:
            self._lifecycle.release_load(request)
        for request, num_good in invalid.running:
            if reason is not None:
                self._lifecycle.end(request, FinishReason.ERROR, message=reason, step=step)
            else:
                self._rewind(request, num_good)

    def _find_invalid(self, sources: dict[int, int]) -> _Invalidated:
        """Un-name everything computed from a bad position on, and say who is concerned.

        sources: generation of a request that ran while the plan was unanswered -> leading tokens of
        it whose KV is good.

        Others are spoilt where they found a spoilt block; what they computed behind it may have
        been found in turn, so this goes on until nothing is added. A block that was handed out anew
        since is nobody's hit, so its new owner is not concerned. Tokens on their way to requests
        that left their rows may rest on bad blocks, and are void.
        """
        bad = np.zeros(self._kv_cache.num_blocks, np.bool_)
        holders = list(self._holders(sources))
        invalid = [holder for holder in holders if holder.generation in sources]
        for holder in invalid:
            self._mark(holder, bad)
        has_grown = True
        while has_grown:
            has_grown = False
            for holder in holders:
                num_good = self._num_good_hits(holder, bad)
                if num_good < holder.num_good:
                    holder.num_good = num_good
                    self._mark(holder, bad)
                    invalid.append(holder)
                    has_grown = True
        waiting = [
            request
            for request in self._waiting
            if request.held is not None and any(bad[ids].any() for ids in request.held.block_ids)
        ]
        block_ids = int32_array(np.flatnonzero(bad))
        self._kv_cache.uncache_blocks(block_ids)
        self._in_flight.void_past_occupants()
        running = {holder.request: holder.num_good for holder in invalid if holder.is_running}
        return _Invalidated(block_ids, list(running.items()), waiting)

    def _rewind(self, request: Request, num_good: int) -> None:
        """The running request computes again from the last block border of all groups up to
        `num_good` tokens."""
        row = request.row
        newest_step = self._in_flight.newest_step
        num_tokens = min(num_good, int(self._running.num_tokens[row]) - 1)
        num_tokens -= num_tokens % self._border
        num_tokens = self._kv_cache.resume_point(self._kv_cache.block_ids(row), num_tokens)
        self._kv_cache.truncate(row, num_tokens, newest_step)
        request.num_hit_tokens = min(request.num_hit_tokens, num_tokens)
        if request.multimodal:
            self._encoder.rewound(request)
        self.num_rewinds += 1
        self._plan.add_rewind(self._running.rewind_row(row, num_tokens, newest_step))
        self._lifecycle.log.rewound_row(request, step=newest_step, num_tokens=num_tokens)

    def _holders(self, sources: dict[int, int]) -> Iterator[_Holder]:
        sizes = self._kv_cache.block_sizes
        for request in self._running.requests_in_order():
            generation = int(self._running.generation[request.row])
            num_tokens = int(self._running.num_computed[request.row])
            yield _Holder(
                request,
                generation,
                True,
                self._kv_cache.block_ids(request.row),
                tuple(request.num_hit_tokens // size for size in sizes),
                sources.get(generation, num_tokens),
            )
        for generation, left in self._in_flight.past_occupants():
            yield _Holder(
                left.request,
                generation,
                False,
                left.tables,
                tuple(left.num_hit_tokens // size for size in sizes),
                sources.get(generation, max(map(len, left.tables)) * max(sizes)),
            )

    def _mark(self, holder: _Holder, bad: BoolArray) -> None:
        for table, size in zip(holder.tables, self._kv_cache.block_sizes, strict=True):
            bad[table[holder.num_good // size :]] = True
        bad[NULL_BLOCK] = False

    def _num_good_hits(self, holder: _Holder, bad: BoolArray) -> int:
        """Leading tokens of the holder before the first bad block that it found."""
        num_good = holder.num_good
        sizes = self._kv_cache.block_sizes
        for table, num_hits, size in zip(holder.tables, holder.num_hits, sizes, strict=True):
            found = bad[table[:num_hits]]
            if found.any():
                num_good = min(num_good, int(np.argmax(found)) * size)
        return num_good
