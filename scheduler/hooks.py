"""The contract between the scheduler's policy and its features.

A feature is an object with some of the hooks of `SchedulerFeature`. The policy (`lifecycle`,
`step`) calls each hook of all features that have it, in the one order that `attached`
writes down, and knows no feature by name. A hook that no feature has costs nothing.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from longshore.connectors.base import FinishAction
from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import KeptState, RowStart, SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.statistics import BlockState
from longshore.scheduler.kv_cache.blocks import BlockDemand, ComputedBlocks, HeldBlocks
from longshore.scheduler.request import Hold, Outcome, Request
from longshore.scheduler.step.in_flight import PlannedStep


class Attempt(enum.Enum):
    """The result of trying the head of the queue."""

    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    PARKED = enum.auto()
    ENDED = enum.auto()
    NO_TOKENS = enum.auto()
    NO_BLOCKS = enum.auto()


class Yielded(enum.Enum):
    """What a feature has for a request that lacks blocks. LATER: it owns some until others have
    answered."""

    BLOCKS = enum.auto()
    LATER = enum.auto()
    NOTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Tokens that are loaded within the step. reserve: takes the blocks of a request and of these
    tokens; None, and nothing has changed, if blocks are short."""

    num_tokens: int
    reserve: Callable[[BlockDemand], HeldBlocks | None]


class Admitter(Protocol):
    """Admission, as a feature sees it that starts the head of the queue."""

    @property
    def is_idle(self) -> bool:
        """No request runs, and no output is expected that could change anything."""

    def start(
        self, request: Request, source: ComputedBlocks | Hold, load: StepLoad | None = None
    ) -> Attempt:
        """Give the head of the queue the next row, with the tokens that `source` has computed and
        those that `load` loads within the step, and schedule its first chunk."""

    def has_room(self, request: Request, num_needed: int, num_slots: int) -> bool:
        """Whether the gates admit a request that needs `num_needed` free blocks for `num_slots`
        slots."""

    def release_holds(self, request: Request) -> bool:
        """Release blocks that other waiting requests hold; False if there are none."""


class PlanChanges(Protocol):
    """The plan that is being made. preempted, finished: ids of requests by emptied row. uncached:
    block ids. loads: (row, generation) of rows that load within the step. kept_states: those that
    features want the workers to keep, in any order."""

    @property
    def step(self) -> int: ...
    @property
    def added(self) -> Sequence[RowStart]: ...
    @property
    def preempted(self) -> Mapping[int, str]: ...
    @property
    def finished(self) -> Mapping[int, str]: ...
    @property
    def uncached(self) -> list[int]: ...
    @property
    def loads(self) -> Sequence[tuple[int, int]]: ...
    @property
    def kept_states(self) -> list[KeptState]: ...


class SchedulerFeature:
    """What a feature may do about a request, a step and the engine. A class implements the hooks
    that it needs; the others do nothing and are never called."""

    __slots__ = ()

    def hook_names(self) -> frozenset[str]:
        """The names of those that it implements."""
        names = (name for name in HOOK_NAMES if getattr(type(self), name) is not _DEFAULTS[name])
        return frozenset(names)

    # A request arrives

    def problem(self, message: AddRequest, client: int) -> str | None:
        """Why a request, valid by itself, cannot be queued now."""

    def arrived(self, request: Request, now: float) -> None:
        """A new request is about to be queued."""

    def queue(self, request: Request, is_queued: bool) -> bool:
        """Whether the feature, or one before (`is_queued`), has queued or parked a new request."""
        return is_queued

    # It waits

    def gate(self, request: Request) -> Attempt | Outcome | None:
        """Whether a reason of its own prevents the head of the queue from starting: then the
        feature has parked it, or it ends. None if not."""

    def begin(
        self, admission: Admitter, request: Request, prefix: ComputedBlocks, now: float
    ) -> Attempt | None:
        """Start the head of the queue, which owns no blocks, with more than its cached prefix. None
        if the feature has nothing for it."""

    def tried(self, request: Request, num_local: int, result: Attempt) -> None:
        """The head of the queue, with so many tokens in the prefix cache, was tried."""

    def waits_for(self, request: Request, now: float) -> str | None:
        """For reports: what a waiting request waits for, if it is the feature."""

    # It runs

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """A request has got a row. Its first `num_computed` tokens need not be computed, the next
        `num_tokens` are in the plan that is being made."""

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """A request has lost its row, because it ends or is PREEMPTED. blocks: those of the row,
        which are freed later; None in a new epoch."""

    def appended(self, request: Request, token_id: int) -> Outcome | None:
        """A verified token was appended to a request that `is_special`. How it ends, if the token
        is not allowed."""

    # It ends

    def ending(self, request: Request, now: float) -> None:
        """A request, or the output of a session, ends. It still has its row or its hold."""

    def output_ended(
        self,
        request: Request,
        outcome: Outcome,
        blocks: HeldBlocks | None,
        now: float,
        *,
        ran: bool,
    ) -> bool:
        """Whether the request goes on after its output has ended. It has neither a row nor a
        position in a queue; if it goes on, the feature owns its blocks. ran: it had a row."""
        return False

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """A request has ended with these blocks, which are freed unless the answer says that the
        feature frees them."""

    # A step is planned

    def poll(self, now: float) -> None:
        """A step is about to be planned: events since the last one, deadlines."""

    def is_eventful(self) -> bool:
        """Whether the next plan may be another one than a steady decode step."""
        return False

    def begin_step(self, step: int, budget: int, now: float) -> None:
        """A step that is not steady is planned, with `budget` tokens; no row has got any yet."""

    def grant(self, wanted: Int64Array, granted: Int64Array, budget: int) -> Int64Array:
        """`granted`, (max_num_seqs,) the tokens of `wanted` that all rows get, or less of them."""
        return granted

    def allowed(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of one request can be computed in this step. A
        running request is asked for only if blocks are short: then rows get their tokens one after
        the other, and what `grant` returned is void."""
        return num_tokens

    def scheduled(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """A running request gets what is `allowed`."""

    def yield_blocks(self, to: Request | None, besides: Request | None) -> Yielded:
        """Blocks are short: release some that no request needs. to: only those of which this
        waiting request is to get some before their owners. besides: this request's own last."""
        return Yielded.NOTHING

    # It is sent and answered

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        """Fields of the plan in which rows compute `num_scheduled` (max_num_seqs,) tokens."""
        return {}

    def steady_fields(self, plan: PlanChanges, answered_step: int) -> dict[str, Any]:
        """Fields of the plan of a steady decode step."""
        return {}

    def has_work(self) -> bool:
        """Whether the workers need a plan even if no row computes a token."""
        return False

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """A plan that is not steady was built, and rows have advanced."""

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        """A step was planned, if there was something to plan."""

    def received(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """A valid output is about to be applied."""

    def bad_blocks(self, block_ids: Int32Array, *, are_written: bool) -> None:
        """These blocks hold wrong KV, or (not `are_written`) a load did not fill them."""

    def answered(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """An output was applied."""

    # The engine

    def begin_epoch(self, epoch: int) -> None:
        """The workers are new: all rows and blocks are about to be void."""

    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """Blocks that the feature refers to, with their state and a request id ("" if none)."""
        return iter(())

    def release_kept(self, client: int | None) -> None:
        """Release what is kept for later requests of a client, which has left, or of all."""

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        return {}

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Raise LongshoreError unless the feature's tables agree with the live requests."""


HOOK_NAMES: Final = tuple(
    name for name in vars(SchedulerFeature) if not name.startswith("_") and name != "hook_names"
)
_DEFAULTS: Final = {name: getattr(SchedulerFeature, name) for name in HOOK_NAMES}


class Hooks:
    """For each of HOOK_NAMES an attribute: the features that have this hook, in the order in which
    they are called."""

    def __init__(self) -> None:
        self.attach()

    def __getattr__(self, name: str) -> tuple[SchedulerFeature, ...]:
        raise AttributeError(f"{name} is not a hook of SchedulerFeature")

    def attach(
        self, *features: SchedulerFeature | None, asleep: Sequence[SchedulerFeature] = ()
    ) -> None:
        """Once: these are all features, in order; None is one that is not configured. asleep: those
        that have nothing to do before `wake`."""
        self._attached = [(each, each.hook_names()) for each in features if each is not None]
        self._asleep = list(asleep)
        self._collect(HOOK_NAMES)

    def wake(self, feature: SchedulerFeature) -> None:
        """A feature has something to do from now on."""
        if feature in self._asleep:
            self._asleep.remove(feature)
            self._collect(feature.hook_names())

    def _collect(self, names: Iterable[str]) -> None:
        for name in names:
            having = (each for each, theirs in self._attached if name in theirs)
            setattr(self, name, tuple(each for each in having if each not in self._asleep))
