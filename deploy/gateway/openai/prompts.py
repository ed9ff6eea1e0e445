"""Converts a request body to the engine's input: prompts as token ids, and sampling settings."""

import asyncio
import re
from collections.abc import Sequence
from typing import Final, TypeVar

from longshore.deploy.gateway.openai.chat_prompt import ChatRenderer, chat_prompt_options
from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.openai.parameters import MAX_TOKEN_IDS
from longshore.deploy.gateway.openai.prompt_cut import PromptCut, prompt_cut
from longshore.deploy.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from longshore.deploy.gateway.text.answer_text import StopStrings
from longshore.deploy.gateway.text.bad_words import bad_word_token_ids
from longshore.deploy.gateway.text.infilling import can_infill, infilling_prompt
from longshore.deploy.gateway.text.tokenizer import (
    MAX_INLINE_CHARACTERS,
    MAX_INLINE_TEXTS,
    MAX_TOKENS_PER_CUT,
    SLICE_CHARACTERS,
    ModelTokenizer,
)
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.validation import prompt_problem, sampling_problem
from longshore.protocol.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS: Final = 16

T = TypeVar("T")


class PromptReader:
    """Validates prompts and settings for one model. Raises ApiError naming the parameter.

    defaults: the model's defaults for parameters that a request omits.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        defaults: SamplingDefaults,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.defaults = defaults
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.chat_renderer = ChatRenderer()

    async def completion_prompts(self, request: CompletionRequest) -> list[list[int]]:
        """One valid list of token ids per prompt."""
        cut = prompt_cut(
            request,
            max_model_len=self.max_model_len,
            max_output_tokens=completion_max_tokens(request, self.defaults),
        )
        if request.suffix:
            self._check_infilling(request)
        prompts = request.prompts()
        size = sum(map(len, prompts)) + len(prompts) * len(request.suffix or "")
        if size > max_inline(self._tokenizer) or len(prompts) > MAX_INLINE_TEXTS:
            return await asyncio.to_thread(self._encode_prompts, request, cut)
        return self._encode_prompts(request, cut)

    def _encode_prompts(self, request: CompletionRequest, cut: PromptCut | None) -> list[list[int]]:
        encoded = []
        num_tokens = 0
        for given in request.prompts():
            if isinstance(given, str):
                prompt = self._encode_text(given, request, cut)
            else:
                prompt = given if cut is None else cut.token_ids(given)
            self._check_prompt(prompt, "prompt")
            num_tokens += len(prompt)
            if num_tokens > MAX_TOKEN_IDS:
                raise invalid(f"prompt has more than {MAX_TOKEN_IDS} tokens", param="prompt")
            encoded.append(prompt)
        return encoded

    def _encode_text(
        self, text: str, request: CompletionRequest, cut: PromptCut | None
    ) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise no_tokenizer("prompt")
        with_special = request.add_special_tokens is not False
        if cut is not None:
            return cut.encode(text, tokenizer, with_special=with_special)
        self.reject_too_long(text, tokenizer, "prompt")
        if request.suffix:
            self.reject_too_long(request.suffix, tokenizer, "suffix")
            return infilling_prompt(tokenizer, text, request.suffix, with_special=with_special)
        return tokenizer.encode(text) if with_special else tokenizer.encode_rendered(text)

    def _check_infilling(self, request: CompletionRequest) -> None:
        """Raise ApiError if the model or the request does not allow a suffix."""
        if self._tokenizer is None:
            raise no_tokenizer("suffix")
        if not can_infill(self._tokenizer):
            raise invalid(
                "suffix needs a model that fills in the middle, and this model's tokenizer has no "
                "special tokens for that, such as <|fim_suffix|>; remove suffix",
                param="suffix",
                code="unsupported_parameter",
            )
        if not all(isinstance(prompt, str) for prompt in request.prompts()):
            raise invalid("suffix needs prompts as text, not as token ids", param="suffix")
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(request, name):
                raise invalid(f"{name} is not supported with suffix; remove it", param=name)

    async def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The chat as one prompt, rendered with the request's options."""
        token_ids = await self.chat_token_ids(request)
        self._check_prompt(token_ids, "messages")
        return token_ids

    async def chat_token_ids(self, request: ChatRequest) -> list[int]:
        """Like `chat_prompt`, also for a prompt that is somewhat too long for the model."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise no_tokenizer("messages")
        text = await self.chat_renderer.text(
            tokenizer, request.messages, chat_prompt_options(request)
        )
        cut = prompt_cut(
            request,
            max_model_len=self.max_model_len,
            max_output_tokens=chat_max_tokens(request, self.defaults),
        )
        with_special = bool(request.add_special_tokens)
        if len(text) > tokenizer.max_inline_characters:
            return await asyncio.to_thread(self._encode_chat, text, tokenizer, with_special, cut)
        return self._encode_chat(text, tokenizer, with_special, cut)

    def _encode_chat(
        self, text: str, tokenizer: ModelTokenizer, with_special: bool, cut: PromptCut | None
    ) -> list[int]:
        if cut is not None:
            token_ids = cut.encode(text, tokenizer, with_special=with_special)
        else:
            self.reject_too_long(text, tokenizer, "messages")
            encode = tokenizer.encode if with_special else tokenizer.encode_rendered
            token_ids = encode(text)
        return token_ids

    def reject_too_long(self, text: str, tokenizer: ModelTokenizer, param: str) -> None:
        """Raise ApiError for text that cannot fit the model, counting slice by slice: tokenizing
        megabytes as a whole takes seconds and a hundred times their memory."""
        if len(text) <= SLICE_CHARACTERS:
            return
        num_tokens = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            part = text[start : start + SLICE_CHARACTERS]
            num_tokens += max(0, len(tokenizer.encode_rendered(part)) - MAX_TOKENS_PER_CUT)
            if num_tokens >= self.max_model_len:
                raise invalid(
                    f"the prompt has at least {num_tokens} tokens; this model's maximum context "
                    f"length is {self.max_model_len} tokens, prompt and output together",
                    param=param,
                    code="context_length_exceeded",
                )

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
        top_k = _given(request.top_k, defaults.top_k)
        try:
            sampling = SamplingParams(
                temperature=_given(request.temperature, defaults.temperature),
                top_p=_given(request.top_p, defaults.top_p),
                top_k=0 if top_k == -1 else top_k,
                seed=request.seed,
                max_tokens=max_tokens,
                min_tokens=request.min_tokens or 0,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=bool(request.ignore_eos),
                min_p=_given(request.min_p, defaults.min_p),
                repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
                presence_penalty=_given(request.presence_penalty, 0.0),
                frequency_penalty=_given(request.frequency_penalty, 0.0),
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
        if stops.texts and self._tokenizer is None:
            raise no_tokenizer("stop")
        return stops

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each bad word, both within a word and at the start of one."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise no_tokenizer("bad_words")
        if self._tokenizer.max_inline_characters < 0:
            raise invalid(
                "bad_words is not supported with this model's tokenizer, whose cost is not known; "
                "remove it",
                param="bad_words",
                code="unsupported_parameter",
            )
        try:
            return bad_word_token_ids(words, self._tokenizer)
        except ValueError as error:
            raise invalid(str(error), param="bad_words") from error

    def _check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        problem = prompt_problem(
            token_ids, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        if problem is not None:
            is_long = len(token_ids) >= self.max_model_len
            raise invalid(problem, param=param, code="context_length_exceeded" if is_long else None)


def max_inline(tokenizer: ModelTokenizer | None) -> int:
    """Characters, or token ids, that are encoded and checked at once; more are on a thread."""
    return MAX_INLINE_CHARACTERS if tokenizer is None else tokenizer.max_inline_characters


def completion_max_tokens(request: CompletionRequest, defaults: SamplingDefaults) -> int:
    """The requested number, else the model's default, else the API's. At least one, because the
    engine always computes a token."""
    if request.scores_only:
        return 1
    return _given(request.max_tokens, _given(defaults.max_tokens, DEFAULT_COMPLETION_TOKENS))


def chat_max_tokens(request: ChatRequest, defaults: SamplingDefaults) -> int | None:
    """None: as many as fit. Raises ApiError if the parameter's two names have different values."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens={old} and max_completion_tokens={new} are the same parameter but differ; "
            "remove one of them",
            param="max_completion_tokens",
        )
    requested = old if new is None else new
    return defaults.max_tokens if requested is None else requested


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _invalid_setting(problem: str) -> ApiError:
    """`problem` begins with the setting's name."""
    if "bad word" in problem:
        return invalid(f"bad_words: {problem}", param="bad_words")
    return invalid(problem, param=re.split(r"\W", problem, maxsplit=1)[0])


def no_tokenizer(param: str) -> ApiError:
    return invalid(
        f"{param} needs a tokenizer, but the model folder has no tokenizer.json: send the prompt "
        "of /v1/completions as token ids, without bad_words and stop",
        param=param,
    )
