"""Runs any scheduler through a workload, and checks on the way what is true of every correct one.

Everything follows from the workload's seed and from what the scheduler says: two schedulers that
plan alike see the same inputs and leave the same trace.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.protocol.sampling import SamplingParams
from tests.harness.grammar import FakeCompiler
from tests.harness.tokens import Content, sample_token
from tests.harness.transfers import Load, Transfers
from tests.oracle.fake_connector import FakeConnector
from tests.oracle.fake_worker import FakeWorker, WorkerRow, pooled_vector
from tests.oracle.plan import Answer, Finish, OraclePlan, Outputs, SchedulerAdapter
from tests.oracle.workloads import (
    Abort,
    BeginEpoch,
    Continue,
    FindStop,
    Operation,
    Pause,
    Resubmit,
    Submit,
    Workload,
)

SECONDS_PER_TURN = 0.25
MAX_IDLE_TURNS = 1000
"""No workload waits so long between two operations; a scheduler that idles longer is stuck."""


class Event(NamedTuple):
    """One turn's action and everything the scheduler said in that turn.

    action:  "schedule" or "answer".
    plan:    what was planned, if anything.
    outputs: canonical, of the turn's operations and action.
    hooks:   of the connector, that were called.
    num_free_blocks: after the turn.
    """

    turn: int
    action: str
    plan: OraclePlan | None
    outputs: Outputs
    hooks: tuple[tuple[str, ...], ...]
    num_free_blocks: int


def first_difference(trace: list[Event], other: list[Event]) -> str | None:
    """Where two traces part, in words; None if they are equal."""
    for event, other_event in zip(trace, other, strict=False):
        if event != other_event:
            return f"{event}\nis not\n{other_event}"
    if len(trace) != len(other):
        return f"one trace has {len(trace)} turns, the other {len(other)}"
    return None


@dataclass
class Surroundings:
    """What a scheduler is built with beside its settings; one set per scheduler and run."""

    connector: FakeConnector | None
    grammars: FakeCompiler

    @classmethod
    def of(cls, workload: Workload) -> "Surroundings":
        """What the workload asks for."""
        connector = None
        if workload.has_connector:
            connector = FakeConnector(
                workload.seed,
                num_ranks=workload.num_ranks,
                block_size=workload.cache.block_size,
                fails=workload.seed % 2 == 0,
                sync_fails=workload.sync_loads_fail,
            )

        def sample(request_id: str, position: int) -> int:
            return sample_token(request_id, position, workload.vocab_size)

        return cls(connector, FakeCompiler(sample=sample, vocab_size=workload.vocab_size))


def drive(
    scheduler: SchedulerAdapter,
    workload: Workload,
    surroundings: Surroundings | None = None,
    *,
    check_every: int = 1,
) -> list[Event]:
    """Run the workload to its end and return what happened.

    surroundings: those that the scheduler was built with.
    check_every:  turns between two looks at the scheduler's own invariants.

    On the way, whatever is true of every correct scheduler is checked (AssertionError): plans can
    be executed, every request gets exactly its own tokens and one end, no block is lost.
    """
    around = surroundings or Surroundings.of(workload)
    return _Drive(scheduler, workload, around, check_every).run()


@dataclass
class _Stream:
    """A live request as its client sees it.

    prompt, outputs: of the current part of a session; the outputs a request came with come first.
    stop_at: the output token in which a stop string was found.
    chunks:  inputs that wait for the end of this part.
    """

    client: int
    request: AddRequest
    prompt: list[int] = field(init=False)
    outputs: list[int] = field(init=False)
    sampling: SamplingParams = field(init=False)
    is_resumable: bool = field(init=False)
    stop_at: int | None = None
    part: int = 0
    waits_for_input: bool = False
    chunks: deque[ContinueSession] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt_token_ids.tolist()
        self.outputs = self.request.output_token_ids.tolist()
        self.sampling = self.request.sampling
        self.is_resumable = self.request.options.resumable

    @property
    def content(self) -> Content:
        """What its KV depends on beside tokens."""
        lora_name = (
            self.request.options.lora.name if self.request.options.lora is not None else None
        )
        return Content(
            f"{self.request.options.cache_salt}/{lora_name}", self.request.options.multimodal
        )

    @property
    def token_key(self) -> str:
        """Of the worker's draws."""
        return f"{self.request.request_id}#{self.part}" if self.part else self.request.request_id

    def add_chunk(self, chunk: ContinueSession) -> None:
        """The client sends more, unless the last input is on its way already."""
        if self.is_resumable and (not self.chunks or self.chunks[-1].resumable):
            self.chunks.append(chunk)
            if self.waits_for_input:
                self.next_part()

    def end_part(self) -> None:
        """The output has ended, the session has not."""
        self.prompt, self.outputs = self.prompt + self.outputs[: self.stop_at], []
        self.stop_at = None
        self.part += 1
        self.waits_for_input = True
        if self.chunks:
            self.next_part()

    def next_part(self) -> None:
        chunk = self.chunks.popleft()
        self.prompt = self.prompt + chunk.prompt_token_ids.tolist()
        self.sampling = chunk.sampling
        self.is_resumable = chunk.resumable
        self.waits_for_input = False


class _Drive:
    """One run. A turn does the operations that are due, then plans one step or answers one."""

    def __init__(
        self,
        scheduler: SchedulerAdapter,
        workload: Workload,
        surroundings: Surroundings,
        check_every: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._check_every = check_every
        self._workload = workload
        self._connector = surroundings.connector
        self._grammars = surroundings.grammars
        self._rng = Random(workload.seed)
        self._worker = FakeWorker(
            workload.scheduler,
            block_size=workload.cache.block_size,
            num_blocks=workload.num_blocks,
            vocab_size=workload.vocab_size,
            cross=workload.cross,
        )
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._operations = deque(workload.operations)
        self._unanswered: deque[tuple[OraclePlan, Answer]] = deque()
        self._contents: dict[str, Content] = {}
        self._sync_loads: dict[int, list[Load]] = {}  # by step that is unanswered
        self._transfers = Transfers(workload.num_ranks)
        if self._connector is not None:
            sizes = [workload.cache.block_size]
            self._connector.bind(self._transfers, sizes, self._contents)
        self._masks: set[int] = set()
        self._turn = 0
        self._epoch = 1
        self._outputs = Outputs((), ())

    @property
    def _now(self) -> float:
        return self._turn * SECONDS_PER_TURN

    def run(self) -> list[Event]:
        trace: list[Event] = []
        num_idle = 0
        while num_idle < MAX_IDLE_TURNS:
            self._outputs = Outputs((), ())
            self._grammars.turn = self._turn
            if self._connector is not None:
                self._connector.turn = self._turn
                self._report_transfers(self._connector)
            while self._operations and self._operations[0].turn <= self._turn:
                self._perform(self._operations.popleft())
            event = self._act()
            trace.append(event)
            is_idle = event.action == "schedule" and event.plan is None and not self._unanswered
            is_idle = is_idle and not (self._connector is not None and self._connector.is_busy)
            if is_idle and not self._operations and not self._streams:
                break
            num_idle = num_idle + 1 if is_idle else 0
            self._turn += 1
            if is_idle and self._operations and not self._waits_for_time:
                self._turn = max(self._turn, self._operations[0].turn)
        assert not self._streams, f"{list(self._streams)} are never answered"
        assert not self._worker.rows, f"{list(self._worker.rows)} are never dropped"
        assert self._scheduler.num_free_blocks == self._workload.num_blocks - 1
        return trace

    @property
    def _waits_for_time(self) -> bool:
        """Some request may go on although nothing is done."""
        has_timers = self._connector is not None or "grammar" in self._workload.features
        return has_timers and bool(self._streams)

    def _act(self) -> Event:
        plan = None
        action = "schedule"
        if self._unanswered and self._rng.random() < self._workload.answer_share:
            action = "answer"
            answered, answer = self._unanswered.popleft()
            is_masked = not answered.has_structured_output or answer.step in self._masks
            assert is_masked, f"step {answer.step} waits for its mask"
            self._scheduler.update_from_output(answer)
            del self._transfers.unanswered[answer.step]
            for load in self._sync_loads.pop(answer.step):
                self._transfers.syncing.remove(load)
        else:
            plan = self._scheduler.schedule(self._now)
            if plan is not None:
                self._execute(plan)
        self._masks.update(self._scheduler.take_masks())
        self._settle()
        if self._turn % self._check_every == 0:
            self._scheduler.check_invariants()
        hooks = () if self._connector is None else self._connector.take_log()
        num_free = self._scheduler.num_free_blocks
        return Event(self._turn, action, plan, self._outputs.canonical(), hooks, num_free)

    def _execute(self, plan: OraclePlan) -> None:
        """At once: the worker runs steps in order, so only the answer has to wait."""
        by_id = {stream.request.request_id: stream for stream in self._streams.values()}
        changed = [admission.request_id for admission in plan.admitted]
        changed += [request_id for request_id, _ in plan.rewound]
        rows = {request_id: self._make_row(by_id[request_id]) for request_id in changed}
        assert {entry.request_id for entry in plan.scheduled} <= set(by_id)
        failed: set[int] = set()
        loads: list[Load] = []
        if self._connector is not None:
            loads, self._connector.sync_loads = self._connector.sync_loads, []
        for load in loads:
            assert self._connector is not None
            self._worker.write_load(load, self._connector.failed[load.request_id])
            failed.update(self._connector.failed[load.request_id])
        answer = self._worker.execute(plan, rows)._replace(failed_block_ids=tuple(sorted(failed)))
        self._unanswered.append((plan, answer))
        self._sync_loads[plan.step] = loads
        self._transfers.unanswered[plan.step] = {
            block_id for entry in plan.scheduled for block_id in entry.block_ids
        }
        assert len(self._unanswered) <= self._workload.scheduler.max_steps_in_flight

    def _make_row(self, stream: _Stream) -> WorkerRow:
        request = stream.request
        max_model_len = self._workload.scheduler.max_model_len
        max_tokens = stream.sampling.max_tokens or max_model_len
        last_computed = min(len(stream.prompt) + max_tokens, max_model_len) - 1
        if request.options.pooling is not None:
            last_computed = len(stream.prompt)
        return WorkerRow(
            token_key=stream.token_key,
            num_prompt=len(stream.prompt),
            last_computed=last_computed,
            token_ids=stream.prompt + stream.outputs,
            content=stream.content,
            lora_name=request.options.lora.name if request.options.lora is not None else None,
            is_pooling=request.options.pooling is not None,
        )

    # Transfers.

    def _report_transfers(self, connector: FakeConnector) -> None:
        """A background load may write at any time; here, as late as it may."""
        for report in connector.take_reports(self._epoch):
            for request_id in dict.fromkeys(report.finished_receiving):
                load = self._transfers.loading[request_id]
                self._transfers.report("load", request_id, report.rank)
                if request_id not in self._transfers.loading:
                    self._worker.write_load(load, connector.failed[request_id])
            for request_id in report.finished_sending:
                if request_id in self._transfers.sending:  # not the unknown one
                    self._transfers.report("send", request_id, report.rank)
            self._scheduler.update_from_transfers(report, self._now)
            self._settle()

    # Operations.

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
                if stream is not None and not stream.request.options.resumable:
                    self._resubmit(stream, new_handle)
            case Continue(_, client, message):
                stream = self._streams.get((client, message.handle))
                if stream is not None:
                    stream.add_chunk(message)
                self._scheduler.continue_session(message, client=client, now=self._now)
                self._settle()
            case Pause(_, state):
                self._scheduler.set_pause(state)
            case BeginEpoch():
                self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._scheduler.begin_epoch(self._epoch, self._now)
        self._unanswered.clear()
        self._sync_loads.clear()
        self._transfers.clear()
        self._worker.begin_epoch()
        self._settle()

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
        if self._connector is not None and not is_duplicate:
            transfers = self._transfers
            is_duplicate = request.request_id in (*transfers.loading, *transfers.sending)
        if not is_duplicate:
            self._streams[key] = _Stream(client, request)
            self._contents[request.request_id] = self._streams[key].content
        self._scheduler.add_request(request, client=client, now=self._now)
        if is_duplicate:
            self._expect_rejection(key)
        else:
            self._settle()

    # What clients receive.

    def _expect_rejection(self, key: tuple[int, int]) -> None:
        outputs = self._scheduler.take_outputs()
        assert not outputs.deliveries
        assert [finish[:2] for finish in outputs.finishes] == [key]
        assert outputs.finishes[0].reason in (FinishReason.ERROR, FinishReason.IGNORED)
        self._record(outputs)

    def _settle(self) -> None:
        outputs = self._scheduler.take_outputs()
        for client, handle, token in outputs.deliveries:
            self._streams[client, handle].outputs.append(token)
        for finish in outputs.finishes:
            stream = self._streams[finish[:2]]
            self._check_end(stream, finish)
            if finish.session_continues:
                assert stream.is_resumable
                stream.end_part()
            else:
                del self._streams[finish[:2]]
        self._record(outputs)

    def _record(self, outputs: Outputs) -> None:
        self._outputs = Outputs(
            self._outputs.deliveries + outputs.deliveries, self._outputs.finishes + outputs.finishes
        )

    def _check_end(self, stream: _Stream, finish: Finish) -> None:
        """Whatever was scheduled how, the output of a request is known in advance."""
        outputs, reason = self._expected_end(stream)
        fails = self._workload.scheduler.load_failure_policy == "fail"
        has_failed = finish.reason is FinishReason.ERROR and self._connector is not None and fails
        if finish.reason is FinishReason.ABORTED or (
            has_failed and reason is not FinishReason.ERROR
        ):
            assert finish.num_output_tokens == len(stream.outputs)
            assert stream.outputs == outputs[: len(stream.outputs)]
            assert not finish.session_continues
            return
        ended_naturally = reason not in (FinishReason.ERROR, FinishReason.IGNORED)
        num_tokens = len(stream.prompt) + len(stream.outputs[: stream.stop_at])
        has_room = num_tokens < self._workload.scheduler.max_model_len
        may_continue = ended_naturally and stream.is_resumable and has_room
        assert finish.session_continues == may_continue
        if stream.stop_at is not None:
            assert finish.reason is FinishReason.STOPPED
            assert finish.num_output_tokens == stream.stop_at
            assert stream.outputs == outputs[: len(stream.outputs)]
        else:
            assert (finish.reason, finish.num_output_tokens) == (reason, len(outputs))
            assert stream.outputs == outputs
        is_pooled = stream.request.options.pooling is not None and ended_naturally
        assert finish.pooled == (pooled_vector(stream.request.request_id) if is_pooled else ())

    def _expected_end(self, stream: _Stream) -> tuple[list[int], FinishReason]:
        """Of the current part; the outputs it begins with are a request's own."""
        is_first = stream.part == 0
        outputs = stream.request.output_token_ids.tolist() if is_first else []
        sampling = stream.sampling
        num_prompt = len(stream.prompt)
        longest = self._workload.scheduler.max_model_len - num_prompt
        if num_prompt == 0 or self._is_too_large(stream.request):
            return outputs, FinishReason.ERROR
        is_pooled = stream.request.options.pooling is not None
        if len(outputs) >= longest + is_pooled:
            return outputs, FinishReason.IGNORED
        if is_pooled:
            return outputs, FinishReason.STOPPED
        stop_ids = {*sampling.stop_token_ids}
        if not sampling.ignore_eos:
            stop_ids |= {*self._workload.eos_token_ids}
        is_structured = stream.request.options.structured_output is not None
        final_ids = self._workload.eos_token_ids if is_structured else ()
        while len(outputs) < min(sampling.max_tokens or longest, longest):
            outputs.append(sample_token(stream.token_key, len(outputs), self._workload.vocab_size))
            may_stop = len(outputs) >= sampling.min_tokens
            if (may_stop and outputs[-1] in stop_ids) or outputs[-1] in final_ids:
                return outputs, FinishReason.STOPPED
            if len(outputs) < min(sampling.max_tokens or longest, longest) and _repeats(
                outputs, sampling
            ):
                return outputs, FinishReason.REPETITION
        return outputs, FinishReason.LENGTH_CAPPED

    def _is_too_large(self, request: AddRequest) -> bool:
        config = self._workload.scheduler
        if self._workload.cross is not None:
            sizes = [item.num_tokens for item in request.options.multimodal]
            return len(sizes) != 1 or sizes[0] > self._workload.cross.max_encoder_tokens
        room = config.max_num_encoder_input_tokens
        if config.encoder_cache_size is not None:
            room = min(room, config.encoder_cache_size)
        return any(item.num_tokens > room for item in request.options.multimodal)


def _repeats(outputs: list[int], sampling: SamplingParams) -> bool:
    """Whether the output ends in a pattern that comes often enough in a row."""
    detection = sampling.repetition
    if detection is None:
        return False
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        window = outputs[-size * detection.min_count :]
        if len(window) == size * detection.min_count and all(
            token == window[index % size] for index, token in enumerate(window)
        ):
            return True
    return False
