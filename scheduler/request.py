"""A request, for what happens once per request: arrival, admission, preemption, the end.

While it runs, its token ids and counters live in the columns of `running.RunningTable`; a waiting
request keeps them here.
"""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.protocol.sampling import SamplingParams

if TYPE_CHECKING:  # they know requests
    from longshore.scheduler.features.grammar import Grammar
    from longshore.scheduler.kv_cache.block_hash import ExtraKeys
    from longshore.scheduler.kv_cache.manager import HeldBlocks

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

    token_ids:     prompt and verified output, never written to; out of date while the request runs.
    block_hashes:   names of its full blocks, as far as they have been computed.
    stop_ids:      ids that end it, end-of-sequence ids among them.
    max_total_tokens: it ends when prompt and output together reach this.
    resume_after_step: not admitted before this step is answered, because a token of an earlier
                   life is still in it.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    num_computed_tokens: of a waiting request: those whose KV it holds, in `held`; else 0.
    num_hit_tokens: computed by others, at its last admission.
    waits_for:     why admission set it aside, if nothing else tells it; for reports.
    is_resumed:    it was preempted and has not run since.
    place:         among the requests set aside, under FCFS.
    held:          blocks it holds without a row: an asynchronous load has filled them, or it is a
                   hold (`Forks`).
    load_number:   loads begin in this order.
    unwritten_block_ids: of `held`: blocks that the load did not fill.
    extra_keys:    what enters its block names beside tokens, once worked out (`block_hash`).
    grammar:       compiled from `structured_output`.
    keeps_blocks:  of a session: it holds its KV while it waits for input.
    next_chunks:   of a session: input that came before its turn.
    asks_connector: off from its load to its next life, so that the load is not tried twice.
    must_compute_prompt: log probabilities of its prompt are asked for and have not all been
                   delivered, or its vector is made of all its states: nothing of it may be found,
                   in the prefix cache or by a connector.
    skip_reading_prefix_cache: for that reason, or because its client wants it (`wants_no_hits`).
    is_scored:     log probabilities of some of its tokens are asked for.
    is_special:    its answer is more than one token to append: it has a grammar, looks for
                   repetition or is a pooling request.
    stop_reason:   the stop id of its own that ended it.
    num_nans_in_logits: of the step that ended it, if they were the reason.
    events:        (what, time), in order.
    """

    row = -1
    status = RequestStatus.WAITING
    resume_after_step = 0
    num_preemptions = 0
    num_cached_tokens = NOT_SCHEDULED
    num_computed_tokens = 0
    num_external_tokens = 0
    num_hit_tokens = 0
    num_draft_tokens = 0
    num_accepted_tokens = 0
    num_invalid_draft_tokens = 0
    num_nans_in_logits = 0
    stop_reason: int | None = None
    waits_for: str | None = None
    is_resumed = False
    position: int | None = None
    held: "HeldBlocks | None" = None
    load_number = 0
    asks_connector = True
    unwritten_block_ids: Sequence[int] = ()
    extra_keys: "ExtraKeys | None" = None
    grammar: "Grammar | None" = None

    def __init__(
        self,
        message: AddRequest,
        *,
        client_index: int,
        now: float,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.request_id = message.request_id
        self.handle = message.handle
        self.client_index = client_index
        self.priority = message.priority
        self.arrival_time = now - message.age_s
        self.cache_salt = message.cache_salt
        self.wants_no_hits = message.skip_reading_prefix_cache
        self.trace_headers = message.trace_headers
        self.kv_transfer_params = message.kv_transfer_params
        self.lora = message.lora
        self.multimodal = message.multimodal
        self.prompt_embeds = message.prompt_embeds
        self.pooling = message.pooling
        self.structured_output = message.structured_output
        self.job_id = message.job_id
        self.is_last_step = message.is_last_step
        self.resumable = message.resumable
        self.keeps_blocks = message.keeps_blocks
        self.token_ids: Int32Array = message.prompt_token_ids
        self.num_prompt_tokens = len(self.token_ids)
        if len(message.output_token_ids):
            self.token_ids = np.concatenate((message.prompt_token_ids, message.output_token_ids))
        self._take_sampling(message.sampling, max_model_len, eos_token_ids)
        self.block_hashes: list[bytes] = []
        self.next_chunks: list[ContinueSession] = []
        self.events: list[tuple[RequestEvent, float]] = [(RequestEvent.QUEUED, now)]
        # Beside token ids: what its start adds to a plan, and to the encoder's work.
        self.num_input_bytes = self.num_encoder_tokens = 0
        if self.multimodal or self.prompt_embeds is not None:
            self.num_input_bytes = sum(len(item.data) for item in self.multimodal)
            self.num_encoder_tokens = sum(item.num_tokens for item in self.multimodal)
            if self.prompt_embeds is not None:
                self.num_input_bytes += len(self.prompt_embeds.data)

    def _take_sampling(
        self, sampling: SamplingParams, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """What follows from the sampling settings and the number of prompt tokens."""
        self.sampling = sampling
        num_prompt, is_pooling = self.num_prompt_tokens, self.pooling is not None
        self.max_total_tokens = max_model_len
        if is_pooling:
            # The one token that its last step would sample is never taken.
            self.max_total_tokens = num_prompt + 1
        elif sampling.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, num_prompt + sampling.max_tokens)
        self.stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            self.stop_ids += eos_token_ids
        scores_prompt = sampling.prompt_logprobs is not None and not is_pooling
        self.is_scored = scores_prompt or (sampling.logprobs is not None and not is_pooling)
        self.must_compute_prompt = scores_prompt and num_prompt > 1
        if self.pooling is not None and self.pooling.needs_all_states:
            self.must_compute_prompt = True
        self.skip_reading_prefix_cache = self.wants_no_hits or self.must_compute_prompt
        self.is_special = (
            is_pooling or self.structured_output is not None or sampling.repetition is not None
        )

    def prompt_was_scored(self, num_tokens: int) -> None:
        """Log probabilities of its first `num_tokens` prompt tokens have been delivered."""
        if num_tokens >= self.num_prompt_tokens:
            self.must_compute_prompt = False
            self.skip_reading_prefix_cache = self.wants_no_hits

    def begin_chunk(
        self,
        chunk: ContinueSession,
        *,
        now: float,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """A session goes on: all tokens so far are prompt now, and the chunk's come behind them."""
        self.token_ids = np.concatenate((self.token_ids, chunk.prompt_token_ids))
        self.num_prompt_tokens = len(self.token_ids)
        self.resumable = chunk.resumable
        self._take_sampling(chunk.sampling, max_model_len, eos_token_ids)
        self.events = [(RequestEvent.QUEUED, now)]
        self.asks_connector = True
        self.stop_reason = None
        self.num_external_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = self.num_invalid_draft_tokens = 0
        self.status = RequestStatus.WAITING

    @property
    def lora_name(self) -> str | None:
        """Of its adapter, if it wants one."""
        return None if self.lora is None else self.lora.name

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

    def is_stopped_by(self, token_id: int, num_tokens: int) -> bool:
        """Whether `token_id`, as the last of so many tokens, ends it whatever its length."""
        enough = num_tokens - self.num_prompt_tokens >= self.sampling.min_tokens
        return enough and token_id in self.stop_ids

    def append_token(self, token_id: int) -> None:
        """A verified token of a request that does not run: one sampled before its preemption."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"
