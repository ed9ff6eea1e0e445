"""Scenarios as tables: what is done to a scheduler, line by line, and the plan that must follow.

`play` runs one on any `SchedulerAdapter`. Requests are called by id; their handles count from 0 in
the order of their `Add` lines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from longshore.protocol.arrays import int32_array
from longshore.protocol.client import AddRequest, FinishReason
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
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
            ),
            output_token_ids=int32_array([*self.outputs]),
            priority=self.priority,
            age_s=self.age_s,
            cache_salt=self.salt,
            skip_reading_prefix_cache=self.skips_cache,
        )


@dataclass(frozen=True)
class Plan:
    """The next step. `cached` and `tables` are looked at only for the requests they name.

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


@dataclass(frozen=True)
class NoPlan:
    """Nothing to plan, or too many plans unanswered."""


@dataclass(frozen=True)
class Answer:
    """The oldest unanswered plan is answered with these tokens, which are all that it samples.

    dropped: requests whose token reaches nobody.
    ended:   requests that end with their token.
    """

    tokens: Mapping[str, int]
    dropped: tuple[str, ...] = ()
    ended: Mapping[str, FinishReason] = field(default_factory=dict)


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


Line: TypeAlias = Add | Plan | NoPlan | Answer | Abort | StopAt | Usage | Free


@dataclass(frozen=True)
class Scenario:
    """Settings and lines; `requirements` are the ids of the checklist that it is about.

    num_blocks: with the null block.
    """

    name: str
    requirements: tuple[str, ...]
    scheduler: SchedulerConfig
    cache: CacheConfig
    num_blocks: int
    lines: tuple[Line, ...]
    eos_token_ids: tuple[int, ...] = ()


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
    in_flight: int = 1,
    caching: bool = True,
    eos: tuple[int, ...] = (),
) -> Scenario:
    """A Scenario with small settings; whatever is not said is off or ample."""
    return Scenario(
        name=name,
        requirements=requirements,
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            policy="priority" if priority else "fcfs",
            max_steps_in_flight=in_flight,
        ),
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        num_blocks=usable_blocks + 1,
        lines=lines,
        eos_token_ids=eos,
    )


def play(scheduler: SchedulerAdapter, scenario: Scenario) -> None:
    """Run all lines; AssertionError names the first one that does not hold."""
    player = _Player(scheduler)
    for number, line in enumerate(scenario.lines, start=1):
        try:
            player.play(line)
            scheduler.check_invariants()
        except AssertionError as error:
            where = f"{scenario.name}, line {number}: {line}"
            raise AssertionError(f"{where}\n{error}") from error


class _Player:
    def __init__(self, scheduler: SchedulerAdapter) -> None:
        self._scheduler = scheduler
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
            case Answer(tokens, dropped, ended):
                self._scheduler.update_from_output(self._unanswered.pop(0), tokens)
                told = {id_: token for id_, token in tokens.items() if id_ not in dropped}
                self._expect_outputs(told, ended)
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

    def _add(self, line: Add) -> None:
        handle = len(self._ids) if line.handle is None else line.handle
        self._scheduler.add_request(line.message(handle), client=CLIENT, now=0.0)
        outputs = self._scheduler.take_outputs()
        reasons = [finish.reason for finish in outputs.finishes]
        assert reasons == ([] if line.refused is None else [line.refused]), f"is {outputs}"
        if line.refused is None:
            self._ids[handle] = line.request_id
            self._handles[line.request_id] = handle

    def _plan(self, line: Plan) -> None:
        plan = self._scheduler.schedule(0.0)
        assert plan is not None, "nothing was planned"
        self._unanswered.append(plan.step)
        found = _describe(plan, line)
        assert found == line, f"is {found}"
        order = [*plan.num_scheduled], [*line.scheduled]
        assert order[0] == order[1], f"is in the order {order[0]}"

    def _expect_outputs(self, tokens: Mapping[str, int], ended: Mapping[str, FinishReason]) -> None:
        outputs: Outputs = self._scheduler.take_outputs()
        told = {self._ids[delivery.handle]: delivery.token for delivery in outputs.deliveries}
        assert told == tokens, f"delivered {told}"
        reasons = {self._ids[finish.handle]: finish.reason for finish in outputs.finishes}
        assert reasons == ended, f"ended {reasons}"
        for finish in outputs.finishes:
            request_id = self._ids[finish.handle]
            self._usage[request_id] = Usage(request_id, *finish[3:])


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
    )
