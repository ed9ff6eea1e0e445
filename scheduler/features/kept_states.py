"""Which states are kept for later requests, in models with recurrent states.

A request begins with a cached prefix only where the state after it is kept, and a state is as large
as the KV of a thousand tokens or more. So only states are kept that another request is likely to
begin with: at the end of the prompt, or where the next turns of a chat depart from it; at the ends
of the prefixes that the request names in its cache hint; and where its prefix stops being that of
an earlier request (the junction of Marconi, Pan et al., 2024), which others may share, too.
"""

from collections import deque
from typing import Any, Final

from longshore.protocol.arrays import Int64Array, int32_array
from longshore.protocol.plan import KeptState
from longshore.scheduler.hooks import PlanChanges, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.running import RunningTable

MAX_KEPT: Final = 4
"""States of one prompt."""


class PromptStates(SchedulerFeature):
    """Plans which states the workers keep while they compute prompts."""

    def __init__(
        self, running: RunningTable, kv_cache: KVCacheManager, in_flight: StepsInFlight
    ) -> None:
        assert kv_cache.kept_states is not None
        self._running = running
        self._kv_cache = kv_cache
        self._kept = kv_cache.kept_states
        self._in_flight = in_flight
        self._wanted: dict[Request, list[int]] = {}  # ascending numbers of tokens
        self._generations: dict[Request, int] = {}
        self._ended: deque[tuple[int, int]] = deque()  # (step, generation)

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        self._generations[request] = int(self._running.generation[request.row])
        if not request.skips_prefix_cache and (wanted := self._choose(request, num_computed)):
            self._wanted[request] = wanted

    def _choose(self, request: Request, num_computed: int) -> list[int]:
        end = len(request.token_ids) - 1  # a token is computed to sample from
        turn_ends = request.options.turn_ends or (end,)
        hint = request.options.cache_hint
        prefixes = () if hint is None else [prefix.num_tokens for prefix in hint.prefixes]
        junction = self._kv_cache.find_junction(request)
        border = self._kv_cache.state_border
        given = (each for each in (*turn_ends, junction, *prefixes) if each <= end)
        ends = {each - each % border for each in given}
        return sorted(each for each in ends if each > num_computed)[-MAX_KEPT:]

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        self._wanted.pop(request, None)
        generation = self._generations.pop(request)
        if blocks is not None:
            self._ended.append((self._in_flight.newest_step, generation))

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        while self._ended and self._ended[0][0] <= answered_step:
            self._kept.forget(self._ended.popleft()[1])
        kept = [
            state
            for request in list(self._wanted)
            for state in self._keep(request, int(num_scheduled[request.row]), plan.step)
        ]
        for state in kept:
            self._kv_cache.pool.free_blocks(state.block_ids, plan.step)
        return {"kept_states": tuple(kept)} if kept else {}

    def _keep(self, request: Request, num_tokens: int, step: int) -> list[KeptState]:
        """The states that plan `step` keeps, which computes `num_tokens` tokens of the request."""
        row, wanted = request.row, self._wanted[request]
        first = int(self._running.num_computed[row])
        due = [each for each in wanted if each <= first + num_tokens]
        if len(due) == len(wanted):
            del self._wanted[request]
        else:
            self._wanted[request] = wanted[len(due) :]
        if num_tokens < 2:  # workers keep no states of single tokens
            return []
        states = []
        for end in due:
            block_hash = request.block_hashes[end // self._kept.tokens_per_hash - 1]
            if end <= first or self._kept.has(block_hash):
                continue
            block_ids = self._kept.keep(
                block_hash, end, generation=self._generations[request], step=step
            )
            if block_ids is not None:
                states.append(KeptState(row, end, int32_array(block_ids)))
                self._kv_cache.full_blocks.record_state(request, end, block_ids, block_hash, step)
        return states

    def begin_epoch(self, epoch: int) -> None:
        self._ended.clear()
