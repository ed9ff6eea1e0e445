"""What happens to every HTTP request first: it gets an id, and needs a key where keys are set.

`x-request-id` of the client is taken, else one is made; it is part of the response's `id`, of the
engine's reports and logs, and comes back as a header, as do the headers of a W3C trace context.
"""

import hmac
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.request_log import AccessLog, HttpRequest, note_bug

REQUEST_ID_HEADER: Final = b"x-request-id"
TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/", "/dashboard"})
"""Probes, scrapers and a browser that opens a page have no key; the page asks for one."""

_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
_TRACE_VALUE: Final = re.compile(rb"[ -~]{1,512}")
_ID_KEY: Final = "longshore.request_id"
_TRACE_KEY: Final = "longshore.trace_headers"


class FrontDoor:
    """An ASGI application around another one.

    api_keys: what clients may present as `Authorization: Bearer KEY`; empty: anybody may ask.
    paths:    those that are counted by name; a client may ask for any number of others.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        metrics: GatewayMetrics,
        paths: Collection[str] = (),
    ) -> None:
        self.app = app
        self._paths = paths
        self._api_keys = [key.encode() for key in api_keys]
        self._metrics = metrics
        self._log = AccessLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        trace = {
            n: headers[n] for n in TRACE_HEADERS if _TRACE_VALUE.fullmatch(headers.get(n, b""))
        }
        given = headers.get(REQUEST_ID_HEADER, b"").decode("latin-1")
        is_usable = _REQUEST_ID.fullmatch(given) is not None
        scope[_ID_KEY] = given if is_usable else uuid.uuid4().hex
        scope[_TRACE_KEY] = {name.decode(): value.decode() for name, value in trace.items()}
        extra = [(REQUEST_ID_HEADER, scope[_ID_KEY].encode()), *trace.items()]
        request = self._log.begin(
            scope[_ID_KEY], scope["method"], scope["path"], scope.get("client")
        )
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            if given and not is_usable:
                raise invalid("x-request-id must be 1 to 128 visible ASCII characters")
            self._check_key(scope["path"], headers.get(b"authorization", b""))
        except ApiError as error:
            await Exchange(scope, receive, send_with_headers).send_error(error)
            self._ended(scope, request, status)
            return
        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            note_bug(error)
            raise
        finally:
            self._ended(scope, request, status)

    def _ended(self, scope: Scope, request: HttpRequest, status: int | None) -> None:
        endpoint = scope["path"] if scope["path"] in self._paths else "other"
        label = "gone" if status is None else str(status)
        self._metrics.responses.labels(endpoint, label).inc()
        self._log.end(request, status)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if not self._api_keys or path in OPEN_PATHS:
            return
        scheme, _, given = authorization.partition(b" ")
        # All are compared, in time that tells nothing about them.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._api_keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "this server wants an API key that it knows, as `Authorization: Bearer KEY`"
                if authorization
                else "no API key was given; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def request_id_of(scope: Scope, prefix: str) -> str:
    """Unique, also if a client gives one id to several requests."""
    given: str = scope[_ID_KEY]
    return f"{prefix}-{given}-{uuid.uuid4().hex[:8]}"


def trace_headers_of(scope: Scope) -> Mapping[str, str]:
    """Of the W3C trace context that the client is in; empty if it is in none."""
    headers: Mapping[str, str] = scope[_TRACE_KEY]
    return headers
