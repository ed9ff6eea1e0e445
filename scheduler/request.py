"""A request, for what happens once per request: arrival, admission, preemption, the end.

`TRANSITIONS` lists every change of status. While a request runs, its token ids and counters live in
the columns of `step.running.RunningTable`; a waiting request keeps them here.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np

from longshore.protocol.arrays import Float32Array, Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.outputs import FinishReason, RequestEvent
from longshore.protocol.requests import AddRequest, ContinueSession
from longshore.protocol.routed_experts import RoutedExperts
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.block_hash import ExtraKeys
from longshore.scheduler.kv_cache.blocks import HeldBlocks

NOT_SCHEDULED: Final = -1


class RequestStatus(enum.IntEnum):
    """The state of a request; every status above PREEMPTED is an end."""

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


class RequestChange(enum.Enum):
    """Changes of status of a request that continues; a `FinishReason` ends it."""

    NEEDS_GRAMMAR = "needs a grammar"
    GRAMMAR_COMPILED = "grammar compiled"
    LOAD_BEGUN = "load begun"
    LOAD_OVER = "load over or abandoned"
    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    OUTPUT_ENDED = "output of a session ended"
    INPUT_RECEIVED = "next input received"


Change: TypeAlias = RequestChange | FinishReason

FINISHED_STATUS: Final = {
    reason: RequestStatus[f"FINISHED_{reason.name}"] for reason in FinishReason
}

_WAITING = RequestStatus.WAITING
_FOR_GRAMMAR = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
_FOR_KV = RequestStatus.WAITING_FOR_REMOTE_KVS
_FOR_INPUT = RequestStatus.WAITING_FOR_STREAMING_REQ
_RUNNING = RequestStatus.RUNNING
_PREEMPTED = RequestStatus.PREEMPTED

TRANSITIONS: Final[dict[tuple[RequestStatus, Change], RequestStatus]] = {
    (_WAITING, RequestChange.NEEDS_GRAMMAR): _FOR_GRAMMAR,
    (_PREEMPTED, RequestChange.NEEDS_GRAMMAR): _FOR_GRAMMAR,
    (_FOR_GRAMMAR, RequestChange.GRAMMAR_COMPILED): _WAITING,
    (_WAITING, RequestChange.LOAD_BEGUN): _FOR_KV,
    (_PREEMPTED, RequestChange.LOAD_BEGUN): _FOR_KV,
    (_FOR_KV, RequestChange.LOAD_OVER): _WAITING,
    (_WAITING, RequestChange.ADMITTED): _RUNNING,
    (_PREEMPTED, RequestChange.ADMITTED): _RUNNING,
    (_RUNNING, RequestChange.PREEMPTED): _PREEMPTED,
    (_WAITING, RequestChange.OUTPUT_ENDED): _FOR_INPUT,
    (_RUNNING, RequestChange.OUTPUT_ENDED): _FOR_INPUT,
    (_PREEMPTED, RequestChange.OUTPUT_ENDED): _FOR_INPUT,
    (_FOR_INPUT, RequestChange.INPUT_RECEIVED): _WAITING,
    # A load that a request waits for is abandoned before the request ends.
    **{
        (status, reason): finished
        for status in (_WAITING, _FOR_GRAMMAR, _FOR_INPUT, _RUNNING, _PREEMPTED)
        for reason, finished in FINISHED_STATUS.items()
    },
}
"""Any pair that is not listed is an error. docs/scheduler.md has a picture of it."""


class IllegalTransition(LongshoreError):
    """The change is not allowed in the request's status; nothing has changed."""


class HoldKind(enum.Enum):
    """Why a request holds blocks without a row."""

    LOADED = "an asynchronous load has filled them"
    FORK = "its parent has computed them"
    SESSION = "it keeps them between two inputs"
    ANSWER = "an earlier request has left them"


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Blocks that a waiting request owns.

    num_computed_tokens: leading tokens whose KV they hold.
    order:  when blocks are short, the hold with the highest order is released first.
    unwritten_block_ids: those of the blocks that a failed load did not write.
    """

    kind: HoldKind
    blocks: HeldBlocks
    num_computed_tokens: int
    order: int
    unwritten_block_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ends, or the output of a session.

    message: what went wrong, for the client.
    pooled:  the vector of a pooling request.
    step:    the step whose output ends it, while the output is being applied.
    ends_output: its last token or a stop string ended the output, so a session continues.
    num_output_tokens: the output is cut to this many tokens; None keeps all.
    """

    reason: FinishReason
    message: str | None = None
    pooled: Float32Array | None = None
    step: int | None = None
    ends_output: bool = False
    num_output_tokens: int | None = None


class Request:
    """One request of one client.

    token_ids:     prompt and verified output, read-only; out of date while the request runs.
    block_hashes:  hashes of its full blocks, as far as they have been computed.
    extra_keys:    what its block hashes cover in addition to tokens.
    stop_ids:      ids that end it, including end-of-sequence ids.
    max_total_tokens: it ends when prompt and output together have this many tokens.
    hold:          blocks that it owns while it has no row.
    resume_after_step: it is not admitted before this step is answered, which has a token of an
                   earlier admission.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission, or the first
                   one since the workers were replaced.
    num_hit_tokens: at its last admission, tokens that others had computed.
    state_source:  generation of the row that has computed the state with which it began then, and
                   the tokens before it; None: it began with none, or with one known to be right.
    waits_for:     for reports: why admission set it aside, if its status does not say it.
    has_new_token: it got a token in the row that it lost last, so answered steps have computed all
                   tokens before that.
    num_computed_on_row: tokens that plans, unanswered ones too, have computed on that row.
    is_resumed:    it was preempted and has not run since then.
    is_swapped:    likewise, and the connector keeps its KV.
    is_owed:       it may use blocks that are kept free for others; see `Shares`.
    queue_position: its position among requests set aside, under FCFS.
    options:       what its client asks for; of a session, as its last input says.
    next_chunks:   queued inputs of a session.
    asks_connector: False from its load to its next admission, so that it is not loaded twice.
    must_compute_prompt: no part of its KV may come from the prefix cache or a connector, because
                   log probabilities of its prompt are still to be delivered, or its vector depends
                   on all hidden states.
    skips_prefix_cache: for that reason, or because its client or the connector wants no hits
                   (`wants_no_hits`).
    is_scored:     log probabilities of some of its tokens are requested.
    is_special:    its output needs more than appending a token: it has a grammar, detects
                   repetition or is a pooling request.
    stop_reason:   the id of its `stop_token_ids` that ended it.
    num_nans_in_logits: of the step that ended it, if this was the reason.
    routed_experts: of its tokens, once its output has ended, or it was preempted.
    events:        (event, time), in order.
    """

    row = -1
    status = RequestStatus.WAITING
    hold: Hold | None = None
    resume_after_step = 0
    num_preemptions = 0
    num_cached_tokens = NOT_SCHEDULED
    num_external_tokens = 0
    num_hit_tokens = 0
    state_source: tuple[int, int] | None = None
    num_draft_tokens = 0
    num_accepted_tokens = 0
    num_invalid_draft_tokens = 0
    num_nans_in_logits = 0
    stop_reason: int | None = None
    routed_experts: RoutedExperts | None = None
    waits_for: str | None = None
    has_new_token = False
    num_computed_on_row = 0
    is_resumed = False
    is_swapped = False
    is_owed = False
    queue_position: int | None = None
    asks_connector = True

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
        self.arrival_time = now - message.age_s
        self.options = options = message.options
        self.wants_no_hits = options.skip_reading_prefix_cache
        self.token_ids: Int32Array = message.prompt_token_ids
        self.num_prompt_tokens = len(self.token_ids)
        if len(message.output_token_ids):
            self.token_ids = np.concatenate((message.prompt_token_ids, message.output_token_ids))
        self._take_sampling(message.sampling, max_model_len, eos_token_ids)
        self.block_hashes: list[bytes] = []
        self.extra_keys: ExtraKeys | None = None
        self.next_chunks: list[ContinueSession] = []
        self.events: list[tuple[RequestEvent, float]] = [(RequestEvent.QUEUED, now)]
        # What its start adds to a plan, in addition to token ids, and to the encoder's work.
        self.num_input_bytes = self.num_encoder_tokens = 0
        if (
            options.multimodal
            or options.prompt_embeds is not None
            or options.lora is not None
            or options.cache_salt is not None
            or options.no_store
        ):
            self.extra_keys = ExtraKeys(
                cache_salt=options.cache_salt,
                no_store=options.no_store,
                lora_name=self.lora_name,
                multimodal=options.multimodal,
                prompt_embeds=options.prompt_embeds,
            )
            self.num_input_bytes = sum(len(item.data) for item in options.multimodal)
            self.num_encoder_tokens = sum(item.num_tokens for item in options.multimodal)
            if options.prompt_embeds is not None:
                self.num_input_bytes += len(options.prompt_embeds.data)

    def _take_sampling(
        self, sampling: SamplingParams, max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Set the attributes that depend on sampling settings and the number of prompt tokens."""
        self.sampling = sampling
        pooling, has_grammar = self.options.pooling, self.options.structured_output is not None
        num_prompt, is_pooling = self.num_prompt_tokens, pooling is not None
        self.max_total_tokens = max_model_len
        if is_pooling:
            # The token that its last step would sample is never appended.
            self.max_total_tokens = num_prompt + 1
        elif sampling.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, num_prompt + sampling.max_tokens)
        self.stop_ids = sampling.stop_token_ids
        if not sampling.ignore_eos:
            self.stop_ids += eos_token_ids
        # A grammar allows the end only where its output is complete.
        self.final_ids = eos_token_ids if has_grammar else ()
        scores_prompt = sampling.prompt_logprobs is not None and not is_pooling
        self.is_scored = scores_prompt or (sampling.logprobs is not None and not is_pooling)
        self.must_compute_prompt = scores_prompt and num_prompt > 1
        if pooling is not None and pooling.needs_all_states:
            self.must_compute_prompt = True
        self.skips_prefix_cache = self.wants_no_hits or self.must_compute_prompt
        self.is_special = is_pooling or has_grammar or sampling.repetition is not None

    def change(self, change: Change) -> None:
        """Change the status as TRANSITIONS lists it. Raises IllegalTransition."""
        try:
            self.status = TRANSITIONS[self.status, change]
        except KeyError:
            raise IllegalTransition(
                f"{self.request_id} is {self.status.name}, which does not allow {change.name}"
            ) from None

    def skip_prefix_cache(self) -> None:
        """From now on, the request does not begin with cached blocks."""
        self.wants_no_hits = self.skips_prefix_cache = True

    def prompt_was_scored(self, num_tokens: int) -> None:
        """Log probabilities of its first `num_tokens` prompt tokens have been delivered."""
        if num_tokens >= self.num_prompt_tokens:
            self.must_compute_prompt = False
            self.skips_prefix_cache = self.wants_no_hits

    def begin_chunk(
        self,
        chunk: ContinueSession,
        *,
        now: float,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Begin the next input of a session: the prompt is all tokens so far and the chunk's."""
        self.change(RequestChange.INPUT_RECEIVED)
        self.token_ids = np.concatenate((self.token_ids, chunk.prompt_token_ids))
        self.num_prompt_tokens = len(self.token_ids)
        self.options = msgspec.structs.replace(self.options, resumable=chunk.resumable)
        self._take_sampling(chunk.sampling, max_model_len, eos_token_ids)
        self.events = [(RequestEvent.QUEUED, now)]
        self.asks_connector = True
        self.stop_reason = None
        self.routed_experts = None
        self.num_external_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = self.num_invalid_draft_tokens = 0

    @property
    def lora_name(self) -> str | None:
        return None if self.options.lora is None else self.options.lora.name

    @property
    def num_tokens(self) -> int:
        """Prompt and verified output of a waiting request."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Verified output of a waiting request."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV a waiting request holds."""
        return 0 if self.hold is None else self.hold.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def is_ready(self) -> bool:
        """Whether its status lets it be admitted."""
        return (self.status, RequestChange.ADMITTED) in TRANSITIONS

    def is_stopped_by(self, token_id: int, num_tokens: int) -> bool:
        """Whether `token_id`, as the last of `num_tokens` tokens, is a stop id that ends it."""
        enough = num_tokens - self.num_prompt_tokens >= self.sampling.min_tokens
        return (enough and token_id in self.stop_ids) or token_id in self.final_ids

    def append_token(self, token_id: int) -> None:
        """Append a verified token to a waiting request, sampled before its preemption."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.num_tokens} tokens)"
