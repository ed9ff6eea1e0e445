"""Reads the body of a request with JSON content."""

from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.protocol.errors import shortened


async def read_json_body(exchange: Exchange, max_bytes: int) -> bytes:
    """The body, unparsed. Raises ApiError: 415 if the content type is not JSON, 413 if the body is
    larger than `max_bytes`.

    Other content types are rejected because a browser sends them to any origin without a preflight:
    any web page could make this server work. JSON needs the origin's consent
    (`cors_allow_origins`).
    """
    kind = dict(exchange.scope["headers"]).get(b"content-type", b"")
    media = kind.partition(b";")[0].strip().lower()
    if media != b"application/json" and not media.endswith(b"+json"):
        found = f"content type {shortened(media.decode('latin-1'))}" if media else "no content type"
        raise ApiError(
            415,
            f"the request body has {found}; send it with Content-Type: application/json",
            code="unsupported_media_type",
        )
    return await exchange.read_body(max_bytes, "max-body-mib")
