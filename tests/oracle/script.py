"""Scenarios as tables: what is done to a scheduler, line by line, and the plan that must follow.

`play` runs one on any `SchedulerAdapter`. Requests are called by id; their handles count from 0 in
the order of their `Add` lines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from longshore.connectors.base import Match, Matched, RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.outputs import FinishReason, TransferReport
from longshore.protocol.requests import (
    AddRequest,
    ContinueSession,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    RequestOptions,
    StructuredOutput,
)
from longshore.protocol.sampling import RepetitionDetection, SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.step.planner import PauseState
from tests.oracle.plan import Answer as OracleAnswer
from tests.oracle.plan import OraclePlan, Outputs, SchedulerAdapter

CLIENT = 0


@dataclass(frozen=True)
class Add:
    """A request arrives, all of them at time 0; `refused` tells how it ends on the spot."""

    request_id: str
    prompt: Iterable[int]
    max_tokens: int | None = None
    outputs: Iterable[int] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    age_s: float = 0.0
    salt: str | None = None
    skips_cache: bool = False
    handle: int | None = None
    refused: FinishReason | None = None
    lora: str | None = None
    items: tuple[tuple[str, int, int], ...] = ()  # (hash, offset, tokens)
    is_pooling: bool = False
    grammar: StructuredOutput | None = None
    job_id: str | None = None
    resumable: bool = False
    repetition: RepetitionDetection | None = None

    def message(self, handle: int) -> AddRequest:
        """The request as the client sends it."""
        return AddRequest(
            request_id=self.request_id,
            handle=handle,
            prompt_token_ids=int32_array([*self.prompt]),
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                stop_token_ids=self.stop_ids,
                ignore_eos=self.ignore_eos,
                repetition=self.repetition,
            ),
            output_token_ids=int32_array([*self.outputs]),
            age_s=self.age_s,
            options=RequestOptions(
                priority=self.priority,
                cache_salt=self.salt,
                skip_reading_prefix_cache=self.skips_cache,
                lora=None if self.lora is None else LoRARequest(self.lora),
                multimodal=tuple(MultimodalFeature(*item) for item in self.items),
                pooling=PoolingParams() if self.is_pooling else None,
                structured_output=self.grammar,
                job_id=self.job_id,
                resumable=self.resumable,
            ),
        )


@dataclass(frozen=True)
class Plan:
    """The next step. `cached`, `tables` and `drafts` are looked at only for the requests they name.

    scheduled: tokens by request, in scheduling order.
    cached:    prefix hits of admitted requests, in tokens.
    tables:    block tables.
    """

    scheduled: Mapping[str, int]
    new: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    cached: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    encoder_inputs: tuple[tuple[str, int], ...] = ()
    freed_hashes: tuple[str, ...] = ()
    rewound: tuple[tuple[str, int], ...] = ()
    num_invalid_drafts: int = 0


@dataclass(frozen=True)
class NoPlan:
    """Nothing to plan, or too many plans unanswered."""


@dataclass(frozen=True)
class Answer:
    """The oldest unanswered plan is answered with these tokens, which are all that it samples.

    tokens:  several where drafts were right; none where a vector was asked for.
    dropped: requests whose tokens reach nobody.
    ended:   requests whose output ends with their token; what comes behind the first `told` of its
             tokens is dropped.
    drafts:  proposed for the next step.
    failed:  blocks that the step was to load and did not.
    """

    tokens: Mapping[str, int | tuple[int, ...]]
    dropped: tuple[str, ...] = ()
    ended: Mapping[str, FinishReason] = field(default_factory=dict)
    told: Mapping[str, int] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pooled: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Abort:
    """The client goes away while the request lives."""

    request_id: str


@dataclass(frozen=True)
class StopAt:
    """A stop string ended in output token `num_tokens` of a live request."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True)
class Usage:
    """How the last end of a request was accounted."""

    request_id: str
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True)
class Free:
    """So many blocks are free now."""

    num_blocks: int


@dataclass(frozen=True)
class SetPause:
    """An operator wants less, or everything again."""

    state: PauseState


@dataclass(frozen=True)
class Chunk:
    """The next input of a session."""

    request_id: str
    prompt: Iterable[int]
    max_tokens: int | None = None
    is_last: bool = False


@dataclass(frozen=True)
class Loads:
    """What was begun since the last look: (request, its blocks, tokens to load)."""

    begun: tuple[tuple[str, tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Received:
    """A rank reports loads that have ended. `ended`: requests that end with that."""

    request_ids: tuple[str, ...]
    failed: tuple[int, ...] = ()
    rank: int = 0
    ended: Mapping[str, FinishReason] = field(default_factory=dict)


@dataclass(frozen=True)
class NewEpoch:
    """All workers are new."""

    epoch: int


Line: TypeAlias = (
    Add
    | Plan
    | NoPlan
    | Answer
    | Abort
    | StopAt
    | Usage
    | Free
    | SetPause
    | Chunk
    | Loads
    | Received
    | NewEpoch
)


class ScriptedConnector(SchedulerConnector):
    """Answers each question with the next of a request's `offers`, the last one again and again;
    `begun` is for `Loads`."""

    def __init__(self, offers: Mapping[str, tuple[Match, ...]]) -> None:
        self._offers = {request_id: [*answers] for request_id, answers in offers.items()}
        self.begun: list[tuple[str, tuple[int, ...], int]] = []
        self._has_news = False

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        answers = self._offers.get(request.request_id, [Matched(0)])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self._has_news = True
            table = tuple(block_ids[0].tolist())
            self.begun.append((request.request_id, table, num_external_tokens))

    def build_connector_meta(self, step: object) -> bytes:
        self._has_news = False
        return b""

    @property
    def has_pending_work(self) -> bool:
        return self._has_news


@dataclass(frozen=True)
class Scenario:
    """Settings and lines; `requirements` are the ids of the checklist that it is about.

    num_blocks: with the null block.
    feature:    of `workloads.ALL_FEATURES`, the one that it needs.
    offers:     what the connector answers; None without one.
    """

    name: str
    requirements: tuple[str, ...]
    scheduler: SchedulerConfig
    cache: CacheConfig
    num_blocks: int
    lines: tuple[Line, ...]
    eos_token_ids: tuple[int, ...] = ()
    feature: str | None = None
    offers: Mapping[str, tuple[Match, ...]] | None = None
    num_ranks: int = 1

    def make_connector(self) -> ScriptedConnector | None:
        """One per scheduler."""
        return None if self.offers is None else ScriptedConnector(self.offers)


def scenario(
    name: str,
    *requirements: str,
    lines: tuple[Line, ...],
    usable_blocks: int = 16,
    block_size: int = 4,
    max_model_len: int = 16,
    budget: int = 64,
    threshold: int = 0,
    chunked: bool = True,
    max_num_seqs: int = 8,
    priority: bool = False,
    policy: str = "fcfs",
    in_flight: int = 1,
    caching: bool = True,
    eos: tuple[int, ...] = (),
    watermark: float = 0.0,
    preempt_threshold: float = 1.0,
    admit_threshold: float = 1.0,
    feature: str | None = None,
    offers: Mapping[str, tuple[Match, ...]] | None = None,
    num_ranks: int = 1,
    **settings: Any,
) -> Scenario:
    """A Scenario with small settings; whatever is not said is off or ample. `settings`: more of the
    `SchedulerConfig`."""
    return Scenario(
        name=name,
        requirements=requirements,
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            policy="priority" if priority else policy,
            max_steps_in_flight=in_flight,
            min_load_wait_s=1e9,  # the textbook measures no rates
            **settings,
        ),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=caching,
            watermark=watermark,
            preempt_threshold=preempt_threshold,
            admit_threshold=admit_threshold,
        ),
        num_blocks=usable_blocks + 1,
        lines=lines,
        eos_token_ids=eos,
        feature=feature,
        offers=offers,
        num_ranks=num_ranks,
    )


def play(
    scheduler: SchedulerAdapter, scenario: Scenario, connector: ScriptedConnector | None = None
) -> None:
    """Run all lines; AssertionError names the first one that does not hold. `connector`: the
    scheduler's."""
    player = _Player(scheduler, connector)
    for number, line in enumerate(scenario.lines, start=1):
        try:
            player.play(line)
            scheduler.check_invariants()
        except AssertionError as error:
            where = f"{scenario.name}, line {number}: {line}"
            raise AssertionError(f"{where}\n{error}") from error


class _Player:
    def __init__(self, scheduler: SchedulerAdapter, connector: ScriptedConnector | None) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._epoch = 1
        self._ids: dict[int, str] = {}
        self._handles: dict[str, int] = {}
        self._unanswered: list[int] = []
        self._usage: dict[str, Usage] = {}

    def play(self, line: Line) -> None:
        match line:
            case Add():
                self._add(line)
            case Plan():
                self._plan(line)
            case NoPlan():
                plan = self._scheduler.schedule(0.0)
                assert plan is None, f"planned {plan}"
            case Answer():
                self._answer(line)
            case Abort(request_id):
                self._scheduler.abort((self._handles[request_id],), client=CLIENT)
                self._expect_outputs({}, {request_id: FinishReason.ABORTED})
            case StopAt(request_id, num_tokens):
                handle = self._handles[request_id]
                self._scheduler.stop_found(handle, num_tokens, client=CLIENT)
                self._expect_outputs({}, {request_id: FinishReason.STOPPED})
            case Usage(request_id):
                assert self._usage[request_id] == line, f"is {self._usage[request_id]}"
            case Free(num_blocks):
                num_free = self._scheduler.num_free_blocks
                assert num_free == num_blocks, f"{num_free} are free"
            case SetPause(state):
                self._scheduler.set_pause(state)
            case Chunk():
                self._continue(line)
            case Loads(begun):
                assert self._connector is not None
                found, self._connector.begun = tuple(self._connector.begun), []
                assert found == begun, f"are {found}"
            case Received():
                report = TransferReport(
                    epoch=self._epoch,
                    rank=line.rank,
                    finished_receiving=line.request_ids,
                    failed_block_ids=int32_array(line.failed),
                )
                self._scheduler.update_from_transfers(report, 0.0)
                self._expect_outputs({}, line.ended)
            case NewEpoch(epoch):
                self._epoch = epoch
                self._unanswered.clear()
                self._scheduler.begin_epoch(epoch, 0.0)
                self._expect_outputs({}, {})

    def _add(self, line: Add) -> None:
        handle = len(self._ids) if line.handle is None else line.handle
        self._scheduler.add_request(line.message(handle), client=CLIENT, now=0.0)
        outputs = self._scheduler.take_outputs()
        reasons = [finish.reason for finish in outputs.finishes]
        assert reasons == ([] if line.refused is None else [line.refused]), f"is {outputs}"
        if line.refused is None:
            self._ids[handle] = line.request_id
            self._handles[line.request_id] = handle

    def _continue(self, line: Chunk) -> None:
        message = ContinueSession(
            handle=self._handles[line.request_id],
            prompt_token_ids=int32_array([*line.prompt]),
            sampling=SamplingParams(max_tokens=line.max_tokens),
            resumable=not line.is_last,
        )
        self._scheduler.continue_session(message, client=CLIENT, now=0.0)

    def _answer(self, line: Answer) -> None:
        tokens = {
            id_: (some,) if isinstance(some, int) else some for id_, some in line.tokens.items()
        }
        step = self._unanswered.pop(0)
        self._scheduler.update_from_output(
            OracleAnswer(step, tokens, line.drafts, line.pooled, line.failed)
        )
        told = {
            id_: some[: line.told.get(id_)]
            for id_, some in tokens.items()
            if some and id_ not in line.dropped
        }
        self._expect_outputs(told, line.ended)

    def _plan(self, line: Plan) -> None:
        plan = self._scheduler.schedule(0.0)
        assert plan is not None, "nothing was planned"
        self._unanswered.append(plan.step)
        found = _describe(plan, line)
        assert found == line, f"is {found}"
        order = [*plan.num_scheduled], [*line.scheduled]
        assert order[0] == order[1], f"is in the order {order[0]}"

    def _expect_outputs(
        self, tokens: Mapping[str, tuple[int, ...]], ended: Mapping[str, FinishReason]
    ) -> None:
        outputs: Outputs = self._scheduler.take_outputs()
        told: dict[str, tuple[int, ...]] = {}
        for _, handle, token in outputs.deliveries:
            told[self._ids[handle]] = (*told.get(self._ids[handle], ()), token)
        assert told == tokens, f"delivered {told}"
        reasons = {self._ids[finish.handle]: finish.reason for finish in outputs.finishes}
        assert reasons == ended, f"ended {reasons}"
        for finish in outputs.finishes:
            request_id = self._ids[finish.handle]
            self._usage[request_id] = Usage(request_id, *finish[3:6])


def _describe(plan: OraclePlan, wanted: Plan) -> Plan:
    """The plan in the words of a table, as far as `wanted` asks."""
    cached = {admission.request_id: admission.num_cached_tokens for admission in plan.admitted}
    tables = plan.block_tables
    return Plan(
        scheduled=plan.num_scheduled,
        new=tuple(admission.request_id for admission in plan.admitted if not admission.resumed),
        resumed=tuple(admission.request_id for admission in plan.admitted if admission.resumed),
        preempted=plan.preempted,
        finished=plan.finished,
        cached={id_: cached[id_] for id_ in wanted.cached if id_ in cached},
        tables={id_: tables[id_] for id_ in wanted.tables if id_ in tables},
        drafts={e.request_id: e.drafts for e in plan.scheduled if e.request_id in wanted.drafts},
        encoder_inputs=plan.encoder_inputs,
        freed_hashes=plan.freed_hashes,
        rewound=plan.rewound,
        num_invalid_drafts=plan.num_invalid_drafts,
    )
