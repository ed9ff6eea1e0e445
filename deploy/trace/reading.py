"""Reads a scheduler trace into steps, lookups and the lives of requests.

The phases of a request follow from the records: it is queued until a decision admits it, in prefill
until the output of the step that ends its prefill arrives, then it decodes; a decision that
preempts it begins the phase `preempted`, which ends when it is admitted again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias, assert_never

import msgspec

from longshore.protocol.errors import LongshoreError
from longshore.scheduler.inspect.trace_records import (
    TRACE_FORMAT,
    PrefixCacheEvent,
    RecordsDropped,
    RequestFinished,
    RequestQueued,
    StepDecision,
    StepOutput,
    StepSnapshot,
    TraceBegin,
    TraceRecord,
)

PhaseName: TypeAlias = Literal["queued", "prefill", "decode", "preempted"]
BEGINS: Final = ("admitted", "parked")
"""Results of lookups whose hits are used: the request starts, or the connector loads its KV."""


class BadTrace(LongshoreError):
    """The file is not a trace, or is damaged before its last line."""


@dataclass
class Step:
    """output_s: when its output arrived; None: it did not while the trace was written."""

    snapshot: StepSnapshot
    decision: StepDecision
    output_s: float | None = None


@dataclass
class Phase:
    """end_s: None while it lasts at the end of the trace."""

    name: PhaseName
    start_s: float
    end_s: float | None = None


@dataclass
class RequestLife:
    """One request, or one output of a session, as far as the trace has it.

    queued_s, end: None if it was queued before the trace began, or had not ended at its end.
    admitted_s, first_output_s: when it first got a row, and its first token.
    """

    request: str
    job: str | None = None
    queued_s: float | None = None
    prompt_tokens: int | None = None
    admitted_s: float | None = None
    first_output_s: float | None = None
    num_preemptions: int = 0
    end: RequestFinished | None = None
    phases: list[Phase] = field(default_factory=list)

    def enter(self, name: PhaseName | None, now: float) -> None:
        """End the current phase and begin another one, if any."""
        if self.phases and self.phases[-1].end_s is None:
            self.phases[-1].end_s = now
        if name is not None:
            self.phases.append(Phase(name, now))

    @property
    def phase(self) -> PhaseName | None:
        return self.phases[-1].name if self.phases and self.phases[-1].end_s is None else None

    def seconds_in(self, name: PhaseName) -> float:
        """The time in all phases of this name that have ended."""
        return sum(
            phase.end_s - phase.start_s
            for phase in self.phases
            if phase.name == name and phase.end_s is not None
        )

    @property
    def queue_s(self) -> float | None:
        """Time from the queue to the first row."""
        if self.queued_s is None or self.admitted_s is None:
            return None
        return self.admitted_s - self.queued_s

    @property
    def first_token_s(self) -> float | None:
        """Time from the queue to the first output token."""
        if self.queued_s is None or self.first_output_s is None:
            return None
        return self.first_output_s - self.queued_s

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between output tokens."""
        if self.end is None or self.first_output_s is None or self.end.output_tokens < 2:
            return None
        return (self.end.now - self.first_output_s) / (self.end.output_tokens - 1)


@dataclass
class Trace:
    """begin: None if the file lacks its first record.

    requests:      in the order in which they were queued.
    num_dropped:   records that the engine could not write in time.
    num_truncated: 1 if the last line is not whole, because the process was killed.
    """

    begin: TraceBegin | None = None
    steps: list[Step] = field(default_factory=list)
    lookups: list[PrefixCacheEvent] = field(default_factory=list)
    requests: list[RequestLife] = field(default_factory=list)
    num_records: int = 0
    num_dropped: int = 0
    num_truncated: int = 0

    @property
    def first_s(self) -> float:
        """The earliest time in the trace."""
        return min(
            [step.snapshot.now for step in self.steps[:1]]
            + [life.phases[0].start_s for life in self.requests if life.phases],
            default=0.0,
        )

    @property
    def last_s(self) -> float:
        """The latest time in the trace."""
        return max(
            [step.output_s or step.decision.now for step in self.steps[-64:]]
            + [life.end.now for life in self.requests if life.end is not None],
            default=0.0,
        )


def read_trace(path: Path) -> Trace:
    """Raises BadTrace."""
    try:
        with path.open("rb") as file:
            return _Builder(path).build(file)
    except OSError as error:
        raise BadTrace(f"{path} cannot be read: {error.strerror}") from error


class _Format(msgspec.Struct):
    """What the first record of a trace has in all formats; one that is cut may lack it."""

    format: int = TRACE_FORMAT


class _Builder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._trace = Trace()
        self._decoder: msgspec.json.Decoder[TraceRecord] = msgspec.json.Decoder(TraceRecord)
        self._lives: dict[str, RequestLife] = {}
        self._snapshot: StepSnapshot | None = None
        self._unanswered: dict[tuple[int, int], Step] = {}

    def build(self, file: IO[bytes]) -> Trace:
        for number, record in self._records(file):
            self._trace.num_records += 1
            try:
                self._take(record)
            except BadTrace as error:
                raise BadTrace(f"{self._path}, line {number}: {error}") from None
        return self._trace

    def _records(self, file: IO[bytes]) -> Iterator[tuple[int, TraceRecord]]:
        for number, line in enumerate(file, 1):
            try:
                if number == 1:
                    self._check_format(line)
                record = self._decoder.decode(line)
            except msgspec.MsgspecError as error:
                if not line.endswith(b"\n") and number > 1:  # the process was killed
                    self._trace.num_truncated = 1
                    return
                hint = " Is this a scheduler trace?" if number == 1 else ""
                raise BadTrace(f"{self._path}, line {number}: {error}.{hint}") from error
            yield number, record

    def _check_format(self, first_line: bytes) -> None:
        """Before the record is decoded, whose other fields depend on the format."""
        found = msgspec.json.decode(first_line, type=_Format).format
        if found != TRACE_FORMAT:
            raise BadTrace(
                f"{self._path}, line 1: the trace has format {found}, and this version of "
                f"longshore reads format {TRACE_FORMAT}. Use the version that wrote it."
            )

    def _take(self, record: TraceRecord) -> None:
        trace = self._trace
        match record:
            case TraceBegin():
                if trace.begin is not None:
                    raise BadTrace("a second trace begins. Give one file per engine.")
                trace.begin = record
            case StepSnapshot():
                self._snapshot = record
            case PrefixCacheEvent():
                trace.lookups.append(record)
            case StepDecision():
                self._decide(record)
            case StepOutput():
                self._answer(record)
            case RequestQueued():
                self._queue(record)
            case RequestFinished():
                self._finish(record)
            case RecordsDropped():
                trace.num_dropped += record.count
                self._snapshot = None
            case _:
                assert_never(record)

    def _life(self, request: str) -> RequestLife:
        """A request that the trace does not begin with is added."""
        if request not in self._lives:
            self._lives[request] = life = RequestLife(request)
            self._trace.requests.append(life)
        return self._lives[request]

    def _queue(self, record: RequestQueued) -> None:
        life = RequestLife(
            record.request, record.job, record.now, prompt_tokens=record.prompt_tokens
        )
        life.enter("queued", record.now)
        self._lives[record.request] = life
        self._trace.requests.append(life)

    def _decide(self, decision: StepDecision) -> None:
        snapshot, key = self._snapshot, (decision.epoch, decision.step)
        if snapshot is None:
            return  # it was dropped
        if (snapshot.epoch, snapshot.step) != key:
            raise BadTrace(
                f"the decision of step {decision.step} follows the snapshot of step {snapshot.step}"
            )
        step = Step(snapshot, decision)
        self._trace.steps.append(step)
        self._unanswered[key] = step
        for request in decision.preempted:
            life = self._life(request)
            life.num_preemptions += 1
            life.enter("preempted", decision.now)
        for request in (*decision.new, *decision.resumed):
            life = self._life(request)
            life.enter("prefill", decision.now)
            if life.admitted_s is None:
                life.admitted_s = decision.now

    def _answer(self, record: StepOutput) -> None:
        step = self._unanswered.pop((record.epoch, record.step), None)
        if step is None:
            return
        step.output_s = record.now
        for request in step.decision.prefilled:
            if (life := self._lives.get(request)) is None:
                continue  # it has ended
            if life.first_output_s is None:
                life.first_output_s = record.now
            if life.phase == "prefill":
                life.enter("decode", record.now)

    def _finish(self, record: RequestFinished) -> None:
        life = self._life(record.request)
        life.enter(None, record.now)
        life.end = record
        life.job = record.job
        life.prompt_tokens = record.prompt_tokens
        del self._lives[record.request]
