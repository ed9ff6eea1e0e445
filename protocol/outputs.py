"""What a step brings: from worker to scheduler, and from scheduler to client, in columns.

Tokens come back to a client by handle, one message per client and step. Every request is answered
with a finish reason, also one that is rejected.
"""

import enum
from typing import Any, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_FLOAT32, EMPTY_INT32, Float32Array, Int32Array
from longshore.protocol.statistics import SchedulerStats


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of n tokens, those of one owner by rising position.

    owners:     (n,) row (from a worker) or handle (to a client) each token belongs to.
    positions:  (n,) of the token in its request; the prompt's first is 0. A position may come
                again, after a preemption: the newest counts.
    ranks:      (n,) 1 if no other token is likelier.
    num_listed: (n,) entries in the next two: the token itself, then the most likely ones in
                falling order (it may be among them).
    token_ids, logprobs: (sum of num_listed,), natural logarithms.
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

    epoch, step:  of the plan; an answer of another epoch is dropped.
    sampled_tokens: one id per sampling row (`RowTable.samples`), in row order; of a row with drafts
                  the accepted ones and one more. Of a pooling row a 0 that means nothing.
    num_sampled:  ids per sampling row; empty if each has one.
    draft_rows, draft_tokens: proposed for the next step, a row listed once per draft.
    pooled_rows, pooled: rows of pooling requests that are done, and the vector of each.
                  A vector that is not finite is not among them, but its row among the `nan_rows`.
    logprobs:     of prompt and sampled tokens, for the rows that asked for them.
    nan_rows, num_nans: sampling rows whose logits (or vector) were not finite, and how many
                  elements; their token is meaningless.
    failed_block_ids: blocks that a load was to fill and did not, before this step used them.
    connector_metadata: of the connector's worker half, opaque here.
    compute_s:    time the step took on the device, in seconds.
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
    connector_metadata: bytes = b""
    compute_s: float = 0.0


class TransferReport(
    msgspec.Struct, tag="transfers", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Transfers that have ended since the last report; sent unasked, also by an idle worker.

    Every id is reported once by every rank, and a transfer has ended when all ranks have said so.

    finished_sending:   requests whose blocks have been read for the last time.
    finished_receiving: requests whose asynchronous load has ended, well or not.
    failed_block_ids:   blocks that those loads were to fill and did not.
    connector_metadata: of the connector's worker half, opaque here.
    """

    epoch: int
    rank: int
    finished_sending: tuple[str, ...] = ()
    finished_receiving: tuple[str, ...] = ()
    failed_block_ids: Int32Array = EMPTY_INT32
    connector_metadata: bytes = b""


class WorkerFailed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The worker cannot go on and exits after this message.

    is_consequence: it lost another rank, whose end explains more.
    """

    epoch: int
    rank: int
    reason: str
    is_consequence: bool = False


WorkerReport: TypeAlias = ModelRunnerOutput | WorkerFailed


class FinishReason(enum.IntEnum):
    """Why a request ended. `api_name` is the word of the OpenAI API."""

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
    """What happened to a request on its way."""

    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request.

    stop_token_id:     the stop id that ended it, if one of `stop_token_ids` did.
    num_output_tokens: of its whole life, including those emitted before a resubmit.
    num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
    message:           what went wrong, for IGNORED and ERROR.
    kv_transfer_params: from the connector, for whoever goes on with the request elsewhere.
    pooled:            the vector of a pooling request.
    events:            (what, seconds since the request reached the engine), in order.
    num_draft_tokens, num_accepted_tokens, num_invalid_draft_tokens: speculated for it; how many of
                       those were right; how many more its grammar refused.
    num_nans_in_logits: logits that were not finite numbers, of a request that ended for them.
    session_continues: the output so far has ended, the request has not: it waits for its next
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


class EngineOutputs(
    msgspec.Struct, tag="outputs", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What one step brought for one client: `tokens[i]` is the next output token of `handles[i]`.

    A handle is listed once per token. `finished` comes after the tokens of the same message.
    logprobs: of prompt tokens, and of the tokens of the same message, where asked for.
    """

    handles: Int32Array = EMPTY_INT32
    tokens: Int32Array = EMPTY_INT32
    logprobs: TokenLogprobs | None = None
    finished: tuple[FinishedRequest, ...] = ()
    stats: SchedulerStats | None = None


class EngineFailed(msgspec.Struct, tag="engine_failed", frozen=True, forbid_unknown_fields=True):
    """The engine stops; every live request of this client is lost, for `reason`."""

    reason: str
