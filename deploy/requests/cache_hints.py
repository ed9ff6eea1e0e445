"""The parameters with which clients of OpenAI's API ask to keep a prompt's KV."""

import uuid
from typing import Annotated, Final, Literal

import msgspec

from longshore.deploy.requests.errors import invalid
from longshore.protocol.requests import (
    MAX_CACHE_PREFIXES,
    MAX_CACHE_PRIORITY,
    MAX_CACHE_TTL_S,
    CacheHint,
    CachePrefix,
    RequestOptions,
)

DEFAULT_TTL_S: Final = 300.0
_TTLS_S: Final = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """mode: accepted; the whole prompt is kept in either.
    prewarm: false is accepted."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None


_Ttl = Annotated[float, msgspec.Meta(gt=0, le=MAX_CACHE_TTL_S)]
_Priority = Annotated[int, msgspec.Meta(ge=1, le=MAX_CACHE_PRIORITY)]


class PrefixRetention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the first `num_tokens` tokens of the prompt are kept."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    ttl_s: _Ttl
    priority: _Priority = 1


class KVCacheRetention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How prompt and answer are kept, and leading parts of the prompt that are kept longer or at a
    higher priority. Without `ttl_s`, only these parts are kept."""

    ttl_s: _Ttl | None = None
    priority: _Priority = 1
    prefixes: Annotated[
        tuple[PrefixRetention, ...], msgspec.Meta(max_length=MAX_CACHE_PREFIXES)
    ] = ()


def cache_hint(
    key: str | None,
    retention: str | None,
    options: PromptCacheOptions | None,
    details: KVCacheRetention | None = None,
) -> CacheHint | None:
    """The hint for the scheduler; None: no parameter asks for anything. Raises RequestError.

    key:       names a session.
    retention: `in_memory` or `24h`. The `ttl` of the options has precedence.
    details:   in place of the two before.
    """
    if details is not None:
        return _detailed(key, details, is_alone=retention is None and options is None)
    if options is not None and options.prewarm:
        raise invalid(
            "prompt_cache_options.prewarm is not supported; remove it",
            param="prompt_cache_options",
            code="unsupported_parameter",
        )
    ttl = retention if options is None or options.ttl is None else options.ttl
    if ttl is None and key is None:
        return None
    return CacheHint(_TTLS_S.get(ttl or "", DEFAULT_TTL_S), key)


def cache_options(
    salt: str | None, hint: CacheHint | None, *, no_store: bool | None
) -> RequestOptions:
    """What a request says about its KV. no_store: neither cached nor found."""
    if no_store:  # a salt that no other request has
        return RequestOptions(cache_salt=uuid.uuid4().hex, no_store=True)
    return RequestOptions(cache_salt=salt, cache_hint=hint)


def _detailed(key: str | None, details: KVCacheRetention, *, is_alone: bool) -> CacheHint:
    reason = None
    if not is_alone:
        reason = "cannot be combined with prompt_cache_retention or prompt_cache_options"
    elif details.ttl_s is None and not details.prefixes:
        reason = "has neither ttl_s nor prefixes"
    elif details.ttl_s is None and details.priority != 1:
        reason = "has a priority without ttl_s; give one to each prefix"
    if reason is not None:
        raise invalid(f"kv_cache_retention {reason}", param="kv_cache_retention")
    prefixes = [
        CachePrefix(each.num_tokens, each.ttl_s, each.priority) for each in details.prefixes
    ]
    return CacheHint(details.ttl_s or 0.0, key, details.priority, tuple(prefixes))
