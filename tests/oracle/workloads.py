"""Random workloads, and the driver that runs any scheduler through one.

Everything follows from the workload's seed and from what the scheduler says: two schedulers that
plan alike see the same inputs and leave the same trace.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from longshore.protocol.arrays import int32_array
from longshore.protocol.client import AddRequest, FinishReason
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from tests.oracle.fake_worker import FakeWorker, WorkerRow, sample_token
from tests.oracle.plan import Finish, OraclePlan, Outputs, SchedulerAdapter

SECONDS_PER_TURN = 0.25
MAX_IDLE_TURNS = 1000
"""No workload waits so long between two operations; a scheduler that idles longer is stuck."""


@dataclass(frozen=True)
class Submit:
    """A request arrives, perhaps under a handle or id that is alive."""

    turn: int
    client: int
    request: AddRequest


@dataclass(frozen=True)
class Abort:
    """The client goes away; some handles may be unknown or have finished."""

    turn: int
    client: int
    handles: tuple[int, ...]


@dataclass(frozen=True)
class FindStop:
    """The gateway sees a stop string end somewhere in the output so far, if there is any.

    share: how far into the output, from 0 to below 1.
    """

    turn: int
    client: int
    handle: int
    share: float


@dataclass(frozen=True)
class Resubmit:
    """If the request is alive, abort it and send it again with the tokens it has."""

    turn: int
    client: int
    handle: int
    new_handle: int


Operation: TypeAlias = Submit | Abort | FindStop | Resubmit


@dataclass(frozen=True)
class Workload:
    """Settings, and operations in the order of their turns.

    num_blocks:   with the null block; always enough for the longest request.
    answer_share: probability that a turn answers a plan, if one is unanswered, instead of planning.
    """

    seed: int
    scheduler: SchedulerConfig
    cache: CacheConfig
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    answer_share: float
    operations: tuple[Operation, ...]

    @classmethod
    def random(cls, seed: int) -> "Workload":
        """Small pools, prompts that share prefixes, and every kind of operation on 3 to 40
        requests."""
        rng = Random(seed)
        scheduler = _random_scheduler_config(rng)
        block_size = rng.choice((1, 2, 4, 4, 8, 16))
        blocks_per_request = -(-scheduler.max_model_len // block_size)
        spare = rng.choice((0, 0, 1, rng.randrange(1, 5), blocks_per_request * 4))
        vocab_size = rng.choice((5, 20, 100))
        maker = _RequestMaker(rng, scheduler.max_model_len, vocab_size)
        return cls(
            seed=seed,
            scheduler=scheduler,
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=1 + blocks_per_request + spare,
                enable_prefix_caching=rng.random() < 0.8,
            ),
            num_blocks=1 + blocks_per_request + spare,
            vocab_size=vocab_size,
            eos_token_ids=tuple(rng.sample(range(vocab_size), rng.randrange(3))),
            answer_share=rng.choice((0.2, 0.5, 0.8)),
            operations=maker.make_operations(rng.randrange(3, 41)),
        )


def _random_scheduler_config(rng: Random) -> SchedulerConfig:
    max_model_len = rng.randrange(4, 65)
    is_chunked = rng.random() < 0.75
    budget = rng.randrange(1, 2 * max_model_len)
    if not is_chunked:
        budget = max(budget, max_model_len)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=rng.choice((1, 2, 3, 5, 8, 16)),
        max_num_batched_tokens=budget + rng.randrange(3),
        max_num_scheduled_tokens=budget,
        long_prefill_token_threshold=rng.choice((0, 0, rng.randrange(1, 20))) * is_chunked,
        enable_chunked_prefill=is_chunked,
        policy=rng.choice(("fcfs", "priority")),
        max_steps_in_flight=rng.choice((1, 2, 2)),
    )


class _RequestMaker:
    """Draws requests, and what happens to them, for models of `max_model_len` tokens."""

    def __init__(self, rng: Random, max_model_len: int, vocab_size: int) -> None:
        self._rng = rng
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._bases = [self._tokens(max_model_len) for _ in range(rng.randrange(1, 4))]
        self._num_handles = 0
        self._earlier: list[AddRequest] = []
        self._follow_up_share = rng.choice((0.0, 0.3, 0.8))
        self._longest_prompt = 1 + int(rng.choice((0.3, 0.6, 1.0)) * (max_model_len - 2))
        self._tail_share = rng.random()
        self._abort_share = rng.choice((0.0, 0.2, 0.6))
        self._gaps = rng.choice(((0,), (0, 1), (0, 0, 2, 8), (0, 0, 1, 30)))

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]

    def make_operations(self, num_requests: int) -> tuple[Operation, ...]:
        """Requests in bursts and pauses, with aborts, stops and resubmits some turns later."""
        rng = self._rng
        operations: list[Operation] = []
        turn = 0
        for number in range(num_requests):
            turn += rng.choice(self._gaps)
            client = rng.randrange(2)
            request = self._make_request(f"request-{number}", self._new_handle())
            self._earlier.append(request)
            operations.append(Submit(turn, client, request))
            operations += self._make_sequels(turn, client, request)
        operations.sort(key=lambda operation: operation.turn)
        return tuple(operations)

    def _make_sequels(self, turn: int, client: int, request: AddRequest) -> Iterator[Operation]:
        rng = self._rng
        handle = request.handle
        later = turn + rng.randrange(60)
        if rng.random() < self._abort_share:
            yield Abort(later, client, (handle, rng.randrange(1 + 2 * handle)))
        if rng.random() < 0.1:
            yield FindStop(turn + rng.randrange(60), client, handle, rng.random())
        if rng.random() < 0.15:
            new_handle = self._new_handle()
            yield Resubmit(later, client, handle, new_handle)
            yield Abort(later + rng.randrange(200), client, (new_handle,))
        if rng.random() < 0.05:
            yield Submit(later, client, replace(request, request_id=f"{request.request_id} again"))
        if rng.random() < 0.05:
            yield Submit(later, 1 - client, replace(request, handle=self._new_handle()))

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles - 1

    def _make_request(self, request_id: str, handle: int) -> AddRequest:
        rng = self._rng
        prompt = self._make_prompt()
        max_tokens = rng.choice((None, None, 1, rng.randrange(1, 40), rng.randrange(1, 40)))
        num_outputs = rng.choice((0,) * 6 + (rng.randrange(1, 12),))
        outputs = [sample_token(request_id, i, self._vocab_size) for i in range(num_outputs)]
        stop_ids = rng.sample(range(self._vocab_size), rng.choice((0, 0, 0, 1, 2)))
        return AddRequest(
            request_id=request_id,
            handle=handle,
            prompt_token_ids=int32_array(prompt),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice((0, 0, rng.randrange(min(max_tokens or 10, 10) + 1))),
                stop_token_ids=tuple(stop_ids),
                ignore_eos=rng.random() < 0.3,
            ),
            output_token_ids=int32_array(outputs),
            priority=rng.choice((0, 0, -2, -1, 1, 2)),
            age_s=rng.choice((0.0, 0.0, 0.25, 1.5)),
            cache_salt=rng.choice((None, None, None, "salt")),
            skip_reading_prefix_cache=rng.random() < 0.1,
        )

    def _make_prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.04:
            return rng.choice(([], self._tokens(self._max_model_len + rng.randrange(3))))
        if self._earlier and rng.random() < self._follow_up_share:
            return self._make_follow_up(rng.choice(self._earlier))
        longest = self._longest_prompt
        prompt = rng.choice(self._bases)[: rng.randrange(1, longest + 1)]
        if rng.random() < self._tail_share:
            prompt = prompt + self._tokens(rng.choice((1, rng.randrange(longest + 1))))
        return prompt[:longest]

    def _make_follow_up(self, request: AddRequest) -> list[int]:
        """The next turn of a conversation: an earlier prompt, some of its output, a little more."""
        rng = self._rng
        prompt = request.prompt_token_ids.tolist()
        for position in range(rng.randrange(20)):
            prompt.append(sample_token(request.request_id, position, self._vocab_size))
        prompt += self._tokens(rng.randrange(3))
        return prompt[: self._max_model_len - 1] or self._tokens(1)


class Event(NamedTuple):
    """One turn's action and everything the scheduler said in that turn.

    action:  "schedule" or "answer".
    plan:    what was planned, if anything.
    outputs: canonical, of the turn's operations and action.
    num_free_blocks: after the turn.
    """

    turn: int
    action: str
    plan: OraclePlan | None
    outputs: Outputs
    num_free_blocks: int


def first_difference(trace: list[Event], other: list[Event]) -> str | None:
    """Where two traces part, in words; None if they are equal."""
    for event, other_event in zip(trace, other, strict=False):
        if event != other_event:
            return f"{event}\nis not\n{other_event}"
    if len(trace) != len(other):
        return f"one trace has {len(trace)} turns, the other {len(other)}"
    return None


def drive(scheduler: SchedulerAdapter, workload: Workload) -> list[Event]:
    """Run the workload to its end and return what happened.

    On the way, whatever is true of every correct scheduler is checked (AssertionError): plans can
    be executed, every request gets exactly its own tokens and one end, no block is lost.
    """
    return _Drive(scheduler, workload).run()


@dataclass
class _Stream:
    """A live request as its client sees it.

    outputs: of its whole life; those it came with are the first.
    stop_at: the output token in which a stop string was found.
    """

    client: int
    request: AddRequest
    outputs: list[int] = field(init=False)
    stop_at: int | None = None

    def __post_init__(self) -> None:
        self.outputs = self.request.output_token_ids.tolist()


class _Drive:
    """One run. A turn does the operations that are due, then plans one step or answers one."""

    def __init__(self, scheduler: SchedulerAdapter, workload: Workload) -> None:
        self._scheduler = scheduler
        self._workload = workload
        self._rng = Random(workload.seed)
        self._worker = FakeWorker(
            workload.scheduler,
            block_size=workload.cache.block_size,
            num_blocks=workload.num_blocks,
            vocab_size=workload.vocab_size,
        )
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._operations = deque(workload.operations)
        self._unanswered: deque[tuple[int, dict[str, int]]] = deque()
        self._turn = 0
        self._outputs = Outputs((), ())

    def run(self) -> list[Event]:
        trace: list[Event] = []
        num_idle = 0
        while num_idle < MAX_IDLE_TURNS:
            self._outputs = Outputs((), ())
            while self._operations and self._operations[0].turn <= self._turn:
                self._perform(self._operations.popleft())
            event = self._act()
            trace.append(event)
            is_idle = event.action == "schedule" and event.plan is None and not self._unanswered
            if is_idle and not self._operations and not self._streams:
                break
            num_idle = num_idle + 1 if is_idle else 0
            self._turn += 1
        assert not self._streams, f"{list(self._streams)} are never answered"
        assert not self._worker.rows, f"{list(self._worker.rows)} are never dropped"
        assert self._scheduler.num_free_blocks == self._workload.num_blocks - 1
        return trace

    def _act(self) -> Event:
        plan = None
        action = "schedule"
        if self._unanswered and self._rng.random() < self._workload.answer_share:
            action = "answer"
            self._scheduler.update_from_output(*self._unanswered.popleft())
        else:
            plan = self._scheduler.schedule(self._turn * SECONDS_PER_TURN)
            if plan is not None:
                self._execute(plan)
        self._settle()
        self._scheduler.check_invariants()
        return Event(
            self._turn, action, plan, self._outputs.canonical(), self._scheduler.num_free_blocks
        )

    def _execute(self, plan: OraclePlan) -> None:
        """At once: the worker runs steps in order, so only the answer has to wait."""
        by_id = {stream.request.request_id: stream for stream in self._streams.values()}
        rows = {
            admission.request_id: self._make_row(by_id[admission.request_id])
            for admission in plan.admitted
        }
        assert {entry.request_id for entry in plan.scheduled} <= set(by_id)
        self._unanswered.append((plan.step, self._worker.execute(plan, rows)))
        assert len(self._unanswered) <= self._workload.scheduler.max_steps_in_flight

    def _make_row(self, stream: _Stream) -> WorkerRow:
        prompt = stream.request.prompt_token_ids.tolist()
        max_model_len = self._workload.scheduler.max_model_len
        max_tokens = stream.request.sampling.max_tokens or max_model_len
        return WorkerRow(
            num_prompt=len(prompt),
            last_computed=min(len(prompt) + max_tokens, max_model_len) - 1,
            token_ids=prompt + stream.outputs,
            salt=stream.request.cache_salt,
        )

    def _perform(self, operation: Operation) -> None:
        match operation:
            case Submit(_, client, request):
                self._submit(client, request)
            case Abort(_, client, handles):
                self._scheduler.abort(handles, client=client)
                self._settle()
                for handle in handles:
                    assert (client, handle) not in self._streams, "still alive after its abort"
            case FindStop(_, client, handle, share):
                stream = self._streams.get((client, handle))
                if stream is not None and stream.outputs:
                    stream.stop_at = 1 + int(share * len(stream.outputs))
                    self._scheduler.stop_found(handle, stream.stop_at, client=client)
                else:
                    self._scheduler.stop_found(10**6 + handle, 1, client=client)
                self._settle()
            case Resubmit(_, client, handle, new_handle):
                stream = self._streams.get((client, handle))
                if stream is not None:
                    self._resubmit(stream, new_handle)

    def _resubmit(self, stream: _Stream, new_handle: int) -> None:
        request = stream.request
        self._scheduler.abort((request.handle,), client=stream.client)
        self._settle()
        again = replace(
            request,
            handle=new_handle,
            output_token_ids=int32_array(stream.outputs),
            age_s=request.age_s + SECONDS_PER_TURN,
        )
        self._submit(stream.client, again)

    def _submit(self, client: int, request: AddRequest) -> None:
        key = (client, request.handle)
        live_ids = {stream.request.request_id for stream in self._streams.values()}
        is_duplicate = key in self._streams or request.request_id in live_ids
        if not is_duplicate:
            self._streams[key] = _Stream(client, request)
        now = self._turn * SECONDS_PER_TURN
        self._scheduler.add_request(request, client=client, now=now)
        if is_duplicate:
            self._expect_refusal(key)
        else:
            self._settle()

    def _expect_refusal(self, key: tuple[int, int]) -> None:
        outputs = self._scheduler.take_outputs()
        assert not outputs.deliveries
        assert [finish[:2] for finish in outputs.finishes] == [key]
        assert outputs.finishes[0].reason is FinishReason.ERROR
        self._record(outputs)

    def _settle(self) -> None:
        outputs = self._scheduler.take_outputs()
        for client, handle, token in outputs.deliveries:
            self._streams[client, handle].outputs.append(token)
        for finish in outputs.finishes:
            self._check_end(self._streams.pop(finish[:2]), finish)
        self._record(outputs)

    def _record(self, outputs: Outputs) -> None:
        self._outputs = Outputs(
            self._outputs.deliveries + outputs.deliveries, self._outputs.finishes + outputs.finishes
        )

    def _check_end(self, stream: _Stream, finish: Finish) -> None:
        """Whatever was scheduled how, the output of a request is known in advance."""
        outputs, reason = self._expected_end(stream.request)
        if finish.reason is FinishReason.ABORTED:
            assert finish.num_output_tokens == len(stream.outputs)
            assert stream.outputs == outputs[: len(stream.outputs)]
        elif stream.stop_at is not None:
            assert finish.reason is FinishReason.STOPPED
            assert finish.num_output_tokens == stream.stop_at
            assert stream.outputs == outputs[: len(stream.outputs)]
        else:
            assert (finish.reason, finish.num_output_tokens) == (reason, len(outputs))
            assert stream.outputs == outputs

    def _expected_end(self, request: AddRequest) -> tuple[list[int], FinishReason]:
        outputs = request.output_token_ids.tolist()
        num_prompt = len(request.prompt_token_ids)
        longest = self._workload.scheduler.max_model_len - num_prompt
        if num_prompt == 0:
            return outputs, FinishReason.ERROR
        if len(outputs) >= longest:
            return outputs, FinishReason.IGNORED
        sampling = request.sampling
        stop_ids = {*sampling.stop_token_ids}
        if not sampling.ignore_eos:
            stop_ids |= {*self._workload.eos_token_ids}
        while len(outputs) < min(sampling.max_tokens or longest, longest):
            token = sample_token(request.request_id, len(outputs), self._workload.vocab_size)
            outputs.append(token)
            if token in stop_ids and len(outputs) >= sampling.min_tokens:
                return outputs, FinishReason.STOPPED
        return outputs, FinishReason.LENGTH_CAPPED
