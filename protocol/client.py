"""Gateway to scheduler and back: requests in, columns of tokens out.

A client numbers its requests with handles of its own; tokens come back by handle, one message per
client and step. Every request is answered with a finish reason, also one that is refused.
"""

import enum
from typing import Any, Final, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.sampling import SamplingParams

MAX_NAME_CHARACTERS: Final = 1024
"""Of a request id and of a cache salt; longer ones are refused."""


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


class AbortRequests(msgspec.Struct, tag="abort", frozen=True, forbid_unknown_fields=True):
    """The client lost interest. Unknown handles are ignored: they may just have finished."""

    handles: Int32Array


class StopFound(msgspec.Struct, tag="stop_found", frozen=True, forbid_unknown_fields=True):
    """The gateway saw a stop string end in output token `num_tokens` (1-based): the request ends
    STOPPED, its output and usage cut to that many tokens."""

    handle: int
    num_tokens: int


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request.

    stop_token_id:     the stop id that ended it, if one of `stop_token_ids` did.
    num_output_tokens: of its whole life, including those emitted before a resubmit.
    num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
    message:           what went wrong, for IGNORED and ERROR.
    """

    handle: int
    reason: FinishReason
    num_output_tokens: int
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    message: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class SchedulerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one engine; the `num_*` counters only grow, from the engine's start.

    steps_in_flight: plans not yet answered, averaged over the steps planned since the last report
                     (the one just planned included): 2.0 in a steady asynchronous decode.
    kv_usage:        1 - free / usable blocks; cached blocks that nobody holds count as free.
    num_stale_tokens: sampled for an occupant that had left its row, and dropped.
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


class EngineOutputs(
    msgspec.Struct, tag="outputs", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What one step brought for one client: `tokens[i]` is the next output token of `handles[i]`.

    A handle is listed once per token. `finished` comes after the tokens of the same message.
    """

    handles: Int32Array = EMPTY_INT32
    tokens: Int32Array = EMPTY_INT32
    finished: tuple[FinishedRequest, ...] = ()
    stats: SchedulerStats | None = None


class EngineFailed(msgspec.Struct, tag="engine_failed", frozen=True, forbid_unknown_fields=True):
    """The engine stops; every live request of this client is lost, for `reason`."""

    reason: str


ClientRequest: TypeAlias = AddRequest | AbortRequests | StopFound
