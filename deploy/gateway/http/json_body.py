"""The body of a request that brings JSON, and says so."""

from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.openai.errors import ApiError


async def read_json_body(exchange: Exchange, max_bytes: int) -> bytes:
    """The body, not parsed yet. Raises ApiError: 415 if it is not said to be JSON, 413 if it is
    larger than `max_bytes`.

    A browser sends JSON to another origin only if that one has allowed it (`cors_allow_origins`),
    other types without asking: a page that anybody visits could make this server work.
    """
    kind = dict(exchange.scope["headers"]).get(b"content-type", b"")
    media = kind.partition(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        said = f"is said to be {media.decode('latin-1')}" if media else "has no type"
        raise ApiError(
            415,
            f"the request body {said}; send it with Content-Type: application/json",
            code="unsupported_media_type",
        )
    return await exchange.read_body(max_bytes, "max-body-mib")
