"""Which states are kept for later requests, in models with recurrent states.

A request begins with a cached prefix only where the state after it is kept, and a state is as large
as the KV of a thousand tokens or more. So only states are kept that another request is likely to
begin with: at the end of the prompt, or where the next turns of a chat depart from it; at the ends
of the prefixes that the request names in its cache hint; and where its prefix stops being that of
an earlier request (the junction of Marconi, Pan et al., 2024), which others may share, too. As long
as there is memory that nothing else is cached in, also at doubling distances from the end.

`turns` learns how soon a conversation goes on, if it does, and `answer_states` keeps what is after
answers.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from longshore.connectors.base import FinishAction
from longshore.protocol.arrays import Int64Array, int32_array
from longshore.protocol.plan import KeptState, SchedulerOutput
from longshore.scheduler.features.answer_states import AnswerStates
from longshore.scheduler.features.turns import Turns
from longshore.scheduler.hooks import PlanChanges, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.chains import ChainLink
from longshore.scheduler.kv_cache.habits import (
    CONSUMED,
    INSURANCE,
    StateKind,
    turn_kind,
    used_kind,
)
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Outcome, Request
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight
from longshore.scheduler.step.running import RunningTable

MAX_KEPT: Final = 4
"""States of one prompt, without insurance."""

MIN_INSURANCE: Final = 512
"""Distance from the end, in tokens, of the nearest insurance; each further one is twice as far."""

MAX_INSURANCE: Final = 8


class PromptStates(SchedulerFeature):
    """Plans which states the workers keep while they compute prompts, and tells what becomes of
    them. answers: the states after answers, if these are kept."""

    def __init__(
        self,
        running: RunningTable,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        turns: Turns,
        answers: AnswerStates | None,
    ) -> None:
        assert kv_cache.kept_states is not None
        self._running = running
        self._kv_cache = kv_cache
        self._kept = kv_cache.kept_states
        self._chains = self._kept.chains
        self._in_flight = in_flight
        self._new: list[KeptState] = []  # of the plan that is being made
        self._wanted: dict[Request, dict[int, StateKind]] = {}  # by number of tokens, ascending
        self._generations: dict[Request, int] = {}
        self._ended: deque[tuple[int, int]] = deque()  # (step, generation)
        self._turns = turns
        self._answers = answers

    def poll(self, now: float) -> None:
        self._chains.now_s = now

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        self._generations[request] = int(self._running.generation[request.row])
        if request.skips_prefix_cache or request.options.no_store:
            return
        self._kv_cache.extend_hashes(request)  # it may have begun without a look into the cache
        junction = self._kv_cache.find_junction(request)
        is_new = request not in self._turns
        if is_new:
            end = max(_turn_ends(request, request.num_prompt_tokens - 1), default=0)
            self._turns.begin(request, end - end % self._kv_cache.state_border, junction)
        wanted = self._choose(request, num_computed, junction)
        if wanted:
            self._wanted[request] = wanted
        if is_new:
            self._found(request, num_computed, is_continued=bool(wanted))

    def _found(self, request: Request, num_computed: int, *, is_continued: bool) -> None:
        """The request begins with the state after `num_computed` tokens, if one is kept there. The
        first use of an end is by its own continuation. A later one, or one after which no state is
        kept, shows that others depart here."""
        link = self._link_before(request, num_computed)
        if link is None or link.kind is None:
            return
        before = link.kind
        is_first = before.name == "end" or (link.end is not None and before == INSURANCE)
        if is_first:
            kind = CONSUMED if is_continued else turn_kind(self._turns[request].number)
            if link.end is not None and (prompt := link.state_before) is not None:
                self._consume(prompt)
        else:
            self._chains.habits.use(before)
            self._chains.habits.wait(before, self._chains.now_s - link.touched_s)
            kind = used_kind(before.turn + 1 if before.name == "used" else 1)
        self._chains.place(link, kind)

    def _consume(self, link: ChainLink) -> None:
        """The next turn has begun after it."""
        if link.kind is not None and link.kind.name == "end":
            self._chains.place(link, CONSUMED)

    def _link_before(self, request: Request, num_tokens: int) -> ChainLink | None:
        """What is kept of the first tokens with which a request begins."""
        if self._answers is not None and (link := self._answers.started) is not None:
            return link
        if not num_tokens or num_tokens % self._kept.tokens_per_hash:
            return None
        return self._chains.get(self._turns.hash_before(request, num_tokens))

    def _choose(self, request: Request, num_computed: int, junction: int) -> dict[int, StateKind]:
        """After which numbers of tokens states are kept."""
        end = len(request.token_ids) - 1  # a token is computed to sample from
        turn_ends = _turn_ends(request, end)
        hint = request.options.cache_hint
        prefixes = () if hint is None else [prefix.num_tokens for prefix in hint.prefixes]
        turn = self._turns[request]
        last = turn_kind(turn.number) if turn.end else used_kind(0)
        kinds = [(each, CONSUMED) for each in turn_ends[:-1]]
        kinds += [(each, used_kind(0)) for each in (junction, *prefixes)]
        kinds += [(each, last) for each in turn_ends[-1:]]
        border = self._kv_cache.state_border
        wanted = {
            each - each % border: kind
            for each, kind in kinds
            if each <= end and each - each % border > num_computed
        }
        insured = {
            each - each % border: INSURANCE
            for each in _insured(turn_ends[-1] if turn_ends else 0)
            if each - each % border > num_computed
        }
        chosen = insured | {each: wanted[each] for each in sorted(wanted)[-MAX_KEPT:]}
        return {each: chosen[each] for each in sorted(chosen)}

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """The turn has ended, and its kind is known."""
        self._turns.end(request, now, None if self._answers is None else self._answers.kept)
        return None

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
        plan.kept_states.extend(kept)
        self._new = kept
        return {}

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """No state of the plan needs blocks any more."""
        for state in self._new:
            self._kv_cache.pool.free_blocks(state.block_ids, plan.step)
        self._new = []

    def _keep(self, request: Request, num_tokens: int, step: int) -> list[KeptState]:
        """The states that plan `step` keeps, which computes `num_tokens` tokens of the request."""
        row, wanted = request.row, self._wanted[request]
        first = int(self._running.num_computed[row])
        due = {each: kind for each, kind in wanted.items() if each <= first + num_tokens}
        if len(due) == len(wanted):
            del self._wanted[request]
        else:
            self._wanted[request] = {e: kind for e, kind in wanted.items() if e not in due}
        states = []
        generation = self._generations[request]
        for end, kind in due.items():
            if end > first:
                pages = self._kv_cache.keep_state(
                    request, end, kind, generation=generation, step=step
                )
                if pages is not None:
                    states.append(KeptState(row, end, int32_array(pages)))
        return states

    def begin_epoch(self, epoch: int) -> None:
        self._ended.clear()

    def counts(self) -> dict[str, Any]:
        num_states = self._chains.num_states
        return {
            "num_kept_states": num_states,
            "num_kept_state_blocks": num_states * self._kept.num_pages,
            "num_states_kept": self._kept.num_kept,
            "num_states_found": self._kept.num_found,
            "num_states_evicted": self._chains.num_evicted,
        }


def _turn_ends(request: Request, end: int) -> list[int]:
    """Where the next turns depart, as far as that is in the first `end` tokens; ascending."""
    return [each for each in request.options.turn_ends or (end,) if each <= end]


def _insured(end: int) -> Iterator[int]:
    for number in range(MAX_INSURANCE):
        if (distance := MIN_INSURANCE << number) < end:
            yield end - distance
