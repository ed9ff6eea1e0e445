"""An OpenTelemetry collector for tests: takes spans as OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids are hexadecimal, and empty without a parent; times in seconds since 1970.

    resource: attributes of the program.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_s: float
    end_s: float
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class SpanReceiver:
    """url: where it takes spans. It can be read when these have been exported."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, body: bytes) -> None:
        received = list(_spans_of(ExportTraceServiceRequest.FromString(body)))
        with self._changed:
            self.spans += received
            self._changed.notify_all()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        """By rising begin."""
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(children, key=lambda span: (span.begin_s, span.end_s))

    def wait_for(self, name: str, count: int, timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """The spans with this name, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.named(name)) >= count, timeout_s), (
                f"{[span.name for span in self.spans]}"
            )
            return self.named(name)


@contextmanager
def span_receiver() -> Iterator[SpanReceiver]:
    receiver = SpanReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_known = self.path == "/v1/traces"
            if is_known:
                receiver.take(body)
            self.send_response(200 if is_known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    span.status.code,
                    _attributes(span.attributes),
                    resource,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
