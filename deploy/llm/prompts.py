"""Prompts of `LLM` and `AsyncLLM`: texts or token ids, in the forms that vLLM takes."""

import operator
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NotRequired, TypeAlias, TypedDict

import msgspec
import numpy as np

from longshore.deploy.gateway.openai.cache_hints import KVCacheRetention, cache_hint
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.prompt_cut import PromptCut
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.tokenization import AS_USUAL, Tokenization
from longshore.deploy.requests.validation import prompt_problem
from longshore.protocol.requests import CacheHint

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class CachedPrompt(TypedDict, total=False):
    """What a prompt that is a dict may say about its KV, as over HTTP.

    cache_salt: only prompts with the same salt share cached prefixes.
    kv_cache_retention: how long it is kept: `ttl_s`, `priority` and `prefixes`.
    prompt_cache_key: names a session: its next prompt replaces the hint. Alone, it asks for 300 s.
    no_store:   the prefix cache and offload tiers are neither read nor filled.
    """

    cache_salt: str
    kv_cache_retention: Mapping[str, Any]
    prompt_cache_key: str
    no_store: bool


class TextPrompt(CachedPrompt):
    """A text."""

    prompt: str


class TokensPrompt(CachedPrompt):
    """Token ids. prompt: their text, which outputs repeat."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


class _CacheSettings(msgspec.Struct, frozen=True):
    """See `CachedPrompt`."""

    cache_salt: str | None = None
    kv_cache_retention: KVCacheRetention | None = None
    prompt_cache_key: str | None = None
    no_store: bool = False


FORMS: Final = 'a text, token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'
_KEYS: Final = {*TextPrompt.__annotations__, *TokensPrompt.__annotations__}
_UNSUPPORTED: Final = {
    "multi_modal_data": "this method takes no images, audio or video; audio goes to LLM.transcribe",
    "mm_processor_kwargs": "this method takes no images, audio or video",
    "prompt_embeds": "pass the text or the token ids",
    "encoder_prompt": "audio goes to LLM.transcribe",
}


@dataclass(frozen=True)
class PromptInput:
    """A prompt that has been parsed.

    text:       None if only its token ids were given.
    other fields: see `LiveRequests.open`.
    """

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    cache_hint: CacheHint | None = None
    no_store: bool = False


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of one or more prompts. Integers are the token ids of one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PromptParser:
    """Parses prompts for one model.

    tokenizer: None: prompts must be token ids.
    """

    tokenizer: ModelTokenizer | None
    model_dir: Path
    vocab_size: int
    max_model_len: int

    def parse(
        self,
        prompt: Prompt,
        where: str,
        *,
        gives_tokens: bool = True,
        tokenization: Tokenization = AS_USUAL,
    ) -> PromptInput:
        """The prompt's tokens. where: name of the prompt in errors. gives_tokens: at least one
        output token must fit too. Raises ValueError."""
        text: str | None = None
        settings: Mapping[str, Any] = {}
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            for name in sorted(prompt.keys() - _KEYS):
                reason = _UNSUPPORTED.get(name, f"a prompt is {FORMS}")
                raise ValueError(f"{where}: {name} is not supported; {reason}")
            text, settings = prompt.get("prompt"), prompt
            if not isinstance(text, str | None):
                raise ValueError(f"{where}: prompt must be a text")
        elif not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"{where} must be {FORMS}, not a {type(prompt).__name__}")
        given = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if given is None or given is text:
            if text is None:
                raise ValueError(f"{where} must be {FORMS}")
            with_special = tokenization.add_special_tokens is not False
            ids = self._encode(text, tokenization, gives_tokens, with_special=with_special)
        else:
            ids = _as_ids(given, where)
            cut = self._cut(tokenization, gives_tokens)
            ids = ids if cut is None else cut.token_ids(ids)
        parsed = PromptInput(ids, text, *_cache_fields(settings, where))
        return self.checked(parsed, where, gives_tokens=gives_tokens)

    def parse_rendered(
        self,
        text: str,
        where: str,
        tokenization: Tokenization = AS_USUAL,
        cache: CachedPrompt | None = None,
    ) -> PromptInput:
        """A rendered chat, whose template has added the special tokens."""
        with_special = bool(tokenization.add_special_tokens)
        ids = self._encode(text, tokenization, gives_tokens=True, with_special=with_special)
        for name in sorted((cache or {}).keys() - CachedPrompt.__annotations__):
            raise ValueError(f"{where}: {name} is no key of CachedPrompt")
        return self.checked(PromptInput(ids, text, *_cache_fields(cache or {}, where)), where)

    def checked(self, prompt: PromptInput, where: str, *, gives_tokens: bool = True) -> PromptInput:
        """Raises ValueError if the model cannot compute it."""
        problem = prompt_problem(
            prompt.token_ids,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            gives_tokens=gives_tokens,
        )
        if problem is not None:
            raise ValueError(f"{where}: {problem}")
        return prompt

    def _cut(self, tokenization: Tokenization, gives_tokens: bool) -> PromptCut | None:
        return tokenization.cut(
            self.tokenizer, max_model_len=self.max_model_len, gives_tokens=gives_tokens
        )

    def _encode(
        self, text: str, tokenization: Tokenization, gives_tokens: bool, *, with_special: bool
    ) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                f'{self.model_dir} has no tokenizer.json: pass prompts as {{"prompt_token_ids": '
                "[...]}"
            )
        text.encode()  # raises ValueError for a lone surrogate
        cut = self._cut(tokenization, gives_tokens)
        if cut is not None:
            return cut.encode(text, self.tokenizer, with_special=with_special)
        encode = self.tokenizer.encode if with_special else self.tokenizer.encode_rendered
        return encode(text)


def _cache_fields(
    prompt: Mapping[str, Any], where: str
) -> tuple[str | None, CacheHint | None, bool]:
    """The salt, the hint and `no_store` of a prompt. Raises ValueError."""
    try:
        given = msgspec.convert(prompt, _CacheSettings)
        hint = cache_hint(given.prompt_cache_key, None, None, given.kv_cache_retention)
    except (msgspec.ValidationError, ApiError) as error:
        raise ValueError(f"{where}: {error}") from None
    if not given.no_store:
        return given.cache_salt, hint, False
    if given.cache_salt is not None or hint is not None:
        raise ValueError(f"{where}: no_store cannot be combined with a salt or a cache hint")
    return uuid.uuid4().hex, None, True  # a salt that no other prompt has


def _as_ids(values: Any, where: str) -> list[int]:
    """Token ids from a list or array of Python's or numpy's integers."""
    try:
        return list(map(operator.index, values))
    except TypeError as error:
        raise ValueError(f"{where}: token ids must be integers: {error}") from error
