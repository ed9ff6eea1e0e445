"""The life of one request in a replay: when it waits and why, runs, is preempted and ends."""

from dataclasses import dataclass

from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.recorder.entries import Added, Entry, Planned
from longshore.scheduler.recorder.replay import Call
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.scheduler import Scheduler

_MOST_WAITING = 1 << 20


@dataclass(frozen=True)
class Happening:
    """step: the last plan. now: the scheduler's time in seconds."""

    step: int
    now: float
    text: str


class Explainer:
    """Follows one request; `before` and `after` are called by a `Replay`.

    request_id: as the engine knows it; a part of it is enough.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.timeline: list[Happening] = []
        self._scheduler: Scheduler | None = None
        self._request: Request | None = None
        self._status: RequestStatus | None = None
        self._waits_for: str | None = None
        self._num_preemptions = 0
        self._now = 0.0
        self._rows: dict[int, str] = {}

    def before(self, entry: Entry, scheduler: Scheduler) -> None:
        """A call is about to be repeated."""
        if isinstance(entry, Planned):
            running = scheduler.running
            self._rows = {
                request.row: request.request_id for request in running.requests_in_order()
            }

    def after(self, call: Call) -> None:
        """The call has been repeated."""
        scheduler = call.scheduler
        self._now = self._now if call.now is None else call.now
        if scheduler is not self._scheduler:
            self._begin(scheduler)
        if self._request is None:
            self._find(call.entry, scheduler)
        request = self._request
        if request is None:
            return
        if request.is_finished:
            if request.status is not self._status:
                self._status = request.status
                num_outputs = request.num_output_tokens
                self._add(scheduler, f"ended: {request.status.name}, {num_outputs} output tokens")
            self._request = None
            return
        if request.num_preemptions > self._num_preemptions:
            self._preempted(call, request)
        if request.status is not self._status and request.status is RequestStatus.RUNNING:
            self._admitted(scheduler, request)
        elif request.status is not self._status and request.status is not RequestStatus.PREEMPTED:
            self._add(scheduler, f"is {request.status.name}")
        self._status = request.status
        if request.status is RequestStatus.RUNNING:
            self._waits_for = None
        elif isinstance(call.entry, Planned):
            self._explain_waiting(scheduler, request)

    def _begin(self, scheduler: Scheduler) -> None:
        """The replay has loaded another scheduler; the request may be in it again."""
        if self._request is not None:
            self._add(scheduler, "interrupted: the scheduler restarted, or calls are not recorded")
        self._scheduler, self._request, self._waits_for = scheduler, None, None

    def _find(self, entry: Entry, scheduler: Scheduler) -> None:
        for request in (*scheduler.running.requests_in_order(), *scheduler.waiting):
            if self._request_id in request.request_id:
                self._request, self._status = request, None
                self._num_preemptions = request.num_preemptions
                num_tokens = f"{request.num_prompt_tokens} prompt tokens"
                is_new = isinstance(entry, Added) and entry.message.request_id == request.request_id
                text = f"arrived with {num_tokens}" if is_new else f"is known, with {num_tokens}"
                self._add(scheduler, f"{request.request_id} {text}")
                self._status = request.status
                return

    def _admitted(self, scheduler: Scheduler, request: Request) -> None:
        what = "resumed" if request.num_preemptions else "admitted"
        found = f"{request.num_hit_tokens} of its {request.num_tokens} tokens were cached"
        if request.num_external_tokens:
            found += f", {request.num_external_tokens} loaded by the connector"
        self._add(scheduler, f"{what} to row {request.row}; {found}")

    def _preempted(self, call: Call, request: Request) -> None:
        self._num_preemptions = request.num_preemptions
        how = "swapped out" if request.is_swapped else "preempted"
        text = f"{how} for the {request.num_preemptions}. time"
        if not request.is_swapped and call.plan is not None:
            grew = self._grown_by(call.plan, request)
            text += f", because others needed blocks: {', '.join(grew)}" if grew else ""
        if not isinstance(call.entry, Planned):
            text += ", because its blocks were reset or the workers were replaced"
        self._add(call.scheduler, text)

    def _grown_by(self, plan: SchedulerOutput, request: Request) -> list[str]:
        """The requests that got blocks in this plan, with how many."""
        counts: dict[str, int] = {}
        for blocks in plan.appended:
            for row in blocks.rows.tolist():
                name = self._rows.get(row)
                if name is not None and name != request.request_id:
                    counts[name] = counts.get(name, 0) + 1
        return [f"{name} took {count}" for name, count in counts.items()]

    def _explain_waiting(self, scheduler: Scheduler, request: Request) -> None:
        reports = scheduler._reasons.describe(self._now, _MOST_WAITING)
        for report in reports:
            if report.request_id == request.request_id:
                waits_for = _without_numbers(report.waits_for)
                if waits_for != self._waits_for:
                    self._add(scheduler, f"waits for {report.waits_for}")
                self._waits_for = waits_for
                return

    def _add(self, scheduler: Scheduler, text: str) -> None:
        self.timeline.append(Happening(scheduler.num_steps, self._now, text))


def _without_numbers(text: str) -> str:
    """What a reason is about: it counts as the same while only its numbers change."""
    return "".join(" " if character.isdigit() else character for character in text)
