"""Request bodies of the OpenAI API."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec

from longshore.deploy.cli.setting_checks import MAX_TIMEOUT_S
from longshore.deploy.gateway.openai.cache_hints import (
    KVCacheRetention,
    PromptCacheOptions,
    cache_hint,
)
from longshore.deploy.gateway.openai.chat_messages import ChatMessage
from longshore.deploy.gateway.openai.chat_tools import tool_use
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.forced_calls import forced_schema
from longshore.deploy.gateway.openai.parameters import IGNORED, read_parameters
from longshore.deploy.gateway.openai.structured_output import ConstrainedRequest
from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.requests.live_requests import MAX_JOB_ID_CHARACTERS
from longshore.deploy.requests.structured_outputs import StructuredOutputsParams
from longshore.protocol.errors import shortened
from longshore.protocol.requests import MAX_NAME_CHARACTERS, CacheHint
from longshore.protocol.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS

TokenIds: TypeAlias = list[int]
Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
CacheSalt: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
CacheKey: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
JobId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_JOB_ID_CHARACTERS)]
CacheRetention: TypeAlias = Literal["in_memory", "in-memory", "24h"]

MAX_PROMPTS: Final = 1024
MAX_SAMPLES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted and ignored. `continuous_usage_stats` has an effect with
    `include_usage`, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(ConstrainedRequest, kw_only=True, forbid_unknown_fields=True):
    """Parameters of both endpoints, beside those that constrain the answer. None: the model's
    default. SamplingParams checks the ranges.

    logit_bias: by token id, a string in JSON.
    stop:       strings that end the answer, after at least `min_tokens` tokens. The answer excludes
                them, unless `include_stop_str_in_output`.
    bad_words:  texts that must not appear in the answer, at the start of a word or within one.
    prompt_logprobs: as in vLLM.
    routed_experts_prompt_start: prompt tokens whose experts are not returned, as in vLLM.
    prompt_cache_key, prompt_cache_retention, prompt_cache_options, kv_cache_retention: see
                `cache_hint`.
    job_id, is_last_step: the agent's job of which this request is a turn, and whether no other turn
                follows; for the scheduling policy `continuum`.
    user:       names a session for routing, if nothing else does.
    deadline_s: an answer that is not complete this long after the request's arrival is aborted.
    no_store:   the request neither reads nor fills the prefix cache and the offload tiers.
    skip_reading_prefix_cache: the request computes everything, and fills the prefix cache.
    request_id: used as `x-request-id` if that header is missing.
    add_special_tokens: whether the prompt begins with the tokenizer's special tokens. Default: for
                texts; a chat template adds its own.
    skip_special_tokens: the text excludes special tokens, which is the default.
    spaces_between_special_tokens: without effect, because tokenizer.json puts none there.
    truncate_prompt_tokens, truncation_side: see `prompt_cut`.
    return_token_ids: add the token ids of prompt and answer.
    return_tokens_as_token_ids: log probabilities name tokens by their ids, as in `token_id:7`.
    kv_transfer_params: of a router that drives both legs of a request; see `transfer_params`.
    """

    model: str | None = None
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    routed_experts_prompt_start: Int32 | None = None
    n: Int32 | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    job_id: JobId | None = None
    is_last_step: bool | None = None
    kv_cache_retention: KVCacheRetention | None = None
    user: str | None = None
    deadline_s: float | None = None
    no_store: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def cache_hint(self) -> CacheHint | None:
        """Whether the prompt's KV is worth keeping. Raises ApiError."""
        return cache_hint(
            self.prompt_cache_key,
            self.prompt_cache_retention,
            self.prompt_cache_options,
            self.kv_cache_retention,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        """Every chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def shows_special_tokens(self) -> bool:
        return self.skip_special_tokens is False

    @property
    def num_samples(self) -> int:
        """Answers per prompt. Raises ApiError."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_SAMPLES:
            raise invalid(f"n={n} must be between 1 and {MAX_SAMPLES}", param="n")
        return n

    def stops(self, param: str = "stop") -> StopStrings:
        """Raises ApiError, with the name of the parameter in the request."""
        texts = [self.stop] if isinstance(self.stop, str) and self.stop else self.stop or []
        if len(texts) > MAX_STOPS:
            raise invalid(
                f"{param} has {len(texts)} strings; at most {MAX_STOPS} are allowed", param=param
            )
        for text in texts:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise invalid(
                    f"{param} has a string of {len(text)} characters; each must have 1 to "
                    f"{MAX_STOP_CHARACTERS}",
                    param=param,
                )
        is_shown = bool(self.include_stop_str_in_output)
        return StopStrings(tuple(dict.fromkeys(texts)), is_shown, self.min_tokens or 0)

    def biases(self) -> dict[int, float] | None:
        """`logit_bias` by integer token id. Raises ApiError."""
        if len(self.logit_bias or ()) > MAX_LOGIT_BIASES:
            raise invalid(
                f"logit_bias has {len(self.logit_bias or ())} token ids; at most "
                f"{MAX_LOGIT_BIASES} are allowed",
                param="logit_bias",
            )
        for token_id in self.logit_bias or ():
            if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= 10):
                raise invalid(
                    f"logit_bias: {shortened(token_id)!r} is not a token id", param="logit_bias"
                )
        return {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()} or None


# Neutral values in addition to None.
_OF_BEAMS: Final = {"best_of": 1, "length_penalty": 1, "early_stopping": False}
_NOT_OF_BEAMS: Final[dict[str, tuple[object, ...]]] = {
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "stop": ([], ""),
    "include_stop_str_in_output": (False,),
    "skip_reading_prefix_cache": (False,),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "job_id": (),
    "is_last_step": (),
    "kv_transfer_params": (),
    "logprobs": (),
    "prompt_logprobs": (),
    "routed_experts_prompt_start": (0,),
    "echo": (False,),
    "stream": (False,),
}


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. One prompt or a list of them, each as text or as token ids.

    The answer's token ids are part of every choice by default if the model has no tokenizer.
    `logprobs` is the number of most likely tokens to list. `echo` puts the prompt before the
    answer's text and log probabilities; with it `max_tokens` may be 0, to score a prompt. `suffix`
    is the text after the answer, for models that fill in the middle.

    `use_beam_search` returns the `n` most likely answers of a search with `best_of` beams (default:
    `n`); `length_penalty` and `early_stopping` as in transformers.
    """

    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    best_of: Int32 | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt: str | list[str | int | TokenIds]

    def check_beams(self) -> None:
        """Raise ApiError for beam parameters without a beam search, and for parameters that a beam
        search does not support."""
        if not self.use_beam_search:
            for name, neutral in _OF_BEAMS.items():
                # All of the best n of n answers are returned.
                also = self.n if name == "best_of" else None
                if getattr(self, name) not in (None, neutral, also):
                    raise invalid(
                        f"{name} is not supported without use_beam_search=true; remove it",
                        param=name,
                        code="unsupported_parameter",
                    )
            return
        constraint = self.constraint()
        if constraint is not None:
            name, _ = constraint
            raise invalid(f"{name} is not supported with use_beam_search; remove it", param=name)
        for name, accepted in _NOT_OF_BEAMS.items():
            if getattr(self, name) not in (None, *accepted):
                raise invalid(
                    f"{name} is not supported with use_beam_search; remove it", param=name
                )

    @property
    def scores_only(self) -> bool:
        """Only the prompt is scored, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | TokenIds]:
        """The list of prompts. Raises ApiError as `each_of` does."""
        return each_of(self.prompt, "prompt", MAX_PROMPTS)


def each_of(
    given: str | Sequence[str | int | TokenIds], param: str, maximum: int
) -> list[str | TokenIds]:
    """The list of prompts or inputs, which are all of one kind (see `read_parameters`). Raises
    ApiError for none or too many."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(f"{param} is an empty list; it needs at least one item", param=param)
    if isinstance(given[0], int):
        return [cast(TokenIds, given)]
    if len(given) > maximum:
        raise invalid(f"{param} has {len(given)} items; at most {maximum} are allowed", param=param)
    return cast(list[str | TokenIds], given)


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. `max_tokens` is the old name of `max_completion_tokens`.

    add_generation_prompt, continue_final_message, chat_template_kwargs: see `ChatPromptOptions`.
    tools, tool_choice, parallel_tool_calls: see `ToolUse`.
    include_reasoning: False: the answer's reasoning is left out.
    echo: the answer begins with the text of the last message, if it is the assistant's, or if
        `add_generation_prompt` is false; as in vLLM.
    """

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    def constraint(self) -> tuple[str, StructuredOutputsParams] | None:
        """The schema of a forced call, or else as for completions. `response_format` is for answers
        that are text, so it does not exclude a forced call."""
        constraint = super().constraint()
        schema = forced_schema(self.tools or (), tool_use(self))
        if schema is None:
            return constraint
        if constraint is not None and constraint[0] != "response_format":
            raise invalid(
                f"{constraint[0]} and tool_choice constrain the same answer; remove one of them",
                param=constraint[0],
            )
        return "tool_choice", StructuredOutputsParams(json=schema)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to list; None: no log probabilities. Raises ApiError."""
        best = self.top_logprobs
        if best and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", param="top_logprobs")
        if best is not None and not 0 <= best <= MAX_LOGPROBS:
            raise invalid(
                f"top_logprobs={best} must be between 0 and {MAX_LOGPROBS}", param="top_logprobs"
            )
        return (best or 0) if self.logprobs else None


OF_CHATS: Final[dict[str, tuple[object, ...]]] = {
    **{
        name: _NOT_OF_BEAMS.get(name, ())
        for name in ChatRequest.__struct_fields__
        if name not in IGNORED
    },
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "n": (1,),
    "no_store": (False,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stop_token_ids": ([],),
    "top_logprobs": (0,),
}
"""The parameters of chats, with the values that have no effect, for endpoints in other formats:
those that such an endpoint does not have are not unknown, and so rejected."""

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """A request body as `kind`. Raises ApiError (400) naming the invalid parameter."""
    request = read_parameters(kind, body)
    check_deadline(request.deadline_s)
    check_no_store(request)
    check_job(request)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid(
            "prompt_logprobs is not supported with stream=true; remove one of them",
            param="prompt_logprobs",
        )
    return request


def check_no_store(request: GenerationRequest) -> None:
    """Raises ApiError. A prompt_cache_key is no contradiction: it also chooses the engine."""
    if not request.no_store:
        return
    if request.cache_salt is not None:
        raise invalid(
            "no_store disables sharing, so cache_salt has no effect; remove one of them",
            param="no_store",
        )
    for name in ("prompt_cache_retention", "prompt_cache_options", "kv_cache_retention"):
        if getattr(request, name) is not None:
            raise invalid(
                f"no_store keeps nothing, so {name} has no effect; remove one of them",
                param="no_store",
            )


def check_job(request: GenerationRequest) -> None:
    """Raises ApiError."""
    if request.is_last_step is not None and request.job_id is None:
        raise invalid("is_last_step needs job_id", param="is_last_step")


def check_deadline(deadline_s: float | None) -> None:
    """Raises ApiError."""
    if deadline_s is not None and not 0 < deadline_s <= MAX_TIMEOUT_S:
        raise invalid(
            f"deadline_s={deadline_s} must be above 0 and at most {MAX_TIMEOUT_S}",
            param="deadline_s",
        )
