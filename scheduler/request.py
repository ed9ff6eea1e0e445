"""A request, for what happens once per request: arrival, admission, preemption, the end.

While it runs, its token ids and counters live in the columns of `running.RunningTable`; a waiting
request keeps them here.
"""

import enum
from typing import Final

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.client import AddRequest, FinishReason
from longshore.protocol.sampling import SamplingParams

NOT_SCHEDULED: Final = -1


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything above PREEMPTED is an end."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


FINISHED_STATUS: Final = {
    FinishReason.STOPPED: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH_CAPPED: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ABORTED: RequestStatus.FINISHED_ABORTED,
    FinishReason.IGNORED: RequestStatus.FINISHED_IGNORED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


class Request:
    """One request of one client.

    token_ids:     prompt and verified output; out of date while the request runs.
    block_names:   names of its full blocks, as far as they have been computed.
    stop_ids:      ids that end it, end-of-sequence ids among them.
    max_total_tokens: it ends when prompt and output together reach this.
    resume_after_step: not admitted before this step is answered, because a token of an earlier
                   life is still in it.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    """

    __slots__ = (
        "arrival_time",
        "block_names",
        "cache_salt",
        "client_index",
        "handle",
        "max_total_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "resume_after_step",
        "row",
        "sampling",
        "skip_reading_prefix_cache",
        "status",
        "stop_ids",
        "token_ids",
        "trace_headers",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        client_index: int,
        now: float,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        sampling = message.sampling
        self.request_id = message.request_id
        self.handle = message.handle
        self.client_index = client_index
        self.priority = message.priority
        self.arrival_time = now - message.age_s
        self.cache_salt = message.cache_salt
        self.skip_reading_prefix_cache = message.skip_reading_prefix_cache
        self.trace_headers = message.trace_headers
        self.sampling: SamplingParams = sampling
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.token_ids: Int32Array = np.concatenate(
            (message.prompt_token_ids, message.output_token_ids)
        )
        self.max_total_tokens = max_model_len
        if sampling.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + sampling.max_tokens)
        eos = () if sampling.ignore_eos else eos_token_ids
        self.stop_ids: tuple[int, ...] = (*sampling.stop_token_ids, *eos)
        self.block_names: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.row = -1
        self.resume_after_step = 0
        self.num_cached_tokens = NOT_SCHEDULED
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and verified output; of a waiting request."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Verified output; of a waiting request."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    def is_stopped_by(self, token_id: int) -> bool:
        """Whether its last token, `token_id`, ends it whatever its length."""
        enough = self.num_output_tokens >= self.sampling.min_tokens
        return enough and token_id in self.stop_ids

    def append_token(self, token_id: int) -> None:
        """A verified token of a request that does not run: one sampled before its preemption."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    @property
    def order(self) -> tuple[int, float, str]:
        """Place under the priority policy: the smaller is served first. Ids are unique, so the
        order is total and the same in every run."""
        return self.priority, self.arrival_time, self.request_id

    def __lt__(self, other: "Request") -> bool:
        return self.order < other.order

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"
