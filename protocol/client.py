"""Gateway to scheduler and back: requests in, columns of tokens out.

A client numbers its requests with handles of its own; tokens come back by handle, one message per
client and step. Every request is answered with a finish reason, also one that is refused.
"""

import enum
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_FLOAT32, EMPTY_INT32, Float32Array, Int32Array
from longshore.protocol.inputs import (
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    PromptEmbeds,
    StructuredOutput,
)
from longshore.protocol.results import TokenLogprobs
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import WorkerStats

MAX_NAME_CHARACTERS: Final = 1024
"""Of a request id, a job id and a cache salt; longer ones are refused."""


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


class AddRequest(
    msgspec.Struct, tag="add", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Queue one request: a new one, or one that goes on elsewhere with tokens already emitted.

    handle:            the client's number for it, at least 0, unique among its live requests.
    output_token_ids:  already emitted; limits, positions of random draws and usage count from them.
    priority:          lower is more urgent; only the priority policy looks at it.
    age_s:             seconds since the request first arrived anywhere; a duration, because clocks
                       of two hosts do not agree.
    cache_salt:        prefix blocks are shared only among requests of the same salt.
    skip_reading_prefix_cache: compute everything, although a prefix may be cached.
    kv_transfer_params: for the connector; the one loose dict, its keys are defined outside.
    multimodal:        items in order of their offsets, which do not overlap; exactly one if the
                       model has cross attention.
    prompt_embeds:     stands for the prompt; its token ids are placeholders then.
    pooling:           asks for a vector; `sampling` means nothing then.
    job_id, is_last_step: the agent's job this request is a turn of, and whether another follows.
    resumable:         a session: when its output ends it waits for a `ContinueSession`.
    keeps_blocks:      of a session: while it waits it holds its KV, for others to fork and for its
                       own next input, as long as nobody else needs the room.
    fork_of:           handle of a live request of the same client: this one begins with its KV, as
                       far as their tokens agree, once that is computed. If it has ended by then,
                       or never was, or the model has cross attention, this is a request like any
                       other.
    """

    request_id: str
    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    output_token_ids: Int32Array = EMPTY_INT32
    priority: int = 0
    age_s: float = 0.0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    trace_headers: dict[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora: LoRARequest | None = None
    multimodal: tuple[MultimodalFeature, ...] = ()
    prompt_embeds: PromptEmbeds | None = None
    pooling: PoolingParams | None = None
    structured_output: StructuredOutput | None = None
    job_id: str | None = None
    is_last_step: bool = True
    resumable: bool = False
    keeps_blocks: bool = False
    fork_of: int | None = None


Handle: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class MalformedAdd(msgspec.Struct, tag="add", frozen=True):
    """What can be read of an `AddRequest` that is none: its client need not wait for ever."""

    handle: Handle


class ContinueSession(
    msgspec.Struct, tag="continue", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The next input of a resumable request: it goes on behind what it has computed so far.

    `resumable` False makes this the last one. Chunks that come while the session still runs wait
    their turn. Limits of `sampling` count from the end of this chunk.
    """

    handle: int
    prompt_token_ids: Int32Array
    sampling: SamplingParams
    resumable: bool = True


class AbortRequests(msgspec.Struct, tag="abort", frozen=True, forbid_unknown_fields=True):
    """The client lost interest. Unknown handles are ignored: they may just have finished."""

    handles: Int32Array


class StopFound(msgspec.Struct, tag="stop_found", frozen=True, forbid_unknown_fields=True):
    """The gateway saw a stop string end in output token `num_tokens` (1-based): the request ends
    STOPPED, its output and usage cut to that many tokens."""

    handle: int
    num_tokens: int


class MalformedContinue(msgspec.Struct, tag="continue", frozen=True):
    """As `MalformedAdd`, of a `ContinueSession`."""

    handle: Handle


class MalformedStop(msgspec.Struct, tag="stop_found", frozen=True):
    """As `MalformedAdd`, of a `StopFound`."""

    handle: Handle


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


class SchedulerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one engine; the `num_*` that count what happened only grow, from
    the engine's start; `num_steps` from that of its epoch.

    steps_in_flight: plans not yet answered, averaged over the steps planned since the last report
                     (the one just planned included): 2.0 in a steady asynchronous decode.
    kv_usage:        1 - free / usable blocks; cached blocks that nobody holds count as free.
    num_stale_tokens: sampled for an occupant that had left its row, and dropped.
    num_external_*:  tokens the connector was asked for, and said it has.
    num_draft_tokens, num_accepted_tokens, num_invalid_draft_tokens: speculated, right, refused by
                     a grammar.
    encoder_cache_usage: share of the encoder cache that holds outputs.
    num_quarantined_blocks: targets of loads that nobody waits for any more, not confirmed ended.
    num_rewinds:     requests sent back because KV they had computed on proved wrong.
    workers:         the latest report of every rank that has sent one, by rising rank.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: float
    steps_in_flight: float
    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preempted_queried_tokens: int
    num_preempted_hit_tokens: int
    num_stale_tokens: int
    num_bad_messages: int
    num_external_queried_tokens: int = 0
    num_external_hit_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_invalid_draft_tokens: int = 0
    encoder_cache_usage: float = 0.0
    num_quarantined_blocks: int = 0
    num_rewinds: int = 0
    workers: tuple[WorkerStats, ...] = ()


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


class DescribeEngine(msgspec.Struct, tag="describe", frozen=True, forbid_unknown_fields=True):
    """Ask what every waiting request waits for; answered with an `EngineReport`."""


class WaitingReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request that does not run. `waits_for` is a sentence for an operator."""

    request_id: str
    status: str
    waits_for: str
    waited_s: float
    num_tokens: int
    num_preemptions: int = 0


class EngineReport(
    msgspec.Struct, tag="report", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The state of an engine as an operator wants to read it.

    waiting:        at most MAX_REPORTED of them, the head of the queue first.
    idle_s:         seconds since some request last advanced.
    pause:          value of the `PauseState`.
    """

    engine_id: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: float
    steps_in_flight: int
    idle_s: float
    pause: str
    waiting: tuple[WaitingReport, ...] = ()


MAX_REPORTED: Final = 200
"""Waiting requests that an `EngineReport` lists."""

ClientRequest: TypeAlias = AddRequest | ContinueSession | AbortRequests | StopFound | DescribeEngine

Malformed: TypeAlias = MalformedAdd | MalformedContinue | MalformedStop

_malformed: Final[msgspec.msgpack.Decoder[Malformed]] = msgspec.msgpack.Decoder(Malformed)


def read_malformed(header: bytes) -> Malformed | None:
    """header: of a message that could not be decoded; None unless somebody waits for what comes of
    it, and its handle says who."""
    try:
        return _malformed.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
