"""Results of a step, in columns: from worker to scheduler, then from scheduler to client.

A client receives one message per step, with tokens by handle. Every request is answered with a
finish reason, including one that is rejected.
"""

import enum
from typing import Any, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_FLOAT32, EMPTY_INT32, Float32Array, Int32Array
from longshore.protocol.routed_experts import RoutedExperts
from longshore.protocol.statistics import SchedulerStats, TransferOperation


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of n tokens, those of one owner by rising position.

    owners:     (n,) row (from a worker) or handle (to a client) of each token.
    positions:  (n,) position of the token in its request; the first prompt token is 0. A position
                can be repeated after a preemption: the latest entry counts.
    ranks:      (n,) rank of the token by probability; 1 is the most likely.
    num_listed: (n,) number of entries in the next two fields: the token itself, then the most
                likely tokens, best first (the token can be among them).
    token_ids, logprobs: (sum of num_listed,) token ids and natural logarithms.
    """

    owners: Int32Array
    positions: Int32Array
    ranks: Int32Array
    num_listed: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array


class ModelRunnerOutput(
    msgspec.Struct, tag="output", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The answer to one plan.

    epoch, step:  those of the plan; an answer with another epoch is dropped.
    sampled_tokens: one id per sampling row (`RowTable.samples`), in row order. A row with drafts
                  has its accepted drafts and one more id; a pooling row has a meaningless 0.
    num_sampled:  ids per sampling row; empty if each has one.
    draft_rows, draft_tokens: drafts for the next step; a row is listed once per draft.
    pooled_rows, pooled: rows of pooling requests that are done, and their vectors. A row whose
                  vector is not finite is listed in `nan_rows` instead.
    logprobs:     log probabilities of prompt and sampled tokens, for rows that asked for them.
    nan_rows, num_nans: sampling rows whose logits (or vector) were not finite, and the number of
                  such elements; their token is meaningless.
    failed_block_ids: blocks that a load failed to fill before this step used them.
    is_out_of_memory: the device had no memory for the step: nothing of it was computed, what later
                  plans compute from it is meaningless, and the fields of results are empty. Its
                  loads and stores have been carried out.
    connector_metadata: data of the connector's worker half, opaque here.
    compute_s:    time that the step took on the device, in seconds.
    gap_s:        time for which the device was idle before the step, in seconds, if the plan was
                  there before the step before it had ended; else None.
    """

    epoch: int
    step: int
    sampled_tokens: Int32Array = EMPTY_INT32
    num_sampled: Int32Array = EMPTY_INT32
    draft_rows: Int32Array = EMPTY_INT32
    draft_tokens: Int32Array = EMPTY_INT32
    pooled_rows: Int32Array = EMPTY_INT32
    pooled: tuple[Float32Array, ...] = ()
    logprobs: TokenLogprobs | None = None
    nan_rows: Int32Array = EMPTY_INT32
    num_nans: Int32Array = EMPTY_INT32
    failed_block_ids: Int32Array = EMPTY_INT32
    is_out_of_memory: bool = False
    connector_metadata: bytes = b""
    compute_s: float = 0.0
    gap_s: float | None = None


class TransferReport(
    msgspec.Struct, tag="transfers", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Transfers that ended since the last report; sent unsolicited, even by an idle worker.

    Every rank reports every id once. A transfer has ended when all ranks have reported it.

    step:               not 0: the report of a step with `has_loads`, of a rank that does not
                        sample; `failed_block_ids` are those of its synchronous loads.
    finished_sending:   requests whose blocks will not be read any more.
    finished_receiving: requests whose asynchronous load has succeeded or failed.
    failed_block_ids:   blocks that those loads failed to fill.
    connector_metadata: data of the connector's worker half, opaque here.
    ec_connector_metadata: data of the encoder connector's worker half, opaque here.
    operations:         what was moved, for statistics.
    """

    epoch: int
    rank: int
    step: int = 0
    finished_sending: tuple[str, ...] = ()
    finished_receiving: tuple[str, ...] = ()
    failed_block_ids: Int32Array = EMPTY_INT32
    connector_metadata: bytes = b""
    ec_connector_metadata: bytes = b""
    operations: tuple[TransferOperation, ...] = ()


class WorkerFailed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The worker cannot continue and exits after this message.

    is_consequence: the cause is that another rank failed; that rank's message explains more.
    is_out_of_memory: it had no memory for a step that cannot be computed again in its epoch.
    """

    epoch: int
    rank: int
    reason: str
    is_consequence: bool = False
    is_out_of_memory: bool = False


WorkerReport: TypeAlias = ModelRunnerOutput | WorkerFailed


class FinishReason(enum.IntEnum):
    """Why a request ended. `api_name` is the OpenAI API's `finish_reason`."""

    STOPPED = 0
    LENGTH_CAPPED = 1
    ABORTED = 2
    IGNORED = 3
    ERROR = 4
    REPETITION = 5

    @property
    def api_name(self) -> str:
        return _API_NAMES[self]


_API_NAMES = {
    FinishReason.STOPPED: "stop",
    FinishReason.LENGTH_CAPPED: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.IGNORED: "length",
    FinishReason.ERROR: "error",
    FinishReason.REPETITION: "repetition",
}


class RequestEvent(enum.IntEnum):
    """A change in the state of a request. LOAD_BEGUN, LOAD_ENDED: of a load of KV for which it
    waits; one that was abandoned has ended, too."""

    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2
    LOAD_BEGUN = 3
    LOAD_ENDED = 4


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request.

    stop_token_id:     the one of `stop_token_ids` that ended it, if any.
    num_output_tokens: all output tokens, including those emitted before a resubmission.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission, or the first
                       one since the workers were replaced.
    message:           the error text, for IGNORED and ERROR.
    kv_transfer_params: from the connector, for the engine that continues the request.
    pooled:            the vector of a pooling request.
    events:            (event, seconds since the request reached the engine), in order.
    num_draft_tokens, num_accepted_tokens, num_invalid_draft_tokens: drafts verified for it; how
                       many of those were accepted; how many others its grammar rejected.
    num_nans_in_logits: number of logits that were not finite, if the request ended because of them.
    routed_experts:    of its tokens from `routed_experts_prompt_start` on, except the last, if the
                       engine returns them and its output has not failed.
    session_continues: only this output has ended; the session waits for its next
                       `ContinueSession`.
    """

    handle: int
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    message: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    pooled: Float32Array = EMPTY_FLOAT32
    events: tuple[tuple[RequestEvent, float], ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    session_continues: bool = False
    num_nans_in_logits: int = 0
    num_invalid_draft_tokens: int = 0
    routed_experts: RoutedExperts | None = None


class EngineOutputs(
    msgspec.Struct, tag="outputs", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One step's results for one client: `tokens[i]` is the next output token of `handles[i]`.

    A handle is listed once per token. `finished` applies after the tokens of the same message.
    logprobs: those of prompt tokens and of the tokens of this message, where requested.
    """

    handles: Int32Array = EMPTY_INT32
    tokens: Int32Array = EMPTY_INT32
    logprobs: TokenLogprobs | None = None
    finished: tuple[FinishedRequest, ...] = ()
    stats: SchedulerStats | None = None


class EnginePaused(msgspec.Struct, tag="engine_paused", frozen=True, forbid_unknown_fields=True):
    """No request advances until the engine has new workers, or its workers are awake again, because
    of `reason`. Requests stay live, and new ones wait.

    is_asleep: an operator lets the workers sleep; they have not failed.
    """

    reason: str
    is_asleep: bool = False


class EngineContinues(
    msgspec.Struct, tag="engine_continues", frozen=True, forbid_unknown_fields=True
):
    """The workers are ready, in a new epoch; the pause is over."""

    engine_id: str


class AdmissionChanged(
    msgspec.Struct, tag="admission", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sent when it changes, and to a new client of an engine that is closed.

    closed_reason: why new requests wait at this engine, so that they should go to another one;
                   None: they are admitted.
    """

    closed_reason: str | None = None


class EngineFailed(msgspec.Struct, tag="engine_failed", frozen=True, forbid_unknown_fields=True):
    """The engine stops because of `reason`; every live request of this client is lost."""

    reason: str
