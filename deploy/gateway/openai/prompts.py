"""From a request body to what the engine is asked: prompts as token ids, and sampling settings."""

import asyncio
import re
from collections.abc import Sequence
from typing import Final, TypeVar

from longshore.deploy.gateway.openai.chat_form import ChatRenderer, chat_form
from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from longshore.deploy.gateway.text.answer_text import Stops
from longshore.deploy.gateway.text.tokenizer import (
    MAX_INLINE_CHARACTERS,
    MAX_TOKENS_PER_CUT,
    ModelTokenizer,
)
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.requests.prompt_check import prompt_problem, sampling_problem
from longshore.protocol.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS: Final = 16

T = TypeVar("T")


class PromptReader:
    """Checks prompts and settings against one model. Raises ApiError naming the parameter.

    defaults: the model's, for what a request does not say.
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
        """One list of token ids per prompt, each fit for the model."""
        prompts = request.prompts()
        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        if num_characters > MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode_prompts, prompts)
        return self._encode_prompts(prompts)

    def _encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, str):
                tokenizer = self._tokenizer
                if tokenizer is None:
                    raise no_tokenizer("prompt")
                self.refuse_hopeless(prompt, tokenizer, "prompt")
                prompt = tokenizer.encode(prompt)
            self._check_prompt(prompt, "prompt")
            encoded.append(prompt)
        return encoded

    async def chat_prompt(self, request: ChatRequest) -> list[int]:
        """The chat as one prompt, in the form that the request asks for."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise no_tokenizer("messages")
        text = await self.chat_renderer.text(tokenizer, request.messages, chat_form(request))
        if len(text) > MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode_chat, text, tokenizer)
        return self._encode_chat(text, tokenizer)

    def _encode_chat(self, text: str, tokenizer: ModelTokenizer) -> list[int]:
        self.refuse_hopeless(text, tokenizer, "messages")
        token_ids = tokenizer.encode_rendered(text)
        self._check_prompt(token_ids, "messages")
        return token_ids

    def refuse_hopeless(self, text: str, tokenizer: ModelTokenizer, param: str) -> None:
        """Count slice by slice and stop early: megabytes that can never fit are not tokenized
        whole, which takes seconds and a hundred times the memory."""
        if len(text) <= MAX_INLINE_CHARACTERS:
            return
        num_tokens = 0
        for start in range(0, len(text), MAX_INLINE_CHARACTERS):
            part = text[start : start + MAX_INLINE_CHARACTERS]
            num_tokens += max(0, len(tokenizer.encode_rendered(part)) - MAX_TOKENS_PER_CUT)
            if num_tokens >= self.max_model_len:
                raise invalid(
                    f"the prompt has {num_tokens} tokens and more; this model's "
                    f"maximum context length is {self.max_model_len} tokens, prompt and answer "
                    "together",
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
        """The request's settings over the model's defaults. `max_tokens=None` is what fits."""
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
            )
        except ValueError as error:
            raise _invalid_setting(str(error)) from error
        problem = sampling_problem(sampling, vocab_size=self.vocab_size)
        if problem is not None:
            raise _invalid_setting(problem)
        return sampling

    def stops(self, request: GenerationRequest) -> Stops:
        """The texts that end an answer."""
        stops = request.stops()
        if stops.texts and self._tokenizer is None:
            raise no_tokenizer("stop")
        return stops

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each as it is written within a word, and as a word of its own."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise no_tokenizer("bad_words")
        if not all(word.strip() for word in words):
            raise invalid("bad_words holds a text without any character", param="bad_words")
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        encoded = (tuple(self._tokenizer.encode_rendered(spelling)) for spelling in spellings)
        return tuple(dict.fromkeys(encoded))

    def _check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        problem = prompt_problem(
            token_ids, vocab_size=self.vocab_size, max_model_len=self.max_model_len
        )
        if problem is not None:
            is_long = len(token_ids) >= self.max_model_len
            raise invalid(problem, param=param, code="context_length_exceeded" if is_long else None)


def completion_max_tokens(request: CompletionRequest, defaults: SamplingDefaults) -> int:
    """As many as asked for, else the model's default or the API's. The engine computes one at
    least."""
    if request.scores_only:
        return 1
    return _given(request.max_tokens, _given(defaults.max_tokens, DEFAULT_COMPLETION_TOKENS))


def chat_max_tokens(request: ChatRequest, defaults: SamplingDefaults) -> int | None:
    """None is as many as fit. Raises ApiError if the two names for it disagree."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            f"max_tokens={old} and max_completion_tokens={new} are two names of one limit",
            param="max_completion_tokens",
        )
    asked = old if new is None else new
    return defaults.max_tokens if asked is None else asked


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _invalid_setting(problem: str) -> ApiError:
    """`problem` begins with the setting's name."""
    if "bad word" in problem:
        return invalid(f"bad_words: {problem}", param="bad_words")
    return invalid(problem, param=re.split(r"\W", problem, maxsplit=1)[0])


def no_tokenizer(param: str) -> ApiError:
    return invalid(
        f"{param} needs a tokenizer, and this model folder has no tokenizer.json: give the prompt "
        "of /v1/completions as token ids, and neither bad_words nor stop",
        param=param,
    )
