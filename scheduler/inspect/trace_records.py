"""The records of the scheduler trace, one JSON object per line; docs/trace.md describes the fields.

The writer is `inspect.trace`; `deploy.trace` reads them.
"""

from typing import Final, TypeAlias

import msgspec

TRACE_FORMAT: Final = 1
"""Changes when an older reader would misunderstand a record."""


class TraceBegin(msgspec.Struct, tag_field="record", tag="trace_begin", frozen=True, kw_only=True):
    """The first record of a trace. unix_time_offset_s: added to `now`, it gives Unix time; None:
    the clock is virtual."""

    format: int
    engine: str
    policy: str
    block_size: int
    max_num_seqs: int
    max_steps_in_flight: int
    unix_time_offset_s: float | None


class Record(msgspec.Struct, tag_field="record", frozen=True, kw_only=True):
    """Any record after the first one. Readers ignore unknown fields. now: the scheduler's time, in
    seconds."""

    now: float


class StepRecord(Record, frozen=True, kw_only=True):
    """A record of one step, which epoch and step together identify."""

    epoch: int
    step: int


class BlockCounts(msgspec.Struct, frozen=True):
    """total: blocks that requests can use. free: those that can be allocated now, including cached
    ones that no request holds. cached: those that lookups can find."""

    free: int
    total: int
    cached: int


class PinCounts(msgspec.Struct, frozen=True):
    """Prefixes that are kept for the next turn of a job."""

    count: int = 0
    blocks: int = 0
    jobs: tuple[str, ...] = ()


NO_PINS: Final = PinCounts()


class StepLimits(msgspec.Struct, frozen=True):
    """requests: that may run. tokens: that the step may compute."""

    requests: int
    tokens: int


class StepSnapshot(StepRecord, tag="step_snapshot", frozen=True, kw_only=True):
    """The state before a step is planned."""

    running: int
    waiting: int
    in_flight: int
    gpu: BlockCounts
    cpu: BlockCounts
    pins: PinCounts
    limits: StepLimits


class PrefixCacheEvent(StepRecord, tag="prefix_cache_event", frozen=True, kw_only=True):
    """A waiting request was looked up in the prefix cache, and in the connector if there is one.

    external_hit_tokens: those after the local ones; None: the connector does not know yet.
    is_async: the connector loads them in the background.
    result:   what became of the request in this step, in lower case; see `admission.Attempt`.
    """

    request: str
    job: str | None
    local_hit_tokens: int
    external_hit_tokens: int | None
    prompt_tokens: int
    total_tokens: int
    connector: str | None
    is_async: bool
    result: str = ""


class StepDecision(StepRecord, tag="step_decision", frozen=True, kw_only=True):
    """The plan of a step: the tokens that each request computes, in admission order.

    new, resumed, running: admitted for the first time, admitted after a preemption, and before.
    preempted:      since the previous decision.
    tokens:         of all requests.
    prefill_tokens: those of prompts, and of outputs that are computed again.
    prefilled:      requests whose prefill ends with this step; its output has their next token.
    """

    new: dict[str, int]
    resumed: dict[str, int]
    running: dict[str, int]
    preempted: list[str]
    tokens: int
    prefill_tokens: int
    prefilled: list[str]


class StepOutput(StepRecord, tag="step_output", frozen=True, kw_only=True):
    """The output of a step has arrived. sampled_tokens: those in it, also if they are dropped."""

    sampled_tokens: int


class RequestQueued(Record, tag="request_queued", frozen=True, kw_only=True):
    """A request, or the next input of a session, waits. arrival: when the client sent it."""

    request: str
    job: str | None
    arrival: float
    prompt_tokens: int
    max_total_tokens: int


class RequestFinished(Record, tag="request_finished", frozen=True, kw_only=True):
    """A request has ended. cached_tokens: prompt tokens that it did not compute. continues: only
    the output has ended, and the session waits for its next input."""

    request: str
    job: str | None
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    continues: bool


class RecordsDropped(msgspec.Struct, tag_field="record", tag="records_dropped", frozen=True):
    """The file was written too slowly, so this many records are missing here."""

    count: int


TraceRecord: TypeAlias = (
    TraceBegin
    | StepSnapshot
    | PrefixCacheEvent
    | StepDecision
    | StepOutput
    | RequestQueued
    | RequestFinished
    | RecordsDropped
)
