"""The parameters of a generation, by the names of OpenAI's and vLLM's APIs. The other APIs
translate theirs to a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast

import msgspec

from longshore.deploy.gateway.api.field_rules import FIELD_RULES, LABEL
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.structured_output import ConstrainedRequest
from longshore.deploy.gateway.api.tools import client_choice, client_tools
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.requests.cache_hints import KVCacheRetention, PromptCacheOptions, cache_hint
from longshore.deploy.requests.chat_messages import ChatMessage, arguments_object
from longshore.deploy.requests.chat_tools import tool_use
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.forced_calls import MAX_FORCED_CALLS, forced_constraint
from longshore.deploy.requests.live_requests import MAX_JOB_ID_CHARACTERS
from longshore.deploy.requests.refused import of_values
from longshore.deploy.requests.structured_outputs import StructuredOutputsParams
from longshore.protocol.errors import shortened
from longshore.protocol.requests import MAX_NAME_CHARACTERS, CacheHint
from longshore.protocol.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS
from longshore.protocol.settings import MAX_TIMEOUT_S

TokenIds: TypeAlias = list[int]
Int32: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
CacheSalt: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
CacheKey: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
JobId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_JOB_ID_CHARACTERS)]
Effort: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
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
    truncate_prompt_tokens, truncation_side: see `PromptEncoder.cut`.
    return_token_ids: add the token ids of prompt and answer.
    return_tokens_as_token_ids: log probabilities name tokens by their ids, as in `token_id:7`.
    kv_transfer_params: of a router that drives both legs of a request; see `transfer_params`.
    thinking_token_budget: tokens of reasoning after which it is ended; -1: no limit, as in vLLM.
    """

    budget_name: ClassVar[str] = "thinking_token_budget"
    """What the API calls it."""

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
    thinking_token_budget: Int32 | None = None

    def check(self) -> None:
        """Raise RequestError for parameters of the engine that have no effect together. A
        prompt_cache_key is no contradiction to no_store: it also chooses the engine."""
        check_deadline(self.deadline_s)
        if self.is_last_step is not None and self.job_id is None:
            raise invalid("is_last_step needs job_id", param="is_last_step")
        if not self.no_store:
            return
        if self.cache_salt is not None:
            raise invalid(
                "no_store disables sharing, so cache_salt has no effect; remove one of them",
                param="no_store",
            )
        for name in ("prompt_cache_retention", "prompt_cache_options", "kv_cache_retention"):
            if getattr(self, name) is not None:
                raise invalid(
                    f"no_store keeps nothing, so {name} has no effect; remove one of them",
                    param="no_store",
                )

    def cache_hint(self) -> CacheHint | None:
        """Whether the prompt's KV is worth keeping. Raises RequestError."""
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
        """Whether every chunk of a stream has the usage so far."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def shows_special_tokens(self) -> bool:
        return self.skip_special_tokens is False

    @property
    def num_samples(self) -> int:
        """Answers per prompt. Raises RequestError."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_SAMPLES:
            raise invalid(f"n={n} must be between 1 and {MAX_SAMPLES}", param="n")
        return n

    def stops(self, param: str = "stop") -> StopStrings:
        """The stop strings. Raises RequestError, with the name of the parameter in the request."""
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
        """`logit_bias` by integer token id. Raises RequestError."""
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
    "thinking_token_budget": (-1,),
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


def each_of(
    given: str | Sequence[str | int | TokenIds], param: str, maximum: int
) -> list[str | TokenIds]:
    """The list of prompts or inputs, which are all of one kind (see `read_parameters`). Raises
    RequestError for none or too many."""
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

    add_generation_prompt, continue_final_message, chat_template_kwargs, documents: see
        `ChatPromptOptions`.
    tools, tool_choice, parallel_tool_calls: see `ToolUse`.
    include_reasoning: False: the answer's reasoning is left out.
    reasoning_effort: see `thinking_variables`.
    echo: the answer begins with the text of the last message, if it is the assistant's, or if
        `add_generation_prompt` is false; as in vLLM.
    """

    effort_name: ClassVar[str] = "reasoning_effort"
    """What the API calls it."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model reasons, if the request says so beside its effort."""
        return None

    def check(self) -> None:
        super().check()
        self.tools = client_tools(self.tools)
        self.tool_choice = client_choice(self.tool_choice)
        for i, message in enumerate(self.messages):
            for j, call in enumerate(message.tool_calls or ()):
                call.function.arguments, is_object = arguments_object(call.function.arguments)
                if not is_object:
                    ignore_fields((f"messages[{i}].tool_calls[{j}].function.arguments",))

    def constraint(
        self, max_calls: int = MAX_FORCED_CALLS
    ) -> tuple[str, StructuredOutputsParams] | None:
        """The schema of a forced call, or else as for completions. `response_format` is for answers
        that are text, so it does not exclude a forced call. max_calls: see `forced_constraint`."""
        constraint = super().constraint()
        forced = forced_constraint(self.tools or (), tool_use(self), max_calls)
        if forced is None:
            return constraint
        if constraint is not None and constraint[0] != "response_format":
            raise invalid(
                f"{constraint[0]} and tool_choice constrain the same answer; remove one of them",
                param=constraint[0],
            )
        return "tool_choice", forced

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to list; None: no log probabilities. Raises RequestError."""
        best = self.top_logprobs
        if best and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", param="top_logprobs")
        if best is not None and not 0 <= best <= MAX_LOGPROBS:
            raise invalid(
                f"top_logprobs={best} must be between 0 and {MAX_LOGPROBS}", param="top_logprobs"
            )
        return (best or 0) if self.logprobs else None


OF_CHATS: Final = of_values(
    {
        **{
            name: _NOT_OF_BEAMS.get(name, ())
            for name in ChatRequest.__struct_fields__
            if FIELD_RULES["openai"].get(name) is not LABEL
        },
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "documents": ([],),
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
)
"""The parameters of chats, with the values that have no effect, for endpoints in other formats:
those that such an endpoint does not have are not unknown, and so rejected."""

RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(kind: type[RequestT], body: bytes) -> RequestT:
    """A request body as `kind`. Raises InvalidRequest naming the invalid parameter."""
    request = read_parameters(kind, body)
    request.check()
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid(
            "prompt_logprobs is not supported with stream=true; remove one of them",
            param="prompt_logprobs",
        )
    return request


def check_deadline(deadline_s: float | None) -> None:
    """Raise RequestError for a deadline that is out of range."""
    if deadline_s is not None and not 0 < deadline_s <= MAX_TIMEOUT_S:
        raise invalid(
            f"deadline_s={deadline_s} must be above 0 and at most {MAX_TIMEOUT_S}",
            param="deadline_s",
        )
