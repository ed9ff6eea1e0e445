"""Prompts of `LLM` and `AsyncLLM`: texts or token ids, in the forms that vLLM takes."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NotRequired, TypeAlias, TypedDict

import msgspec
import numpy as np

from longshore.deploy.requests.cache_hints import KVCacheRetention, cache_hint, cache_options
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.requests import NO_OPTIONS, FreeText, RequestOptions

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
    """A prompt that has been read.

    text:    None if only its token ids were given.
    options: what it says about its KV.
    reasoning: of a chat: the text before what a constraint allows; None: the answer begins with it.
    """

    token_ids: list[int]
    text: str | None = None
    options: RequestOptions = NO_OPTIONS
    reasoning: FreeText | None = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of one or more prompts. Integers are the token ids of one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@contextmanager
def value_errors(where: str = "") -> Iterator[None]:
    """What is wrong with a request as a ValueError. where: begins the message."""
    try:
        yield
    except (RequestError, msgspec.MsgspecError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


class GivenPrompt(NamedTuple):
    """content: what it is made of. text, options: see `PromptInput`."""

    content: str | list[int]
    text: str | None = None
    options: RequestOptions = NO_OPTIONS


def given_prompt(prompt: Prompt, name: str) -> GivenPrompt:
    """name: of the prompt in errors. Raises ValueError."""
    if isinstance(prompt, str):
        return GivenPrompt(prompt, prompt)
    if not isinstance(prompt, Mapping):
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"{name} must be {FORMS}, not a {type(prompt).__name__}")
        return GivenPrompt(_as_ids(prompt, name))
    for key in sorted(prompt.keys() - _KEYS):
        reason = _UNSUPPORTED.get(key, f"a prompt is {FORMS}")
        raise ValueError(f"{name}: {key} is not supported; {reason}")
    text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not isinstance(text, str | None):
        raise ValueError(f"{name}: prompt must be a text")
    content = text if given is None else _as_ids(given, name)
    if content is None:
        raise ValueError(f"{name} must be {FORMS}")
    return GivenPrompt(content, text, cache_options_of(prompt, name))


def cache_options_of(prompt: Mapping[str, Any], name: str) -> RequestOptions:
    """What a prompt says about its KV. Raises ValueError."""
    with value_errors(name):
        given = msgspec.convert(prompt, _CacheSettings)
        hint = cache_hint(given.prompt_cache_key, None, None, given.kv_cache_retention)
    if given.no_store and (given.cache_salt is not None or hint is not None):
        raise ValueError(f"{name}: no_store cannot be combined with a salt or a cache hint")
    return cache_options(given.cache_salt, hint, no_store=given.no_store)


def _as_ids(values: Any, name: str) -> list[int]:
    """Token ids from a list or array of Python's or numpy's integers."""
    try:
        return list(map(operator.index, values))
    except TypeError as error:
        raise ValueError(f"{name}: token ids must be integers: {error}") from error
