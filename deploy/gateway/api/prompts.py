"""Converts a request body to the engine's input: prompts as token ids, and sampling settings."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from longshore.deploy.gateway.api.parameters import MAX_TOKEN_IDS
from longshore.deploy.gateway.api.prompt_nonces import PromptNonces
from longshore.deploy.gateway.api.requests import ChatRequest, GenerationRequest, TokenIds
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.gateway.text.bad_words import bad_word_token_ids
from longshore.deploy.gateway.text.infilling import can_infill
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.chat_messages import ChatMessage
from longshore.deploy.requests.chat_prompt import (
    NEXT_TURN,
    ChatRenderer,
    ReasonedChat,
    chat_prompt_options,
    thinking_variables,
    turn_ends,
    uses_effort,
)
from longshore.deploy.requests.errors import InvalidRequest, RequestError, invalid
from longshore.deploy.requests.prompts import PromptEncoder, PromptForm, parameter_of
from longshore.deploy.requests.validation import sampling_problem
from longshore.protocol.sampling import SamplingParams

T = TypeVar("T")


class PromptReader(PromptEncoder):
    """Also reads request bodies. Raises RequestError naming the parameter.

    defaults: the model's defaults for parameters that a request omits.
    nonces:   parts of chats that change with every request.
    template_variables: of the chat template, for requests that do not set them.
    keeps_states: the model needs `turn_ends`.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        defaults: SamplingDefaults,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        nonces: PromptNonces | None = None,
        template_variables: Mapping[str, Any] = MappingProxyType({}),
        keeps_states: bool = False,
    ) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, max_model_len=max_model_len)
        self.defaults = defaults
        self.eos_token_ids = eos_token_ids
        self.chat_renderer = ChatRenderer()
        self._nonces = PromptNonces() if nonces is None else nonces
        self._template_variables = template_variables
        self._keeps_states = keeps_states

    async def prompts(
        self,
        given: Sequence[str | TokenIds],
        request: GenerationRequest,
        *,
        max_output_tokens: int,
        suffix: str = "",
    ) -> list[TokenIds]:
        """One valid list of token ids per prompt. suffix: the text after each answer, if the model
        fills in the middle."""
        if suffix and not can_infill(self.tokenizer_for("suffix")):
            raise invalid(
                "suffix needs a model that fills in the middle, and this model's tokenizer has no "
                "special tokens for that, such as <|fim_suffix|>; remove suffix",
                param="suffix",
                code="unsupported_parameter",
            )
        form = self.form(request, max_output_tokens=max_output_tokens)
        name_of = "prompt".format if len(given) == 1 else "prompt[{}]".format
        return await self.encode_all(given, form, name_of, suffix=suffix)

    async def encode_all(
        self,
        given: Sequence[str | TokenIds],
        form: PromptForm,
        name_of: Callable[[int], str],
        *,
        suffix: str = "",
    ) -> list[TokenIds]:
        """One valid list of token ids per prompt. name_of: what messages call it."""

        def encode_all() -> list[TokenIds]:
            ids = (
                self.token_ids(each, form, name_of(index), suffix=suffix)
                for index, each in enumerate(given)
            )
            return within_limit(ids, name_of)

        size = sum(map(len, given)) + len(given) * len(suffix)
        return await self.off_loop_if_long(encode_all, size, len(given))

    async def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The chat as one prompt, rendered with the request's options."""
        token_ids = await self.chat_token_ids(request)
        self.check(token_ids, "the prompt", param="messages")
        return token_ids

    async def chat_token_ids(self, request: ChatRequest) -> list[int]:
        """Like `chat_prompt`, also for a prompt that is somewhat too long for the model."""
        text = await self.chat_text(request.messages, request)
        form = self.form(
            request,
            is_rendered=True,
            max_output_tokens=chat_max_tokens(request, self.defaults),
        )
        encode = partial(self.encoded, text, form, "the prompt", param="messages")
        return await self.off_loop_if_long(encode, len(text))

    async def turn_ends(self, request: ChatRequest, prompt: TokenIds) -> tuple[int, ...]:
        """See RequestOptions: where the prompts of next turns depart from this one, as far as the
        template tells. It may drop the reasoning of former turns once a user writes, and what it
        ends a prompt with, for the answer to begin, is in no other prompt."""
        if not (self._keeps_states and request.messages) or request.continue_final_message:
            return ()
        text = await self.chat_text(request.messages, request)
        unanswered = msgspec.structs.replace(request, add_generation_prompt=False)
        others = []
        for messages, form in (
            ([*request.messages, *NEXT_TURN], request),
            (request.messages, unanswered),
        ):
            with contextlib.suppress(RequestError):  # of a template that demands roles in turn
                others.append(await self.chat_text(messages, form))
        find = partial(turn_ends, text, len(prompt), others, self.tokenizer_for("messages"))
        return await self.off_loop_if_long(find, len(others) * len(text))

    async def chat_text(self, messages: Sequence[ChatMessage], request: ReasonedChat) -> str:
        """The chat as text, rendered with the request's options. The response names an effort that
        the template does not use, and nonces that are left out."""
        messages = self._nonces.settle(messages)
        tokenizer, options = self.tokenizer_for("messages"), chat_prompt_options(request)
        effort, render = request.reasoning_effort, self.chat_renderer.text
        template = tokenizer.chat_template.for_tools(options.tools)
        asked = thinking_variables(template, effort, thinks=request.thinks)
        own = options.variables
        options = msgspec.structs.replace(options, variables={**self._template_variables, **own})
        variables = {**self._template_variables, **asked, **own}
        with_effort = msgspec.structs.replace(options, variables=variables)
        try:
            text = await render(tokenizer, messages, with_effort)
        except InvalidRequest:
            if effort is None or not asked:
                raise
            asked = {}  # a template may reject some efforts, and another reason remains
            text = await render(tokenizer, messages, options)
        if effort is not None and not uses_effort(asked, effort):
            ignore_fields((request.effort_name,))
        return text

    def sampling(
        self,
        request: GenerationRequest,
        max_tokens: int | None,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The request's settings over the model's defaults. `max_tokens=None`: as many as fit."""
        defaults = self.defaults
        top_k = value_or(request.top_k, defaults.top_k)
        try:
            sampling = SamplingParams(
                temperature=value_or(request.temperature, defaults.temperature),
                top_p=value_or(request.top_p, defaults.top_p),
                top_k=0 if top_k == -1 else top_k,
                seed=request.seed,
                max_tokens=max_tokens,
                min_tokens=request.min_tokens or 0,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=bool(request.ignore_eos),
                min_p=value_or(request.min_p, defaults.min_p),
                repetition_penalty=value_or(
                    request.repetition_penalty, defaults.repetition_penalty
                ),
                presence_penalty=value_or(request.presence_penalty, 0.0),
                frequency_penalty=value_or(request.frequency_penalty, 0.0),
                logit_bias=request.biases(),
                bad_words_token_ids=self._bad_words(request.bad_words or ()),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                routed_experts_prompt_start=request.routed_experts_prompt_start or 0,
            )
        except ValueError as error:
            raise _invalid_setting(str(error)) from error
        problem = sampling_problem(sampling, vocab_size=self.vocab_size)
        if problem is not None:
            raise _invalid_setting(problem)
        return sampling

    def stops(self, request: GenerationRequest) -> StopStrings:
        """The strings that end an answer."""
        stops = request.stops()
        if stops.texts:
            self.tokenizer_for("stop")
        return stops

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, both within a word and at the start of one."""
        if not words:
            return ()
        tokenizer = self.tokenizer_for("bad_words")
        if tokenizer.max_inline_characters < 0:
            raise invalid(
                "bad_words is not supported with this model's tokenizer, whose cost is not known; "
                "remove it",
                param="bad_words",
                code="unsupported_parameter",
            )
        try:
            return bad_word_token_ids(words, tokenizer)
        except ValueError as error:
            raise invalid(str(error), param="bad_words") from error


def within_limit(prompts: Iterable[TokenIds], name_of: Callable[[int], str]) -> list[TokenIds]:
    """All prompts of a request. Raises RequestError if they are too long together, before the
    rest is encoded."""
    collected: list[TokenIds] = []
    num_tokens = 0
    for prompt in prompts:
        num_tokens += len(prompt)
        if num_tokens > MAX_TOKEN_IDS:
            name = name_of(len(collected))
            raise invalid(
                f"the inputs up to {name} have {num_tokens} tokens; at most {MAX_TOKEN_IDS} are "
                "allowed in a request",
                param=parameter_of(name),
            )
        collected.append(prompt)
    return collected


def chat_max_tokens(request: ChatRequest, defaults: SamplingDefaults) -> int | None:
    """None: as many as fit. Raises RequestError if the parameter's two names have different
    values."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens={old} and max_completion_tokens={new} are the same parameter but differ; "
            "remove one of them",
            param="max_completion_tokens",
        )
    requested = old if new is None else new
    return defaults.max_tokens if requested is None else requested


def value_or(value: T | None, default: T) -> T:
    return default if value is None else value


def _invalid_setting(problem: str) -> RequestError:
    """`problem` begins with the setting's name."""
    if "bad word" in problem:
        return invalid(f"bad_words: {problem}", param="bad_words")
    return invalid(problem, param=re.split(r"\W", problem, maxsplit=1)[0])
