"""Validates requests: one that the engine cannot serve is rejected with a reason."""

import math
from typing import Final, TypeAlias

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.handshake import Feature
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import (
    MAX_CACHE_PREFIXES,
    MAX_CACHE_PRIORITY,
    MAX_CACHE_TTL_S,
    MAX_CONSTRAINT_BYTES,
    MAX_NAME_CHARACTERS,
    AddRequest,
    CacheHint,
    ContinueSession,
    PromptEmbeds,
)
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import SchedulerConfig

MAX_HANDLE: Final = 2**31 - 1

_SAMPLE_SIZE_BYTES: Final = 4  # of audio: little-endian float32

MAX_ADDED_BYTES: Final = 64 << 20
"""Limit for the token ids, embeddings and multimodal data of all requests that a plan adds."""

Rejection: TypeAlias = tuple[FinishReason, str]
"""(finish reason, text for the client)"""

_OPTIONAL_INPUTS: Final = (
    Feature.PROMPT_EMBEDS,
    Feature.LORA,
    Feature.MULTIMODAL,
    Feature.POOLING,
    Feature.STRUCTURED_OUTPUT,
)
"""Features that are named like the field of a request that asks for them."""


def in_use(message: AddRequest) -> str:
    return (
        f"request {message.request_id!r} (handle {message.handle}) is still running, or its blocks "
        "are being transferred; give each request a unique id and handle"
    )


class RequestValidator:
    """Rejects requests that would otherwise fail later, or whose settings would be ignored.

    vocab_size:    token ids must be below it.
    features:      what the workers support beyond plain text.
    has_connector: there is a connector that `kv_transfer_params` are for.
    has_experts:   outputs have the experts of tokens.
    max_encoder_tokens: in a model with cross attention, the limit for the one item of a request;
                   None if the model has none: then items take positions of the prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        features: frozenset[Feature],
        has_connector: bool,
        has_grammars: bool,
        has_experts: bool = False,
        max_encoder_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._is_pooling_only = Feature.POOLING_ONLY in features
        self._classifies = Feature.CLASSIFY in features
        if not has_grammars:
            features -= {Feature.STRUCTURED_OUTPUT}
        self._unsupported_inputs = [one.value for one in _OPTIONAL_INPUTS if one not in features]
        self._has_connector = has_connector
        self._has_experts = has_experts
        self._max_encoder_tokens = max_encoder_tokens

    def rejection(self, message: AddRequest, *, is_duplicate: bool) -> Rejection | None:
        """Why a request must not be queued; None if it is valid."""
        if is_duplicate:
            return FinishReason.ERROR, in_use(message)
        num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        text = self._unsupported(message) or self._malformed(message, num_tokens)
        if text is not None:
            return FinishReason.ERROR, text
        start = message.sampling.routed_experts_prompt_start
        if start and not self._has_experts:
            return FinishReason.IGNORED, (
                f"routed_experts_prompt_start={start} was given, but this engine does not return "
                "experts; start it with --enable-return-routed-experts"
            )
        return self._bad_length(num_tokens, gives_tokens=message.options.pooling is None)

    def chunk_rejection(self, chunk: ContinueSession, *, num_tokens: int) -> Rejection | None:
        """Why a session of `num_tokens` tokens cannot continue with this chunk; None if it can."""
        text = self._bad_ids(chunk.sampling, chunk.prompt_token_ids)
        if text is not None:
            return FinishReason.ERROR, text
        return self._bad_length(num_tokens + len(chunk.prompt_token_ids))

    def _bad_length(self, num_tokens: int, *, gives_tokens: bool = True) -> Rejection | None:
        limit = self._config.max_model_len
        if num_tokens + gives_tokens <= limit:
            return None
        if not gives_tokens:
            return FinishReason.IGNORED, (
                f"the prompt has {num_tokens} tokens, but the engine's limit is {limit}; shorten it"
            )
        return FinishReason.IGNORED, (
            f"the prompt has {num_tokens} tokens, but the engine's limit for prompt and output is "
            f"{limit} and at least one token must remain for the output; shorten the prompt"
        )

    def _unsupported(self, message: AddRequest) -> str | None:
        """What the request asks for that this engine cannot do."""
        options = message.options
        if options.pooling is None and self._is_pooling_only:
            return (
                "this engine's model has no output head: it gives vectors; send a pooling request"
            )
        for name in self._unsupported_inputs:
            if getattr(options, name):
                return f"{name} was requested, but this engine's model does not support it"
        is_classified = options.pooling is not None and options.pooling.kind == "classify"
        if is_classified and not self._classifies:
            return "scores of labels were requested, but this model has no classification head"
        if options.lora is not None and self._config.max_loras == 0:
            return "an adapter was requested, but max_loras=0 allows none"
        if options.kv_transfer_params is not None and not self._has_connector:
            return "kv_transfer_params were given, but this engine has no KV connector"
        if options.keeps_blocks and not options.resumable:
            return "keeps_blocks needs a session: set resumable as well, or omit keeps_blocks"
        if options.resumable:
            for name in ("structured_output", "multimodal", "pooling", "prompt_embeds"):
                if getattr(options, name):
                    return f"resumable sessions cannot be combined with {name}"
        if self._max_encoder_tokens is not None:
            return _bad_audio(message, self._max_encoder_tokens)
        return self._bad_items(message) if options.multimodal else None

    def _malformed(self, message: AddRequest, num_tokens: int) -> str | None:
        """What is wrong with the request itself."""
        options = message.options
        if not 0 <= message.handle <= MAX_HANDLE:
            return f"handle {message.handle} is not in 0..{MAX_HANDLE}"
        if not 0 <= message.age_s < math.inf:
            return f"age_s={message.age_s} must be a finite number of seconds, at least 0"
        for what, name in (
            ("request_id", message.request_id),
            ("cache_salt", options.cache_salt),
            ("job_id", options.job_id),
            ("the tenant's name", options.tenant.name),
        ):
            if len(name or "") > MAX_NAME_CHARACTERS:
                return f"{what} is longer than {MAX_NAME_CHARACTERS} characters"
        if options.cache_hint is not None:
            reason = _bad_hint(options.cache_hint)
            if reason is not None:
                return reason
        if not len(message.prompt_token_ids):
            return "the prompt has no tokens; there is nothing to continue"
        spec = options.structured_output
        if spec is not None and len(spec.text.encode()) > MAX_CONSTRAINT_BYTES:
            return f"the {spec.kind} is too large; at most {MAX_CONSTRAINT_BYTES} bytes are allowed"
        num_bytes = 4 * num_tokens
        if options.multimodal:
            num_bytes += sum(len(item.data) for item in options.multimodal)
        if options.prompt_embeds is not None:
            num_bytes += len(options.prompt_embeds.data)
        if num_bytes > MAX_ADDED_BYTES:
            return f"its inputs have {num_bytes} bytes; the limit is {MAX_ADDED_BYTES}"
        if options.pooling is not None and options.structured_output is not None:
            return "structured_output cannot be combined with pooling, which has no tokens"
        if options.pooling is not None and len(message.output_token_ids):
            return "a pooling request cannot have output tokens"
        if options.prompt_embeds is not None:
            text = _bad_embeds(options.prompt_embeds, message)
            if text is not None:
                return text
        return self._bad_ids(message.sampling, message.prompt_token_ids, message.output_token_ids)

    def _bad_ids(
        self, sampling: SamplingParams, ids: Int32Array, more_ids: Int32Array = EMPTY_INT32
    ) -> str | None:
        end = self._vocab_size
        if sampling.stop_token_ids and max(sampling.stop_token_ids) >= end:
            return f"a stop token id is outside 0..{end - 1}"
        if sampling.logit_bias and max(sampling.logit_bias) >= end:
            return f"a token id in logit_bias is outside 0..{end - 1}"
        if sampling.bad_words_token_ids and max(map(max, sampling.bad_words_token_ids)) >= end:
            return f"a token id in bad_words_token_ids is outside 0..{end - 1}"
        for part in (ids, more_ids):
            if len(part):
                unsigned = part.view(np.uint32)  # negative ids are the largest
                if unsigned[unsigned.argmax()] >= end:  # a third of the cost of max()
                    return f"a token id is outside 0..{end - 1}"
        return None

    def _bad_items(self, message: AddRequest) -> str | None:
        """What is wrong with items that take positions of the prompt."""
        num_prompt, end = len(message.prompt_token_ids), 0
        items = message.options.multimodal
        for item in items:
            if item.num_tokens < 1 or not end <= item.offset <= num_prompt - item.num_tokens:
                return (
                    f"multimodal item at {item.offset} with {item.num_tokens} tokens overlaps the "
                    f"item before it, or exceeds the prompt of {num_prompt} tokens"
                )
            end = item.offset + item.num_tokens
        sizes = {item.hash: item.num_tokens for item in items}
        if any(sizes[item.hash] != item.num_tokens for item in items):
            return "two multimodal items have the same hash but different numbers of tokens"
        largest = max(sizes.values())
        limit = min(self._config.max_num_encoder_input_tokens, self._config.encoder_capacity)
        if largest > limit:
            return (
                f"a multimodal item has {largest} tokens; this engine's limit is {limit} "
                "(max_num_encoder_input_tokens, encoder_cache_size)"
            )
        return None


def _bad_embeds(embeds: PromptEmbeds, message: AddRequest) -> str | None:
    if embeds.hidden_size < 1:
        return f"prompt_embeds has hidden_size={embeds.hidden_size}; it must be at least 1"
    num_prompt = len(message.prompt_token_ids)
    if len(embeds.data) != num_prompt * embeds.row_size_bytes:
        return (
            f"prompt_embeds has {len(embeds.data)} bytes, but {num_prompt} tokens with "
            f"hidden_size={embeds.hidden_size} in {embeds.dtype} need "
            f"{num_prompt * embeds.row_size_bytes}"
        )
    if message.sampling.prompt_logprobs is not None:
        return "prompt_logprobs are not possible with prompt_embeds, which have no token ids"
    return None


def _bad_hint(hint: CacheHint) -> str | None:
    if not 0 <= hint.ttl_s <= MAX_CACHE_TTL_S or not (hint.ttl_s or hint.prefixes):
        return f"cache_hint.ttl_s={hint.ttl_s} is not in 0..{MAX_CACHE_TTL_S}"
    if len(hint.session or "") > MAX_NAME_CHARACTERS:
        return f"cache_hint.session is longer than {MAX_NAME_CHARACTERS} characters"
    if len(hint.prefixes) > MAX_CACHE_PREFIXES:
        return f"cache_hint has more than {MAX_CACHE_PREFIXES} prefixes"
    for prefix in hint.prefixes:
        if prefix.num_tokens < 1:
            return f"cache_hint: a prefix of {prefix.num_tokens} tokens has no token"
        if not 0 < prefix.ttl_s <= MAX_CACHE_TTL_S:
            return f"cache_hint: ttl_s={prefix.ttl_s} of a prefix is not in 0..{MAX_CACHE_TTL_S}"
    for priority in (hint.priority, *(prefix.priority for prefix in hint.prefixes)):
        if not 1 <= priority <= MAX_CACHE_PRIORITY:
            return f"cache_hint.priority={priority} is not in 1..{MAX_CACHE_PRIORITY}"
    return None


def _bad_audio(message: AddRequest, max_encoder_tokens: int) -> str | None:
    """What is wrong with the inputs of a request to a model with cross attention."""
    items = message.options.multimodal
    if len(items) != 1:
        return (
            "this engine's model transcribes audio: a request needs exactly one audio item "
            f"(multimodal), but this one has {len(items)} items. Send plain text to "
            "an engine whose model has no encoder"
        )
    (item,) = items
    if item.modality != "audio":
        return f"its item has modality {item.modality!r}; this model's encoder takes 'audio'"
    if item.offset:
        return f"its audio has offset={item.offset}, but takes no position of the prompt; use 0"
    if not 1 <= item.num_tokens <= max_encoder_tokens:
        return (
            f"its audio has {item.num_tokens} tokens; this model's cross attention takes 1 to "
            f"{max_encoder_tokens} (max_encoder_tokens)"
        )
    if not len(item.data) or len(item.data) % _SAMPLE_SIZE_BYTES:
        return (
            f"its audio has {len(item.data)} bytes; it must be one or more samples of "
            f"{_SAMPLE_SIZE_BYTES} bytes (little-endian float32)"
        )
    if message.options.prompt_embeds is not None:
        return "prompt_embeds cannot be combined with cross attention; send token ids"
    return None
