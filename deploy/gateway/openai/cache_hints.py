"""The parameters with which clients of OpenAI's API ask to keep a prompt's KV."""

from typing import Final, Literal

import msgspec

from longshore.deploy.gateway.openai.errors import invalid
from longshore.protocol.requests import CacheHint

DEFAULT_TTL_S: Final = 300.0
_TTLS_S: Final = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """mode: accepted; the whole prompt is kept in either.
    prewarm: false is accepted."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool | None = None


def cache_hint(
    key: str | None, retention: str | None, options: PromptCacheOptions | None
) -> CacheHint | None:
    """The hint for the scheduler; None: no parameter asks for anything. Raises ApiError.

    key:       names a session.
    retention: `in_memory` or `24h`. The `ttl` of the options has precedence.
    """
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
