"""The span of an HTTP exchange, to which the spans of its requests to the engines belong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from longshore.deploy.gateway.api.errors import reason_of, status_of
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.middleware import trace_headers_of, use_trace_headers
from longshore.deploy.gateway.request_log import current

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans


def use_spans(spans: "RequestSpans | None") -> None:
    """The current HTTP request is for another model, whose spans these are."""
    if (request := current()) is not None:
        request.spans = spans


@contextmanager
def server_span(exchange: Exchange, spans: "RequestSpans | None", route: str) -> Iterator[None]:
    """The span of what is done meanwhile, if spans are exported. Its trace context replaces the
    client's, in the requests to the engines and in the response."""
    request = current()
    if spans is None or request is None:
        yield
        return
    request.spans = spans
    scope = exchange.scope
    attributes: dict[str, Any] = {
        "http.request.method": request.method,
        "http.route": route,
        "url.path": request.path,
        "url.scheme": scope["scheme"],
    }
    name = f"{request.method} {route}"
    span = spans.begin_exchange(name, attributes, trace_headers_of(scope) or {})
    use_trace_headers(scope, span.headers)
    try:
        yield
    finally:
        failure, problem = request.failure, None
        if request.bug is not None:
            problem = type(request.bug).__name__
        elif failure is not None and status_of(failure) >= 500:
            problem = reason_of(failure)
        attributes = {} if problem is None else {"error.type": problem}
        if exchange.status is not None:
            attributes["http.response.status_code"] = exchange.status
        span.end(attributes, problem)
