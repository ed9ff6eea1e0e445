"""ASGI middleware for every HTTP request: request id, API key, access log, response metric.

The client's `x-request-id` is used, or one is generated. It is part of the response's `id`, of
engine reports and of logs, and is returned as a header, as are W3C trace context headers and the
names of ignored fields.
"""

import logging
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longshore.deploy.gateway.admin_routes import ADMIN_PREFIX, SLEEP_PATHS
from longshore.deploy.gateway.api.error_body import ANTHROPIC_REQUEST_ID_HEADER, is_anthropic
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.api.unknown_fields import IgnoredFields, begin_request
from longshore.deploy.gateway.api_keys import NO_KEY, ApiKey, find_key
from longshore.deploy.gateway.http.allowed_hosts import AllowedHosts
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.request_log import AccessLog, HttpRequest, current, note_bug
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.protocol.logs.limits import LogLimit

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER: Final = b"x-request-id"
TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
OPEN_PATHS: Final = frozenset(
    {"/health", "/ready", "/ping", "/metrics", "/load", "/version", "/docs", "/", "/dashboard"}
)
"""No key is needed here: probes, scrapers and browsers have none, and the dashboard page asks for
one."""

_X_API_KEY: Final = b"x-api-key"
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
_TRACE_VALUE: Final = re.compile(rb"[ -~]{1,512}")
_ID_KEY: Final = "longshore.request_id"
_IS_NAMED_KEY: Final = "longshore.is_named"
_TRACE_KEY: Final = "longshore.trace_headers"
_API_KEY_KEY: Final = "longshore.api_key"


class RequestMiddleware:
    """An ASGI application that wraps another one.

    api_keys: keys accepted as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, as clients of
              Anthropic's API send them; empty: no key is required. The paths of operators check
              a key of their own.
    hosts:    which requests are served if no key is required; None: all.
    paths:    paths that metrics count by name. The number of other paths is unbounded.
    log:      the access log; by default one that is off.
    is_strict: reject unknown fields of requests instead of ignoring them.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[ApiKey],
        metrics: GatewayMetrics,
        paths: Collection[str] = (),
        log: AccessLog | None = None,
        *,
        hosts: AllowedHosts | None = None,
        is_strict: bool = False,
    ) -> None:
        self.app = app
        self._hosts = None if api_keys else hosts
        self._paths = paths
        self.api_keys = api_keys
        self._metrics = metrics
        self._log = AccessLog() if log is None else log
        self._is_strict = is_strict
        self._ignored_log = LogLimit(logger, max_per_second=1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(REQUEST_ID_HEADER, b"").decode("latin-1")
        is_usable = _REQUEST_ID.fullmatch(given) is not None
        scope[_ID_KEY] = given if is_usable else uuid.uuid4().hex
        scope[_IS_NAMED_KEY] = is_usable
        use_trace_headers(
            scope,
            {
                name.decode(): headers[name].decode()
                for name in TRACE_HEADERS
                if _TRACE_VALUE.fullmatch(headers.get(name, b""))
            },
        )
        request = self._log.begin(
            scope[_ID_KEY], scope["method"], scope["path"], scope.get("client")
        )
        request.user_agent = headers.get(b"user-agent", b"").decode("latin-1") or None
        ignored = begin_request(is_strict=self._is_strict)
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = scope[_ID_KEY].encode()
                trace = [
                    (name.encode(), value.encode()) for name, value in scope[_TRACE_KEY].items()
                ]
                extra = [(REQUEST_ID_HEADER, request_id), *trace, *ignored.headers()]
                if is_anthropic(scope["path"]):
                    extra.append((ANTHROPIC_REQUEST_ID_HEADER, request_id))
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            if given and not is_usable:
                raise invalid("x-request-id must be 1 to 128 visible ASCII characters")
            if self._hosts is not None and _API_KEY_KEY not in scope:
                self._hosts.check(scope["method"], headers)
            key = scope.get(_API_KEY_KEY) or self._key(scope["path"], headers)
            scope[_API_KEY_KEY], request.key = key, key.name or None
        except RequestError as error:
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
            self._log_ignored(ignored, request)

    def _ended(self, scope: Scope, request: HttpRequest, status: int | None) -> None:
        endpoint = scope["path"] if scope["path"] in self._paths else "other"
        label = "gone" if status is None else str(status)
        self._metrics.responses.labels(endpoint, label).inc()
        self._log.end(request, status)

    def _log_ignored(self, ignored: IgnoredFields, request: HttpRequest) -> None:
        if ignored.names:
            self._ignored_log.warning(
                "ignored unknown fields of a request: %s",
                ", ".join(ignored.names),
                request_id=request.request_id,
                path=request.path,
            )

    def _key(self, path: str, headers: Mapping[bytes, bytes]) -> ApiKey:
        """The key of a request. Raises RequestError if it needs one and has none."""
        is_admins = path.startswith(ADMIN_PREFIX) or path in SLEEP_PATHS
        if not self.api_keys or path in OPEN_PATHS or is_admins:
            return NO_KEY
        authorization = headers.get(b"authorization", b"")
        if not authorization and _X_API_KEY in headers:
            authorization = b"Bearer " + headers[_X_API_KEY]
        scheme, _, given = authorization.partition(b" ")
        key = find_key(self.api_keys, given.strip())
        if scheme.lower() != b"bearer" or key is None:
            raise ApiError(
                401,
                "unknown API key; send a valid one as `Authorization: Bearer KEY`"
                if authorization
                else "no API key was given; send `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return key


def use_request_id(scope: Scope, request_id: str | None) -> None:
    """Use the id in a request's body, unless the request has the header. Raises RequestError."""
    if request_id is None:
        return
    if not _REQUEST_ID.fullmatch(request_id):
        raise invalid("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    if not scope[_IS_NAMED_KEY]:
        scope[_ID_KEY] = request_id
        if (request := current()) is not None:
            request.request_id = request_id


def request_id_of(scope: Scope, prefix: str) -> str:
    """A request id for the engine: unique, even if a client uses one id for several requests."""
    given: str = scope[_ID_KEY]
    return f"{prefix}-{given}-{uuid.uuid4().hex[:8]}"


def api_key_of(scope: Scope) -> ApiKey:
    """The API key that the request was sent with."""
    key: ApiKey = scope[_API_KEY_KEY]
    return key


def use_api_key(scope: Scope, key: ApiKey) -> None:
    """The gateway itself asks, on behalf of the owner of the key."""
    scope[_API_KEY_KEY] = key


def use_trace_headers(scope: Scope, headers: Mapping[str, str]) -> None:
    """These W3C trace context headers are sent to the engines, and back to the client."""
    scope[_TRACE_KEY] = headers


def trace_headers_of(scope: Scope) -> dict[str, str] | None:
    """The W3C trace context headers of the request; None if there are none. They are the client's,
    or those of the request's own span."""
    return scope[_TRACE_KEY] or None
