"""Repeats the calls of a record on the same scheduler class, and compares every plan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.queue.outside_policies import CheckedPolicy, load_policy
from longshore.scheduler.recorder.entries import (
    Added,
    Answered,
    Called,
    Entry,
    Planned,
    RecordError,
    Segment,
    Started,
    segment_files,
)
from longshore.scheduler.recorder.graph import decode_graph, is_allowed
from longshore.scheduler.recorder.recorder import OUTSIDE_HOOKS, RECORDED_CALLS
from longshore.scheduler.recorder.surroundings import (
    AnswersDiffer,
    NotRecorded,
    Player,
    PolicyPlayer,
    decode_argument,
)
from longshore.scheduler.scheduler import Scheduler

_CALLS: Final = frozenset(
    (*RECORDED_CALLS, "schedule", "update_from_output", "add_request", "take_masks")
)


@dataclass
class Result:
    """What a replay has found.

    num_calls, num_plans: repeated calls, and equal plans. num_runs: processes that recorded.
    difference: where the first plan differs, in words; None if none does.
    policy_differs: the first answer of the real policy that is not the recorded one.
    is_cut:     the record ends within an entry.
    raised:     the exception of the last call, which the replay raised as well.
    last_step:  of the last equal plan. notes: what else the user should know.
    """

    num_calls: int = 0
    num_plans: int = 0
    num_runs: int = 0
    difference: str | None = None
    policy: str = ""
    policy_differs: str | None = None
    is_cut: bool = False
    raised: str = ""
    last_step: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.difference is None


@dataclass
class Call:
    """A call that was just repeated. now: None if it has no time. plan: of `schedule`."""

    entry: Entry
    scheduler: Scheduler
    now: float | None
    plan: SchedulerOutput | None = None


Watch = Callable[[Call], None]


class Replay:
    """Replays the files of a record, in order.

    policy: name of the policy, which must be the recorded one; that of another package is run.
            None: the recorded answers of such a policy are used, and none of its code is run.
    until:  the replay ends with the first plan that has this step number or a higher one.
    before, after: called before and after each call.
    """

    def __init__(
        self,
        path: Path,
        *,
        policy: str | None = None,
        until: int | None = None,
        before: Callable[[Entry, Scheduler], None] | None = None,
        after: Watch | None = None,
    ) -> None:
        if until is not None and until < 1:
            raise RecordError(f"until={until} must be at least 1, the number of the first step")
        self._files = segment_files(path)
        if not self._files:
            raise RecordError(f"there is no record {path}: neither this file nor {path}.000000")
        self._policy = policy
        self._until = until
        self._before = before
        self._after = after
        self.result = Result()
        self._scheduler: Scheduler | None = None
        self._player = Player()

    def run(self) -> Result:
        """Raises RecordError if the record is damaged."""
        run, next_entry = "", -1
        for path in self._files:
            segment = Segment(path)
            header = segment.header
            if header.run != run or header.first_entry != next_entry or self._scheduler is None:
                self.result.num_runs += header.run != run
                if header.run == run:
                    num_lost = header.first_entry - next_entry
                    self.result.notes.append(f"{num_lost:,} calls before {path} are not recorded")
                self._scheduler = self._load(segment)
            run, next_entry = header.run, header.first_entry
            for entry in segment.entries():
                next_entry += 1
                if not self._repeat(entry):
                    return self._end()
            self.result.is_cut |= segment.is_cut
        return self._end()

    def _end(self) -> Result:
        if self._player.policy_differs:
            self.result.policy_differs = self._player.policy_differs[0]
        return self.result

    def _load(self, segment: Segment) -> Scheduler:
        """The scheduler of the snapshot."""
        self._player = Player()
        state = decode_graph(segment.snapshot, self._player.find_given)
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise RecordError("the snapshot is damaged: it is not the state of a scheduler")
        scheduler = object.__new__(Scheduler)
        vars(scheduler).update(state)
        self._player.holds = state.get("_transfers")
        self._note_what_is_not_compared(scheduler)
        self.result.policy = segment.header.policy
        policy = scheduler._planner.policy if hasattr(scheduler, "_planner") else None
        if self._policy is not None:
            recorded = segment.header.policy
            if self._policy != recorded:
                raise RecordError(
                    f"the record was made with policy {recorded!r}, not {self._policy!r}"
                )
            if isinstance(policy, CheckedPolicy):
                assert isinstance(policy.policy, PolicyPlayer)
                self._run_policy(self._policy, policy.policy, segment)
        return scheduler

    def _note_what_is_not_compared(self, scheduler: Scheduler) -> None:
        """Of the features that this scheduler has."""
        attached = getattr(scheduler, "_attached", None)
        missing = {
            "masks of structured output": getattr(scheduler, "_grammars", None),
            "experts of tokens": getattr(attached, "experts", None),
        }
        found = " and ".join(what for what, feature in missing.items() if feature is not None)
        note = f"{found} are not in the record; they decide nothing of a plan"
        if found and note not in self.result.notes:
            self.result.notes.append(note)

    def _run_policy(self, name: str, played: PolicyPlayer, segment: Segment) -> None:
        """Run the policy itself, from the state that it had."""
        checked = load_policy(name)
        assert isinstance(checked, CheckedPolicy)
        real = checked.policy
        package = type(real).__module__.partition(".")[0]
        if played.state:
            real = decode_graph(
                played.state, allows=lambda path: is_allowed(path) or _is_of(path, package)
            )
        elif segment.header.first_entry:
            self.result.notes.append(
                f"the state of policy {name!r} is not in the record; it runs as if it were new"
            )
        played.run(real)

    def _repeat(self, entry: Entry) -> bool:
        """Whether the replay goes on."""
        scheduler, player, result = self._scheduler, self._player, self.result
        assert scheduler is not None
        if self._before is not None:
            self._before(entry, scheduler)
        player.begin(entry.events)
        recorded, raised = "", entry.raised if isinstance(entry, Called) else ""
        plan, now = None, None
        try:
            plan, now = _call(entry, scheduler)
        except Exception as error:
            cause = _of_the_record(error)
            if isinstance(cause, AnswersDiffer):
                return self._differs(f"{_words(entry)}: {cause}")
            if cause is not None:
                result.notes.append(
                    f"the replay ends before {_words(entry)}, because the record lacks what the "
                    f"scheduler got there: {cause}"
                )
                return False
            recorded = type(error).__name__
            if recorded != raised:
                instead = f"the recorded one raised {raised}" if raised else "in the record not"
                return self._differs(f"{_words(entry)} raised {recorded}: {error}; {instead}")
        if raised and not recorded:
            return self._differs(f"{_words(entry)} raised {raised} when it was recorded")
        result.raised = recorded
        if not recorded:
            try:
                player.end()
            except AnswersDiffer as error:
                return self._differs(f"{_words(entry)}: {error}")
        player.is_open = False
        scheduler.take_outputs()
        result.num_calls += 1
        if isinstance(entry, Planned):
            difference = plan_difference(entry, plan)
            if difference is not None:
                return self._differs(difference)
            if plan is not None:
                result.num_plans += 1
                result.last_step = plan.step
        if self._after is not None:
            self._after(Call(entry, scheduler, now, plan))
        return self._until is None or plan is None or plan.step < self._until

    def _differs(self, text: str) -> bool:
        self.result.difference = text
        return False


def _of_the_record(error: BaseException | None) -> AnswersDiffer | NotRecorded | None:
    """What the record does not have, if that caused the error."""
    while error is not None and not isinstance(error, AnswersDiffer | NotRecorded):
        error = error.__cause__
    return error


def _is_of(path: str, package: str) -> bool:
    return path.partition(":")[0].partition(".")[0] == package


def _words(entry: Entry) -> str:
    match entry:
        case Planned(plan=plan):
            return "schedule" if plan is None else f"step {plan.step}"
        case Answered(output=output):
            return f"the output of step {output.step}"
        case Added(message=message):
            return f"the arrival of {message.request_id}"
        case Called(method=method):
            return method


def _call(entry: Entry, scheduler: Scheduler) -> tuple[SchedulerOutput | None, float | None]:
    """The plan, if there is one, and the time of the call."""
    match entry:
        case Planned():
            return scheduler.schedule(entry.now), entry.now
        case Answered():
            scheduler.update_from_output(entry.output, entry.now)
        case Added():
            scheduler.add_request(entry.message, client=entry.client, now=entry.now)
        case Called(method=name):
            arguments, named = decode_argument(entry.arguments)
            if name in OUTSIDE_HOOKS:
                getattr(scheduler._transfers, name)(*arguments)
            elif name in _CALLS:
                getattr(scheduler, name)(*arguments, **named)
            else:
                raise RecordError(f"{name!r:.50} is not a method of the scheduler")
            return None, None
    return None, entry.now


def plan_difference(entry: Planned, plan: SchedulerOutput | None) -> str | None:
    """In which step and field a plan is not the recorded one; None if they are equal."""
    recorded = entry.plan
    if recorded is None or plan is None:
        if recorded is plan:
            return None
        one = recorded or plan
        assert one is not None
        return f"step {one.step} was {'not ' if recorded is None else ''}planned when recorded"
    fields = [
        (name, getattr(recorded, name), getattr(plan, name))
        for name in plan.__struct_fields__
        if name not in ("added", "digest")
    ]
    fields.append(("added", entry.started, tuple(map(Started.of, plan.added))))
    # Last: it differs in any case, and only a prompt, or an output before a preemption, is found by
    # it alone.
    fields.append(("digest", recorded.digest, plan.digest))
    for name, before, now in fields:
        if not _is_equal(before, now):
            differ = f"{name} was {before!r:.300}, in the replay it is {now!r:.300}"
            return f"step {recorded.step}: {differ}"
    return None


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and all(map(_is_equal, _values_of(one), _values_of(other)))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)


def _values_of(message: msgspec.Struct) -> Iterator[Any]:
    return (getattr(message, name) for name in message.__struct_fields__)
