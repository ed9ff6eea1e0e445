"""Sampling parameters of a request, from the API to the sampler."""

import math
from typing import Final

import msgspec
from msgspec.structs import force_setattr

MAX_PATTERN_SIZE: Final = 256


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends a request whose output repeats itself: it ends in a pattern of `min_pattern_size` to
    `max_pattern_size` tokens, `min_count` times in a row. Raises ValueError.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(
                f"min_pattern_size={self.min_pattern_size} and max_pattern_size="
                f"{self.max_pattern_size} must be in this order within 1..{MAX_PATTERN_SIZE}"
            )
        if not 2 <= self.min_count <= MAX_PATTERN_SIZE:
            raise ValueError(f"min_count={self.min_count} must lie within 2..{MAX_PATTERN_SIZE}")


class ThinkingBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends the reasoning of an output that is still reasoning after `num_tokens` tokens of it: the
    next tokens are then `end_token_ids`. Raises ValueError.

    begin_token_ids: what opens the reasoning: the last tokens of the prompt, up to white space, or
                     the first ones of the output. Otherwise there is none.
    mark_token_ids:  what the model itself ends it with.
    """

    num_tokens: int
    begin_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    mark_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens < 2**31:
            raise ValueError(f"thinking_token_budget={self.num_tokens} must be at least 0")
        for name in ("begin_token_ids", "end_token_ids", "mark_token_ids"):
            token_ids = tuple(getattr(self, name))
            if not 1 <= len(token_ids) <= MAX_TAG_TOKENS or min(token_ids) < 0:
                raise ValueError(
                    f"{name} of a thinking budget has {len(token_ids)} ids; it must have "
                    f"1..{MAX_TAG_TOKENS}, none negative"
                )


MAX_TAG_TOKENS: Final = 32
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGIT_BIASES: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORD_TOKENS: Final = 32
MAX_LOGPROBS: Final = 20

_RANGES: Final = (
    ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("routed_experts_prompt_start", 0, 2**31 - 1),
)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling settings of one request. Raises ValueError with the setting that is out of range.

    temperature:    0 is greedy; otherwise logits are divided by it.
    top_k:          keep the k most likely tokens; 0 keeps all.
    top_p:          keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
    min_p:          keep tokens at least min_p times as likely as the most likely one, in [0, 1].
    seed:           the draw at an output position depends only on (seed, position). With None the
                    gateway chooses a seed, so that a request is repeatable inside the system
                    (after preemption or a restart).
    max_tokens:     maximum number of output tokens; None: as many as the model's length allows.
    min_tokens:     end-of-sequence and stop ids cannot end the request before this many output
                    tokens.
    stop_token_ids: the request ends when one of them is sampled; it is part of the output ids.
    ignore_eos:     the model's own end-of-sequence ids do not end the request.
    thinking:       when the reasoning of the output is ended; None: never.
    repetition:     when repeated output ends the request; None: never.
    repetition_penalty: 0.01 to 100; logits of tokens of prompt and output are divided by it if
                    positive, else multiplied (Keskar et al., 2019). 1 changes nothing.
    presence_penalty, frequency_penalty: -2 to 2; subtracted from the logits of output tokens, once
                    and per occurrence, as in the OpenAI API.
    logit_bias:     added to the logit of each token id, -100 to 100.
    bad_words_token_ids: sequences of ids that must not appear in the output.
    logprobs:       report the log probability of each output token and of this many most likely
                    tokens, from the model's logits before any setting applies; None: report none.
    prompt_logprobs: the same for each prompt token except the first.
    routed_experts_prompt_start: prompt tokens whose experts are not returned, by an engine that
                    returns those of tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thinking: ThinkingBudget | None = None
    repetition: RepetitionDetection | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        force_setattr(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids)))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be a finite number, at least 0")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k} must be 0 (keep every token) to {2**31 - 1}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name.endswith("logprobs"):
                continue
            if value is None or not low <= value <= high:
                raise ValueError(f"{name}={value} must lie within {low:g}..{high:g}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} does not fit in 64 bits")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens} must be at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )
        self._check_ids()

    def _check_ids(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} "
                "are allowed, because each is compared with every sampled token"
            )
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise ValueError(f"stop_token_ids={self.stop_token_ids} contains a negative id")
        biases = self.logit_bias or {}
        if len(biases) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias has {len(biases)} ids; at most {MAX_LOGIT_BIASES} are allowed"
            )
        for token_id, bias in biases.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias={{{token_id}: {bias}}}: ids must be at least 0, biases within "
                    "-100..100"
                )
        words = self.bad_words_token_ids
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(f"{len(words)} bad words; at most {MAX_BAD_WORDS} are allowed")
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS or min(word) < 0:
                raise ValueError(
                    f"a bad word has {len(word)} token ids; it must have 1..{MAX_BAD_WORD_TOKENS}, "
                    "none negative"
                )
