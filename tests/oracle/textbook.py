"""The scheduler as the checklist states it: one object per request and block, one rule per line.

It exists to be compared with: on equal inputs a scheduler of any other design must make equal
plans. Scope: full attention in one KV cache group, and cross attention in a second. The parts of a
step are in files of their own: `running.py`, `admission.py`, `settle.py`, `answers.py`; this one
holds the state, and what becomes of requests.
"""

from collections.abc import Sequence

from longshore.connectors.base import RequestView, SchedulerConnector
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import CrossAttentionSpec, LongestRequest
from longshore.protocol.outputs import FinishReason, TransferReport
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.step.planner import PauseState
from tests.harness.grammar import FakeCompiler
from tests.oracle.admission import Admissions
from tests.oracle.answers import apply_answer
from tests.oracle.block_pool import BlockNames, TextbookBlockPool
from tests.oracle.check import check_books
from tests.oracle.encoder import EncoderCache, RowEncoder
from tests.oracle.fairness import RESERVED, Fairness
from tests.oracle.gates import Gates
from tests.oracle.intake import rejection
from tests.oracle.loads import Transfers
from tests.oracle.plan import Answer, Delivery, Finish, OraclePlan, Outputs
from tests.oracle.request import Status, TextbookRequest, WaitingQueues
from tests.oracle.retention import Retentions
from tests.oracle.running import schedule_running
from tests.oracle.settle import settle
from tests.oracle.step import Step, UnansweredPlan
from tests.oracle.tables import BlockTables


class TextbookScheduler:
    """Implements `SchedulerAdapter`.

    num_blocks: with the null block.
    hash_seed:  the root of all block names.
    cross:      the second group of a model that has an encoder.

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
        connector: SchedulerConnector | None = None,
        grammars: FakeCompiler | None = None,
        num_ranks: int = 1,
        cross: CrossAttentionSpec | None = None,
    ) -> None:
        self.config = config
        self.cross = cross
        self.connector = connector
        self.grammars = grammars
        self.num_blocks = num_blocks
        self._cache = cache
        self._names = BlockNames(hash_seed)
        self.running: list[TextbookRequest] = []
        self.fairness: Fairness | None = None
        if config.policy == "fair":
            num_slots = (num_blocks - 1) * cache.block_size
            self.fairness = Fairness(config.max_num_seqs, num_slots, self.running)
        self.queues = WaitingQueues(config.policy, self.fairness)
        self.live: list[TextbookRequest] = []
        num_reserved = 0 if self.fairness is None else num_blocks // RESERVED
        self.gates = Gates(cache, num_blocks, num_reserved)
        self.pause = PauseState.UNPAUSED
        self.num_steps = 0
        self._now = 0.0
        self.answered_step = 0
        self._num_ranks = num_ranks
        self._eos_token_ids = frozenset(eos_token_ids)
        self._deliveries: list[Delivery] = []
        self._finishes: list[Finish] = []
        self._masked_steps: list[int] = []
        self._newest_mask = 0
        self._reset()
        num_encoder = 0 if cross is None else cross.max_blocks(LongestRequest(config.max_model_len))
        num_needed = self.tables.num_blocks_for(config.max_model_len) + num_encoder
        if num_needed > self.tables.pool.num_free:
            raise ConfigError(
                f"max_model_len={config.max_model_len} needs more blocks than the "
                f"{self.tables.pool.num_free} of an empty pool; raise num_blocks"
            )

    def _reset(self) -> None:
        """What the workers know, for new ones."""
        self.tables = BlockTables(
            TextbookBlockPool(self.num_blocks),
            self._names,
            block_size=self._cache.block_size,
            caches_prefixes=self._cache.enable_prefix_caching,
            cross=self.cross,
        )
        self.retentions = Retentions(self.tables.pool)
        capacity = self.config.encoder_cache_size
        if capacity is None:
            capacity = self.config.max_num_encoder_input_tokens
        lookahead = min(self.config.num_lookahead_tokens, 1)
        self.encoder = EncoderCache(capacity, lookahead) if self.cross is None else RowEncoder()
        self.transfers = Transfers(self._num_ranks)
        self.unanswered: list[UnansweredPlan] = []
        self.num_invalid_drafts = 0
        self._finished_ids: list[str] = []
        self._rewound: dict[TextbookRequest, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.tables.pool.num_free

    @property
    def max_loading_blocks(self) -> int:
        """Of all requests that load, or have loaded and wait."""
        if self.config.max_loading_blocks is not None:
            return self.config.max_loading_blocks
        return self.num_blocks // 2

    # Requests come and go.

    def add_request(self, message: AddRequest, *, client: int = 0, now: float) -> None:
        """Queue a request, or reject it: ERROR without a prompt, under an id or handle that is
        alive, under an id whose transfers go on, or with an item too large for the encoder; IGNORED
        if too long. One that has all its tokens already ends at once."""
        self._now = now
        request = TextbookRequest.from_message(
            message,
            client=client,
            now=now,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self._eos_token_ids,
        )
        reason = rejection(self, request)
        if reason is not None:
            self._report_end(request, reason)
            return
        self.live.append(request)
        self.queues.jobs.add(request)
        if self.fairness is not None:
            self.fairness.arrived(request)
        self.queues.append(request)
        if self.connector is not None:
            self.connector.on_new_request(self.view(request))
        if len(request.outputs) >= request.max_tokens and not request.is_pooling:
            self.end_output(request, FinishReason.LENGTH_CAPPED)

    def abort(self, handles: Sequence[int], *, client: int = 0) -> None:
        """End these requests; unknown handles are ignored, they may just have finished."""
        for handle in handles:
            request = self._find(client, handle)
            if request is not None:
                self.finish(request, FinishReason.ABORTED)

    def stop_found(self, handle: int, num_tokens: int, *, client: int = 0) -> None:
        """The text of output token `num_tokens` completed a stop string: the rest is void. One that
        comes too late for its part of a session is ignored."""
        request = self._find(client, handle)
        if request is not None and num_tokens <= len(request.outputs):
            del request.outputs[num_tokens:]
            del request.names[request.num_tokens // self.tables.block_size :]
            self.end_output(request, FinishReason.STOPPED)

    def continue_session(self, message: ContinueSession, *, client: int = 0, now: float) -> None:
        """The next input of a session: at once if the session waits for it. A chunk after the last
        one, or for a request that is no session, is ignored."""
        self._now = now
        request = self._find(client, message.handle)
        if request is None or not request.is_resumable:
            return
        if request.chunks and not request.chunks[-1].resumable:
            return
        request.chunks.append(message)
        if request.status is Status.WAITING_FOR_INPUT:
            self._take_chunk(request)

    def _take_chunk(self, request: TextbookRequest) -> None:
        """The next chunk goes after the tokens so far; the request waits to be admitted with it,
        in the queue it stands in."""
        chunk = request.chunks.popleft()
        request.prompt += chunk.prompt_token_ids.tolist()
        request.is_resumable = chunk.resumable
        request.set_limits(chunk.sampling, self.config.max_model_len, self._eos_token_ids)
        request.status = Status.WAITING
        if request.num_tokens >= self.config.max_model_len:
            self.finish(request, FinishReason.IGNORED)

    def _find(self, client: int, handle: int) -> TextbookRequest | None:
        for request in self.live:
            if (request.client, request.handle) == (client, handle):
                return request
        return None

    def end_output(
        self, request: TextbookRequest, reason: FinishReason, pooled: tuple[float, ...] = ()
    ) -> None:
        """The request has all it asked for; a session goes on with its next chunk, unless the
        model's length leaves no room for one."""
        if not request.is_resumable or request.num_tokens >= self.config.max_model_len:
            self.finish(request, reason, pooled)
            return
        self._report_end(request, reason, session_continues=True)
        self._vacate(request)
        request.prompt, request.outputs = request.token_ids, []
        request.num_cached = None
        request.part += 1
        request.status = Status.WAITING_FOR_INPUT
        self.queues.append(request)
        if request.chunks:
            self._take_chunk(request)

    def finish(
        self, request: TextbookRequest, reason: FinishReason, pooled: tuple[float, ...] = ()
    ) -> None:
        """The request ends, wherever it stands."""
        self._report_end(request, reason, pooled)
        hint = request.message.options.cache_hint
        is_loading = request.load is not None and not request.load_is_over
        if hint is not None and request.blocks and not is_loading:
            self.retentions.add(
                request.blocks,
                self.tables.block_size,
                hint,
                owner=request.message.options.tenant,
                now=self._now,
            )
        if self.connector is not None:
            self._finish_transfers(request)
        self._vacate(request)
        request.status = Status.FINISHED
        self.live.remove(request)
        self.queues.jobs.remove(request)
        if self.fairness is not None:
            self.fairness.ended(request)

    def _finish_transfers(self, request: TextbookRequest) -> None:
        """Transfers own their blocks: what is being loaded into is the request's no more, what is
        to be sent gets one reference more."""
        assert self.connector is not None
        if request.status is Status.LOADING and not request.load_is_over:
            self.abandon_load(request)
            self.tables.free(request)
        departure = self.connector.request_finished(
            self.view(request), (int32_array([block.block_id for block in request.blocks]),)
        )
        if departure.delay_free and request.blocks:
            self.tables.pool.touch(request.blocks)
            self.transfers.begin_send(request.request_id, [*request.blocks])

    def abandon_load(self, request: TextbookRequest) -> None:
        """No request waits for it any more, but it still writes."""
        assert self.connector is not None
        assert request.load is not None
        self.tables.pool.touch(request.blocks)
        self.transfers.quarantine.append(request.load)
        self.connector.load_abandoned(request.request_id)

    def _vacate(self, request: TextbookRequest) -> None:
        """Off the row, or out of the queue; its blocks and encoder outputs are free for others."""
        if request.status is Status.RUNNING:
            self._finished_ids.append(request.request_id)
            self._leave_row(request)
        else:
            self.queues.remove(request)
            self.tables.free(request)
        request.was_preempted = False

    def _leave_row(self, request: TextbookRequest) -> None:
        self.running.remove(request)
        self._rewound.pop(request, None)
        self.encoder.drop_all(request)
        self.tables.free(request, newest_plan=self.num_steps)
        request.drafts = []
        request.num_placeholders = 0
        request.life += 1

    def _report_end(
        self,
        request: TextbookRequest,
        reason: FinishReason,
        pooled: tuple[float, ...] = (),
        session_continues: bool = False,
    ) -> None:
        self._finishes.append(
            Finish(
                client=request.client,
                handle=request.handle,
                reason=reason,
                num_output_tokens=len(request.outputs),
                # Usage counts cached tokens of the prompt; hits may reach into resubmitted outputs.
                num_cached_tokens=min(request.num_cached or 0, len(request.prompt)),
                num_preemptions=request.num_preemptions,
                pooled=pooled,
                session_continues=session_continues,
            )
        )

    def set_pause(self, state: PauseState) -> None:
        """How much of its work the scheduler does from now on."""
        self.pause = state

    def begin_epoch(self, epoch: int, now: float) -> None:
        """All workers are new: what was computed, loaded or in flight is gone. Running requests
        wait again, before all others and in their order."""
        self._now = now
        for request in reversed(self.running[:]):
            self.preempt(request)
        for request in self.queues.requests():
            self.tables.free(request)
            self._forget_load(request)
            request.asks_connector = True
            request.asked_at = None
            request.num_cached = None
        self._reset()
        if self.connector is not None:
            self.connector.on_new_epoch(epoch)

    # One step.

    def schedule(self, now: float) -> OraclePlan | None:
        """Plan the next step, at `now` in seconds; None if too many plans are unanswered or there
        is nothing to say."""
        self._now = now
        if len(self.unanswered) >= self.config.max_steps_in_flight:
            return None
        self._give_up_late_loads(now)
        self.retentions.expire(now)
        step = Step(
            budget=0 if self.pause is PauseState.PAUSED_ALL else self.config.token_budget,
            encoder_budget=self.config.max_num_encoder_input_tokens,
            encoder=self.encoder,
        )
        schedule_running(self, step)
        self._name_running(step)
        is_short = step.preempted or step.waits_for_transfers
        if not is_short and self.pause is PauseState.UNPAUSED:
            Admissions(self, step, now).run()
        has_news = step.scheduled or step.preempted or self._finished_ids or self._rewound
        if not has_news and not (self.connector is not None and self.connector.has_pending_work):
            return None
        return settle(self, step)

    def _give_up_late_loads(self, now: float) -> None:
        for request in self.queues.requests():
            if request.status is not Status.LOADING or request.load_is_over:
                continue
            assert request.load is not None
            if now >= request.load.deadline:
                self.fail_load(request)

    def fail_load(self, request: TextbookRequest) -> None:
        """What the request loads or has loaded is of no use: it ends, or waits without it."""
        if self.config.load_failure_policy == "fail":
            self.finish(request, FinishReason.ERROR)
            return
        if not request.load_is_over:
            self.abandon_load(request)
        self.tables.free(request)
        self._forget_load(request)

    def _forget_load(self, request: TextbookRequest) -> None:
        if request.load is not None:
            request.load = None
            request.num_computed = 0
            request.status = Status.WAITING

    def release_youngest_load(self, keep: TextbookRequest) -> bool:
        """DESIGN 9.15: of the requests other than `keep` whose load is over and who wait, the one
        whose load began last loses its blocks. False if there is none."""
        loaded = [
            request
            for request in self.queues.requests()
            if request.load is not None and request.load_is_over and request is not keep
        ]
        if not loaded:
            return False
        youngest = max(loaded, key=lambda request: request.load.number if request.load else 0)
        self.tables.free(youngest)
        self._forget_load(youngest)
        youngest.asks_connector = True
        return True

    def count_loaded(self, request: TextbookRequest) -> None:
        """What a load that is over brought: the tokens before the first block that failed."""
        assert request.load is not None
        num_good = request.load.num_good_tokens(self.tables.block_size)
        request.num_computed = min(num_good, request.num_tokens - 1)

    def with_lookahead(self, end: int) -> int:
        """Tokens for which there must be slots, to compute up to `end`."""
        return min(end + self.config.num_lookahead_tokens, self.config.max_model_len)

    def _name_running(self, step: Step) -> None:
        """DESIGN 9.7: what is verified and in a plan, this one included. Only now, because a victim
        of this step computes nothing of what it had been given."""
        for request in self.running:
            self.tables.name(request, request.num_computed + step.scheduled.get(request, 0))

    def preempt(self, victim: TextbookRequest, step: Step | None = None) -> None:
        """PRE-04; out of a step in the making, or because the workers are new."""
        if step is not None and victim in step.scheduled:
            step.withdraw(victim)  # PRE-03
        self._leave_row(victim)
        victim.status = Status.PREEMPTED
        victim.was_preempted = True
        victim.asks_connector = True
        victim.num_preemptions += 1
        if step is not None:
            step.preempted.append(victim)
        self.queues.prepend(victim)

    def take_news(self) -> tuple[list[str], dict[TextbookRequest, int]]:
        """Ids that left their rows for good, and rewound requests with the tokens they keep, since
        the last call."""
        finished_ids, rewound = self._finished_ids, self._rewound
        self._finished_ids, self._rewound = [], {}
        return finished_ids, rewound

    # What the workers answer.

    def update_from_output(self, answer: Answer) -> None:
        """Answer the oldest unanswered plan. Raises ValueError, with nothing changed, if step or
        tokens are not those of that plan."""
        apply_answer(self, answer)
        self.note_masks()

    def deliver(self, request: TextbookRequest, token: int) -> None:
        """The next output token, for the client."""
        request.outputs.append(token)
        self._deliveries.append(Delivery(request.client, request.handle, token))

    def rewind(self, request: TextbookRequest, num_blocks: int) -> None:
        """A running request falls back to its first `num_blocks` blocks; what samples of it in
        flight brings is void."""
        self.tables.free(request, num_blocks, newest_plan=self.num_steps)
        request.num_computed = num_blocks * self.tables.block_size
        request.num_placeholders = 0
        request.drafts = []
        request.life += 1
        self._rewound[request] = request.num_computed

    def update_from_transfers(self, report: TransferReport, now: float) -> None:
        """A rank's transfers have ended. Loads of which a block failed may end their request."""
        self._now = now
        arrived, freed = self.transfers.apply(report)
        self.tables.pool.free(freed)
        for load in arrived:
            request = next(request for request in self.live if request.load is load)
            if load.failed_block_ids and self.config.load_failure_policy == "fail":
                self.finish(request, FinishReason.ERROR)

    def note_masks(self) -> None:
        """The mask of a step is known when no plan before it is unanswered."""
        if self.unanswered and self.unanswered[0].step > self._newest_mask:
            plan = self.unanswered[0]
            self._newest_mask = plan.step
            if any(entry.request.is_structured for entry in plan.sampling):
                self._masked_steps.append(plan.step)

    def take_masks(self) -> tuple[int, ...]:
        """Steps whose grammar masks have become known since the last call."""
        masks, self._masked_steps = tuple(self._masked_steps), []
        return masks

    def take_outputs(self) -> Outputs:
        """Deliveries and ends since the last call."""
        outputs = Outputs(tuple(self._deliveries), tuple(self._finishes))
        self._deliveries, self._finishes = [], []
        return outputs

    def view(self, request: TextbookRequest) -> RequestView:
        """The request as a connector sees it; block names are left out."""
        message = request.message
        return RequestView(
            request_id=request.request_id,
            token_ids=int32_array(request.token_ids),
            num_prompt_tokens=len(request.prompt),
            block_hashes=(),
            kv_transfer_params=message.options.kv_transfer_params,
            cache_salt=message.options.cache_salt,
            lora_name=request.lora_name,
            job_id=message.options.job_id,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        check_books(self)
