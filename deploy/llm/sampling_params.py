"""The settings of a prompt's answers, as users of `LLM` and `AsyncLLM` write them.

The names are vLLM's, including that of the class. The engine gets the `SamplingParams` of
`protocol.sampling`, which has no texts and is for one answer.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.gateway.text.bad_words import bad_word_token_ids
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.registry import AUTO, load_reasoning_parser
from longshore.deploy.requests.refused import refusing
from longshore.deploy.requests.structured_outputs import StructuredOutputsParams, structured_output
from longshore.deploy.requests.thinking import thinking_budget
from longshore.deploy.requests.validation import plain_params
from longshore.protocol.requests import StructuredOutput
from longshore.protocol.sampling import RepetitionDetection
from longshore.protocol.sampling import SamplingParams as EngineSamplingParams

MAX_ANSWERS: Final = 16_384
"""Limit of `n`."""


class RequestOutputKind(Enum):
    """What the outputs of a stream have: everything so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@refusing
@dataclass(kw_only=True)
class SamplingParams:
    """Settings of the answers to a prompt. Raises ValueError naming the setting that is invalid.

    n:              answers per prompt. They share the prompt's blocks. Each has its own seed,
                    derived from `seed`, if that is set.
    temperature:    0 is greedy; otherwise logits are divided by it.
    top_k:          keep the k most likely tokens; 0 and -1 keep all.
    top_p:          keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
    min_p:          keep tokens at least min_p times as likely as the most likely one, in [0, 1].
    seed:           makes the answers reproducible.
    stop:           strings that end an answer, after at least `min_tokens` tokens. The text
                    excludes them, unless `include_stop_str_in_output`.
    stop_token_ids: tokens that end an answer; `token_ids` includes them. The text excludes them,
                    like every token that ends an answer, unless `include_stop_str_in_output`.
    bad_words:      texts that must not appear in an answer, at the start of a word or within one.
    bad_words_token_ids: sequences of token ids that must not appear.
    ignore_eos:     the model's own end-of-sequence ids do not end an answer.
    max_tokens:     maximum number of output tokens; None: as many as the model's length allows.
    min_tokens:     end-of-sequence and stop ids cannot end an answer before this many tokens.
    repetition_penalty: 0.01 to 100; see docs/sampling.md, also for the two other penalties.
    logit_bias:     added to the logit of each token id, -100 to 100.
    repetition_detection: when repeated output ends an answer; None: never.
    logprobs:       return the log probability of each output token and of this many most likely
                    tokens, 0 to 20; None: return none.
    prompt_logprobs: the same for each prompt token except the first.
    routed_experts_prompt_start: prompt tokens that `routed_experts` leaves out, of an LLM with
                    `enable_return_routed_experts`.
    structured_outputs: constrains the answers.
    detokenize:     False: texts are empty.
    skip_special_tokens: False: texts include special tokens.
    spaces_between_special_tokens: without effect, because tokenizer.json puts none there.
    output_kind:    what the outputs of `AsyncLLM.generate` have.
    skip_reading_prefix_cache: compute the whole prompt.
    thinking_token_budget: tokens of reasoning after which it is ended; None or -1: no limit. For
                    models whose chat template has known tags of reasoning.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    repetition_detection: RepetitionDetection | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool | None = field(default=None, repr=False)
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self.stops()
        self.constraint()
        self._plain(())

    @classmethod
    def from_optional(cls, **settings: Any) -> "SamplingParams":
        """Make the settings, where None is the default of every setting except `max_tokens`."""
        given = {k: v for k, v in settings.items() if v is not None or k == "max_tokens"}
        return cls(**given)

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)

    def stops(self) -> StopStrings:
        """The strings that end an answer. Raises ValueError."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(texts):
            raise ValueError("SamplingParams: stop has an empty string")
        if texts and not self.detokenize:
            raise ValueError("SamplingParams: stop needs detokenize=True, to find the strings")
        return StopStrings(texts, self.include_stop_str_in_output, self.min_tokens)

    def constraint(self) -> StructuredOutput | None:
        """What constrains the answers, for the engine. Raises ValueError."""
        params = self.structured_outputs
        if params is None:
            return None
        if not isinstance(params, StructuredOutputsParams):
            raise ValueError(
                "SamplingParams: structured_outputs must be longshore.StructuredOutputsParams, not "
                f"a {type(params).__name__}"
            )
        if self.ignore_eos:
            raise ValueError(
                "SamplingParams: ignore_eos is not possible with structured_outputs: a complete "
                "answer ends with the end-of-sequence token; remove one of them"
            )
        return structured_output(params)

    def engine_params(self, tokenizer: ModelTokenizer | None) -> EngineSamplingParams:
        """The settings of one answer, for the engine. Raises ValueError: a user can have changed a
        setting since it was checked."""
        words = list(self.bad_words or ())
        if words and tokenizer is None:
            raise ValueError("SamplingParams: bad_words needs a tokenizer, but the model has none")
        forbidden = () if tokenizer is None or not words else bad_word_token_ids(words, tokenizer)
        plain = self._plain(forbidden)
        wanted = self.thinking_token_budget
        if wanted is None or wanted == -1:
            return plain
        template = "" if tokenizer is None else tokenizer.chat_template.source
        parser = load_reasoning_parser(AUTO, template)
        budget = thinking_budget(wanted, parser, tokenizer, vocab_size=2**31)
        if budget is None:
            raise ValueError(
                "SamplingParams: thinking_token_budget: the chat template has no known tags of "
                "reasoning; use max_tokens"
            )
        return msgspec.structs.replace(plain, thinking=budget)

    def _plain(self, bad_words_token_ids: Sequence[Sequence[int]]) -> EngineSamplingParams:
        if not 1 <= self.n <= MAX_ANSWERS:
            raise ValueError(f"SamplingParams: n={self.n} must be between 1 and {MAX_ANSWERS}")
        if self.thinking_token_budget is not None and self.thinking_token_budget < -1:
            raise ValueError(
                f"SamplingParams: thinking_token_budget={self.thinking_token_budget} must be at "
                "least 0, or -1 for no limit"
            )
        values = {name: getattr(self, name) for name in _FOR_ENGINE}
        values["repetition"] = self.repetition_detection
        values["top_k"] = 0 if self.top_k == -1 else self.top_k
        values["stop_token_ids"] = () if self.stop_token_ids is None else self.stop_token_ids
        values["bad_words_token_ids"] = [*self.bad_words_token_ids, *bad_words_token_ids]
        return plain_params(values)


_FOR_ENGINE: Final = sorted(
    {each.name for each in fields(SamplingParams)} & set(EngineSamplingParams.__struct_fields__)
)
