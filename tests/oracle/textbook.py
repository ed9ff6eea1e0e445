"""The scheduler as the checklist states it: one object per request and block, one rule per line.

It exists to be compared with: on equal inputs a scheduler of any other design must make equal
plans. Scope: FCFS and priority, one token budget, chunked prefill, prefix caching, recompute
preemption, aborts, one or two plans in flight, full attention in one KV cache group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longshore.protocol.client import AddRequest, FinishReason
from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from tests.oracle.block_pool import Block, BlockNames, TextbookBlockPool
from tests.oracle.plan import Admission, Delivery, Finish, OraclePlan, Outputs, ScheduledRequest
from tests.oracle.request import Status, TextbookRequest, WaitingQueue


@dataclass
class Step:
    """A plan in the making.

    new_blocks: blocks taken in this step, by request.
    admitted:   requests with whether they are resumed and their prefix hits in tokens.
    """

    budget: int
    scheduled: dict[TextbookRequest, int] = field(default_factory=dict)
    new_blocks: dict[TextbookRequest, list[Block]] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[TextbookRequest] = field(default_factory=list)

    def schedule(self, request: TextbookRequest, num_tokens: int, new_blocks: list[Block]) -> None:
        """Give a request its tokens and charge the budget."""
        self.scheduled[request] = num_tokens
        self.new_blocks[request] = new_blocks
        self.budget -= num_tokens

    def withdraw(self, request: TextbookRequest) -> None:
        """Undo `schedule`; nothing of the request will be computed after all."""
        self.budget += self.scheduled.pop(request)
        del self.new_blocks[request]


@dataclass(frozen=True)
class UnansweredPlan:
    """A plan on its way. A request that samples in it is kept with its number of preemptions,
    which tells whether it is still in the same life when the answer comes."""

    step: int
    sampling: tuple[tuple[TextbookRequest, int], ...]


class TextbookScheduler:
    """Implements `SchedulerAdapter`.

    num_blocks: with the null block.
    hash_seed:  the root of all block names.

    Raises ConfigError if an empty pool cannot hold the longest request.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        hash_seed: bytes = b"",
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.block_size = cache.block_size
        self.caches_prefixes = cache.enable_prefix_caching
        self.pool = TextbookBlockPool(num_blocks)
        self.waiting = WaitingQueue(config.policy)
        self.running: list[TextbookRequest] = []
        if self._num_blocks_for(config.max_model_len) > self.pool.num_free:
            raise ConfigError(
                f"max_model_len={config.max_model_len} needs more blocks than the "
                f"{self.pool.num_free} of an empty pool; raise num_blocks"
            )
        self._names = BlockNames(hash_seed)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._live: list[TextbookRequest] = []
        self._unanswered: list[UnansweredPlan] = []
        self._finished_ids: list[str] = []  # to be told to the worker
        self._deliveries: list[Delivery] = []
        self._finishes: list[Finish] = []
        self._num_steps = 0

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    # Requests come and go.

    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        """Queue a request, or refuse it: ERROR without a prompt or under an id or handle that is
        alive, IGNORED if too long, LENGTH_CAPPED if it has all its tokens already."""
        request = TextbookRequest.from_message(
            message,
            client=client,
            now=now,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        refusal = self._refusal(request)
        if refusal is not None:
            self._report_end(request, refusal)
            return
        self._live.append(request)
        self.waiting.append(request)

    def _refusal(self, request: TextbookRequest) -> FinishReason | None:
        if not request.prompt:
            return FinishReason.ERROR
        if request.num_tokens >= self.config.max_model_len:
            return FinishReason.IGNORED
        for other in self._live:
            if other.request_id == request.request_id:
                return FinishReason.ERROR
            if (other.client, other.handle) == (request.client, request.handle):
                return FinishReason.ERROR
        if len(request.outputs) >= request.max_tokens:
            return FinishReason.LENGTH_CAPPED
        return None

    def abort(self, handles: Sequence[int], *, client: int = 0) -> None:
        """End these requests; unknown handles are ignored, they may just have finished."""
        for handle in handles:
            request = self._find(client, handle)
            if request is not None:
                self._finish(request, FinishReason.ABORTED)

    def stop_found(self, handle: int, num_tokens: int, *, client: int = 0) -> None:
        """The text of output token `num_tokens` completed a stop string: the rest is void."""
        request = self._find(client, handle)
        if request is not None:
            del request.outputs[num_tokens:]
            self._finish(request, FinishReason.STOPPED)

    def _find(self, client: int, handle: int) -> TextbookRequest | None:
        for request in self._live:
            if (request.client, request.handle) == (client, handle):
                return request
        return None

    def _finish(self, request: TextbookRequest, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._free_blocks(request)
            self._finished_ids.append(request.request_id)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        self._live.remove(request)
        self._report_end(request, reason)

    def _report_end(self, request: TextbookRequest, reason: FinishReason) -> None:
        self._finishes.append(
            Finish(
                client=request.client,
                handle=request.handle,
                reason=reason,
                num_output_tokens=len(request.outputs),
                # Usage counts cached tokens of the prompt; hits may reach into resubmitted outputs.
                num_cached_tokens=min(request.num_cached or 0, len(request.prompt)),
                num_preemptions=request.num_preemptions,
            )
        )

    # One step.

    def schedule(self, now: float) -> OraclePlan | None:
        """Plan the next step; None if too many plans are unanswered or there is nothing to say.

        now: seconds. No rule in scope looks at the clock after a request has arrived.
        """
        if len(self._unanswered) >= self.config.max_steps_in_flight:
            return None
        step = Step(budget=self.config.token_budget)
        self._schedule_running(step)
        self._name_running(step)
        if not step.preempted:
            self._admit_waiting(step)
        if not (step.scheduled or step.preempted or self._finished_ids):
            return None
        return self._finish_plan(step)

    def _schedule_running(self, step: Step) -> None:
        for request in list(self.running):  # victims leave the list while it is walked
            if step.budget == 0:
                return
            if request.status is not Status.RUNNING:
                continue
            if self._ends_with_placeholders(request):
                continue
            num_tokens = self._running_need(request, step.budget)
            if num_tokens == 0:
                continue
            end = request.num_computed + num_tokens
            new_blocks = self._allocate(request, [], end)
            while new_blocks is None:
                victim = self._choose_victim()
                self._preempt(victim, step)
                if victim is request:
                    break
                new_blocks = self._allocate(request, [], end)
            if new_blocks is not None:
                step.schedule(request, num_tokens, new_blocks)

    def _name_running(self, step: Step) -> None:
        """DESIGN 9.7: what is verified and in a plan, this one included. Only now, because a victim
        of this step computes nothing of what it had been given."""
        for request in self.running:
            self._name_blocks(request, request.num_computed + step.scheduled.get(request, 0))

    def _ends_with_placeholders(self, request: TextbookRequest) -> bool:
        """SPD-06: the outputs on their way are the last ones, so there is nothing to compute."""
        if request.num_placeholders == 0:
            return False
        settled = request.num_computed + 2 - request.num_placeholders
        return settled >= len(request.prompt) + request.max_tokens

    def _running_need(self, request: TextbookRequest, budget: int) -> int:
        """SCH-04, in its order of caps."""
        need = request.num_tokens + request.num_placeholders - request.num_computed
        if self.config.long_prefill_token_threshold > 0:
            need = min(need, self.config.long_prefill_token_threshold)
        need = min(need, budget)
        return min(need, self.config.max_model_len - 1 - request.num_computed)

    def _choose_victim(self) -> TextbookRequest:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: request.urgency)
        return self.running[-1]

    def _preempt(self, victim: TextbookRequest, step: Step) -> None:
        if victim in step.scheduled:
            step.withdraw(victim)  # PRE-03
        self.running.remove(victim)
        self._free_blocks(victim)
        victim.status = Status.PREEMPTED
        victim.num_computed = 0
        victim.num_placeholders = 0
        victim.num_preemptions += 1
        step.preempted.append(victim)
        self.waiting.prepend(victim)

    def _admit_waiting(self, step: Step) -> None:
        set_aside: list[TextbookRequest] = []
        while (
            len(self.waiting) > 0
            and step.budget > 0
            and len(self.running) < self.config.max_num_seqs
        ):
            request = self.waiting.head()
            if self._has_token_in_flight(request):
                self.waiting.remove(request)
                set_aside.append(request)
                continue
            hits = self._find_prefix(request)
            num_hit_tokens = len(hits) * self.block_size
            num_tokens = self._waiting_need(request, num_hit_tokens, step.budget)
            if num_tokens == 0:
                break
            end = num_hit_tokens + num_tokens
            new_blocks = self._allocate(request, hits, end)
            if new_blocks is None:
                break
            self.waiting.remove(request)
            self._admit(request, num_hit_tokens, step)
            step.schedule(request, num_tokens, new_blocks)
            self._name_blocks(request, end)
        for request in reversed(set_aside):
            self.waiting.prepend(request)

    def _has_token_in_flight(self, request: TextbookRequest) -> bool:
        """It was preempted while its next token was being sampled: wait for that token, or it
        would be sampled again."""
        return any(
            request is sampling for plan in self._unanswered for sampling, _ in plan.sampling
        )

    def _waiting_need(self, request: TextbookRequest, num_hit_tokens: int, budget: int) -> int:
        """SCH-06 and SCH-14; 0 ends admission."""
        need = request.num_tokens - num_hit_tokens
        if self.config.long_prefill_token_threshold > 0:
            need = min(need, self.config.long_prefill_token_threshold)
        if need > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(need, budget)

    def _admit(self, request: TextbookRequest, num_hit_tokens: int, step: Step) -> None:
        resumed = request.status is Status.PREEMPTED
        step.admitted.append(Admission(request.request_id, resumed, num_hit_tokens))
        request.status = Status.RUNNING
        request.num_computed = num_hit_tokens
        request.num_named = num_hit_tokens // self.block_size
        if request.num_cached is None:
            request.num_cached = num_hit_tokens
        self.running.append(request)

    def _finish_plan(self, step: Step) -> OraclePlan:
        """Settle the books as if the step had run, and put it into words."""
        self._num_steps += 1
        assert step.budget >= 0
        assert len(self.running) <= self.config.max_num_seqs
        sampling: list[TextbookRequest] = []
        for request, num_tokens in step.scheduled.items():
            request.num_computed += num_tokens
            if request.num_computed >= request.num_tokens + request.num_placeholders:
                request.num_placeholders += 1
                sampling.append(request)
        self._unanswered.append(
            UnansweredPlan(
                self._num_steps,
                tuple((request, request.num_preemptions) for request in sampling),
            )
        )
        finished_ids, self._finished_ids = self._finished_ids, []
        return OraclePlan(
            step=self._num_steps,
            scheduled=tuple(
                ScheduledRequest(
                    request_id=request.request_id,
                    num_tokens=num_tokens,
                    samples=request in sampling,
                    new_block_ids=tuple(block.block_id for block in step.new_blocks[request]),
                    block_ids=tuple(block.block_id for block in request.blocks),
                )
                for request, num_tokens in step.scheduled.items()
            ),
            admitted=tuple(step.admitted),
            preempted=tuple(sorted(request.request_id for request in step.preempted)),
            finished=tuple(sorted(finished_ids)),
        )

    # Blocks.

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find_prefix(self, request: TextbookRequest) -> list[Block]:
        """Leading cached blocks; the last token is never a hit, it must be computed to sample."""
        if not (self.caches_prefixes and request.reads_prefix_cache):
            return []
        hits: list[Block] = []
        for name in self._block_names(request)[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.find(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def _allocate(
        self, request: TextbookRequest, hits: list[Block], end: int
    ) -> list[Block] | None:
        """Extend the block table by `hits` and then by new blocks, to hold `end` tokens.

        Returns the new blocks, or None, with nothing changed, if too few are free.
        """
        num_new = self._num_blocks_for(end) - len(request.blocks) - len(hits)
        num_free_hits = sum(block.ref_count == 0 for block in hits)  # KVM-08
        if num_new + num_free_hits > self.pool.num_free:
            return None
        self.pool.touch(hits)
        new_blocks = self.pool.take(num_new)
        request.blocks += hits + new_blocks
        return new_blocks

    def _name_blocks(self, request: TextbookRequest, end: int) -> None:
        """Name the blocks that the first `end` tokens fill, as far as their ids are verified."""
        if not self.caches_prefixes:
            return
        num_full = min(end, request.num_tokens) // self.block_size
        unnamed = request.blocks[request.num_named : num_full]
        names = self._block_names(request)[request.num_named : num_full]
        for block, name in zip(unnamed, names, strict=True):
            self.pool.set_name(block, name)
        request.num_named = max(num_full, request.num_named)

    def _block_names(self, request: TextbookRequest) -> list[int]:
        return self._names.chain(request.token_ids, self.block_size, request.salt)

    def _free_blocks(self, request: TextbookRequest) -> None:
        # Tail first: the oldest free block is reused first, and a prefix is worth more.
        self.pool.free(reversed(request.blocks))
        request.blocks = []

    # What the worker answers.

    def update_from_output(self, step: int, tokens: Mapping[str, int] | Sequence[int]) -> None:
        """Answer the oldest unanswered plan.

        tokens: one for each request that samples in it, by id or in the plan's order. Raises
        ValueError, with nothing changed, if step or tokens are not those of that plan.
        """
        if not self._unanswered or self._unanswered[0].step != step:
            raise ValueError(f"step {step} is not the oldest unanswered one")
        plan = self._unanswered[0]
        request_ids = [request.request_id for request, _ in plan.sampling]
        if not isinstance(tokens, Mapping):
            tokens = dict(zip(request_ids, tokens, strict=True))
        if set(tokens) != set(request_ids):
            raise ValueError(f"step {step} samples {request_ids}, the answer is for {[*tokens]}")
        del self._unanswered[0]
        for request, num_preemptions in plan.sampling:
            if request.status is Status.FINISHED:
                continue
            if request.num_preemptions == num_preemptions:
                request.num_placeholders -= 1
            self._append_output(request, tokens[request.request_id])

    def _append_output(self, request: TextbookRequest, token: int) -> None:
        request.outputs.append(token)
        self._deliveries.append(Delivery(request.client, request.handle, token))
        if token in request.stop_ids and len(request.outputs) >= request.min_tokens:
            self._finish(request, FinishReason.STOPPED)
        elif (
            len(request.outputs) >= request.max_tokens
            or request.num_tokens >= self.config.max_model_len
        ):
            self._finish(request, FinishReason.LENGTH_CAPPED)

    def take_outputs(self) -> Outputs:
        """Deliveries and ends since the last call."""
        outputs = Outputs(tuple(self._deliveries), tuple(self._finishes))
        self._deliveries, self._finishes = [], []
        return outputs

    def check_invariants(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        self.pool.check_invariants(block for request in self._live for block in request.blocks)
        assert len(self.running) <= self.config.max_num_seqs
        assert len(self._unanswered) <= self.config.max_steps_in_flight
        assert {*self.running, *self.waiting} == set(self._live)
        assert len(self.running) + len(self.waiting) == len(self._live)
        for request in self.running:
            assert request.status is Status.RUNNING
            assert len(request.blocks) == self._num_blocks_for(request.num_computed)
            in_flight = [(request, request.num_preemptions) in p.sampling for p in self._unanswered]
            assert request.num_placeholders == sum(in_flight)
            last = min(len(request.prompt) + request.max_tokens, self.config.max_model_len) - 1
            assert request.num_computed <= last
        for request in self.waiting:
            assert request.status in (Status.WAITING, Status.PREEMPTED)
            assert not request.blocks
            assert request.num_computed == 0
            assert request.num_placeholders == 0
