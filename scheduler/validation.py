"""Which requests an engine cannot serve, and what their client is told."""

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.handshake import Feature
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import (
    MAX_NAME_CHARACTERS,
    AddRequest,
    ContinueSession,
    MultimodalFeature,
)
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import SchedulerConfig

MAX_HANDLE: Final = 2**31 - 1

SAMPLE_SIZE_BYTES: Final = 4
"""Of one sample of a sound, a little-endian float32."""

MAX_ADDED_BYTES: Final = 64 << 20
"""Of the requests that one plan adds: token ids, embeddings and multimodal data together."""

Rejection: TypeAlias = tuple[FinishReason, str]
"""(finish reason, text for the client)"""


class RequestValidator:
    """Refuses by name what would otherwise fail later, or be ignored.

    vocab_size:    token ids must stay below it.
    features:      what the workers can do beyond plain text.
    has_connector: somebody could use `kv_transfer_params`.
    max_encoder_tokens: of the one item that a request to a model with cross attention brings; None:
                   the model has none, and a request's items stand for positions of its prompt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        features: frozenset[Feature],
        has_connector: bool,
        has_grammars: bool,
        max_encoder_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._features = features if has_grammars else features - {Feature.STRUCTURED_OUTPUT}
        self._is_pooling_only = Feature.POOLING_ONLY in features
        self._has_connector = has_connector
        self._max_encoder_tokens = max_encoder_tokens

    def rejection(self, message: AddRequest, *, is_duplicate: bool) -> Rejection | None:
        """Why a request must not be queued; None if it may."""
        if is_duplicate:
            return FinishReason.ERROR, (
                f"request {message.request_id!r} (handle {message.handle}) is still running, or a "
                "transfer of its blocks is; give each request an id of its own"
            )
        if message.pooling is None and self._is_pooling_only:
            return FinishReason.ERROR, (
                "this engine's model has no output head: it gives vectors (pooling), and no tokens"
            )
        num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        text = self._malformed(message, num_tokens)
        if text is None and not (self._max_encoder_tokens is None and _is_plain(message)):
            text = self._bad_inputs(message, num_tokens) or self._unsupported(message)
        return self._bad_length(num_tokens) if text is None else (FinishReason.ERROR, text)

    def chunk_rejection(self, chunk: ContinueSession, *, num_tokens: int) -> Rejection | None:
        """Why a session of `num_tokens` tokens cannot go on with this chunk; None if it can."""
        text = self._bad_ids(chunk.sampling, chunk.prompt_token_ids)
        if text is not None:
            return FinishReason.ERROR, text
        return self._bad_length(num_tokens + len(chunk.prompt_token_ids))

    def _bad_length(self, num_tokens: int) -> Rejection | None:
        limit = self._config.max_model_len
        if num_tokens < limit:
            return None
        return FinishReason.IGNORED, (
            f"the prompt has {num_tokens} tokens, the engine's limit for prompt and output is "
            f"{limit}; at least one must be left for the output"
        )

    def _malformed(self, message: AddRequest, num_tokens: int) -> str | None:
        if not 0 <= message.handle <= MAX_HANDLE:
            return f"handle {message.handle} is not within 0..{MAX_HANDLE}"
        if not 0 <= message.age_s < math.inf:
            return f"age_s={message.age_s} is no number of seconds of at least 0"
        if len(message.request_id) > MAX_NAME_CHARACTERS:
            return f"request_id is longer than {MAX_NAME_CHARACTERS} characters"
        if not len(message.prompt_token_ids):
            return "the prompt has no tokens; there is nothing to continue"
        if 4 * num_tokens > MAX_ADDED_BYTES:
            return f"its inputs have {4 * num_tokens} bytes; {MAX_ADDED_BYTES} fit one plan"
        return self._bad_ids(message.sampling, message.prompt_token_ids, message.output_token_ids)

    def _bad_inputs(self, message: AddRequest, num_tokens: int) -> str | None:
        """What is wrong with what a request brings beside token ids."""
        for name in ("cache_salt", "job_id"):
            value = getattr(message, name)
            if value is not None and len(value) > MAX_NAME_CHARACTERS:
                return f"{name} is longer than {MAX_NAME_CHARACTERS} characters"
        num_prompt = len(message.prompt_token_ids)
        if self._max_encoder_tokens is None:
            text = _bad_items(message.multimodal, num_prompt)
        else:
            text = _bad_sound(message, self._max_encoder_tokens)
        if text is not None:
            return text
        embeds = message.prompt_embeds
        num_bytes = 4 * num_tokens + sum(len(item.data) for item in message.multimodal)
        num_bytes += 0 if embeds is None else len(embeds.data)
        if num_bytes > MAX_ADDED_BYTES:
            return f"its inputs have {num_bytes} bytes; {MAX_ADDED_BYTES} fit one plan"
        if message.pooling is not None and len(message.output_token_ids):
            return "a pooling request has no output tokens to go on from"
        if embeds is None:
            return None
        if embeds.hidden_size < 1:
            return f"prompt_embeds has hidden_size={embeds.hidden_size}; it must be at least 1"
        if len(embeds.data) != num_prompt * embeds.row_size_bytes:
            return (
                f"prompt_embeds has {len(embeds.data)} bytes, {num_prompt} tokens of "
                f"{embeds.hidden_size} {embeds.dtype} need {num_prompt * embeds.row_size_bytes}"
            )
        if message.sampling.prompt_logprobs is not None:
            return "prompt_logprobs of a prompt given as embeddings mean nothing: it has no ids"
        return None

    def _bad_ids(
        self, sampling: SamplingParams, ids: Int32Array, more_ids: Int32Array = EMPTY_INT32
    ) -> str | None:
        end = self._vocab_size
        if sampling.stop_token_ids and max(sampling.stop_token_ids) >= end:
            return f"a stop token id lies outside 0..{end - 1}"
        if sampling.logit_bias and max(sampling.logit_bias) >= end:
            return f"a token id in logit_bias lies outside 0..{end - 1}"
        if sampling.bad_words_token_ids and max(map(max, sampling.bad_words_token_ids)) >= end:
            return f"a token id in bad_words_token_ids lies outside 0..{end - 1}"
        for part in (ids, more_ids):
            if len(part):
                unsigned = part.view(np.uint32)  # negative ids are the largest
                if unsigned[unsigned.argmax()] >= end:  # a third of the cost of max()
                    return f"a token id lies outside 0..{end - 1}"
        return None

    def _unsupported(self, message: AddRequest) -> str | None:
        config = self._config
        wanted = {
            Feature.PROMPT_EMBEDS: message.prompt_embeds is not None,
            Feature.LORA: message.lora is not None,
            Feature.MULTIMODAL: bool(message.multimodal),
            Feature.POOLING: message.pooling is not None,
            Feature.STRUCTURED_OUTPUT: message.structured_output is not None,
        }
        for feature, is_wanted in wanted.items():
            if is_wanted and feature not in self._features:
                return f"{feature.value} was asked for, but this engine's model does not offer it"
        if message.lora is not None and config.max_loras == 0:
            return "an adapter was asked for, but max_loras=0 admits none"
        largest = max((item.num_tokens for item in message.multimodal), default=0)
        capacity = min(config.max_num_encoder_input_tokens, config.encoder_capacity)
        if largest > capacity and self._max_encoder_tokens is None:
            return (
                f"a multimodal item has {largest} tokens; this engine encodes and keeps "
                f"{capacity} at a time (max_num_encoder_input_tokens, encoder_cache_size)"
            )
        if message.kv_transfer_params is not None and not self._has_connector:
            return (
                "kv_transfer_params were given, but this engine has no KV connector that could "
                "use them"
            )
        if message.keeps_blocks and not message.resumable:
            return "keeps_blocks is for sessions; set resumable, or leave it out"
        if message.resumable:
            for name in ("structured_output", "multimodal", "pooling", "prompt_embeds"):
                if getattr(message, name):
                    return f"resumable sessions do not go together with {name}"
        return None


def _bad_items(items: Sequence[MultimodalFeature], num_prompt: int) -> str | None:
    """What is wrong with items that stand for positions of a prompt of so many tokens."""
    end = 0
    for item in items:
        if item.num_tokens < 1 or not end <= item.offset <= num_prompt - item.num_tokens:
            return (
                f"multimodal item at {item.offset} with {item.num_tokens} tokens does not fit "
                f"the prompt of {num_prompt} tokens behind the item before it"
            )
        end = item.offset + item.num_tokens
    sizes = {item.hash: item.num_tokens for item in items}
    if any(sizes[item.hash] != item.num_tokens for item in items):
        return "two multimodal items have one hash and different numbers of tokens"
    return None


def _bad_sound(message: AddRequest, max_encoder_tokens: int) -> str | None:
    """What is wrong with what a request brings for cross attention to so many tokens at most."""
    if len(message.multimodal) != 1:
        return (
            "this engine's model writes down what its encoder hears: a request brings one sound "
            f"(a multimodal item), and this one has {len(message.multimodal)} items. Plain text "
            "needs an engine whose model has no encoder"
        )
    (item,) = message.multimodal
    if item.modality != "audio":
        return f"its item is of modality {item.modality!r}; this model's encoder takes 'audio'"
    if item.offset:
        return f"its sound has offset={item.offset}; it stands for no position of the prompt: use 0"
    if not 1 <= item.num_tokens <= max_encoder_tokens:
        return (
            f"its sound has {item.num_tokens} tokens; this model's cross attention takes 1 to "
            f"{max_encoder_tokens} (max_encoder_tokens)"
        )
    if not len(item.data) or len(item.data) % SAMPLE_SIZE_BYTES:
        return (
            f"its sound has {len(item.data)} bytes; it must be samples of {SAMPLE_SIZE_BYTES} "
            "bytes (little-endian float32), at least one"
        )
    if message.prompt_embeds is not None:
        return "prompt_embeds do not go together with cross attention: a prompt is token ids"
    return None


def _is_plain(message: AddRequest) -> bool:
    """It brings token ids and sampling settings, and nothing else."""
    return not (
        message.lora
        or message.multimodal
        or message.prompt_embeds
        or message.pooling
        or message.structured_output
        or message.kv_transfer_params is not None
        or message.resumable
        or message.keeps_blocks
        or message.cache_salt
        or message.job_id
    )
