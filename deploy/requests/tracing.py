"""Whether and where spans of requests are exported; without OpenTelemetry, which is an extra."""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

if TYPE_CHECKING:
    from longshore.deploy.requests.spans import RequestSpans

PROTOCOL: Final = "http/protobuf"
PROTOCOL_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first one that is set counts."""


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError if no spans can be exported there."""
    if endpoint is None:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} is not an HTTP URL. Spans are sent as OTLP over "
            "HTTP, not gRPC: use http://HOST:4318/v1/traces."
        )
    protocol = next((os.environ[name] for name in PROTOCOL_VARIABLES if name in os.environ), "")
    if protocol not in ("", PROTOCOL):
        raise ConfigError(
            f"{' or '.join(PROTOCOL_VARIABLES)} is {protocol!r}, but otlp_traces_endpoint only "
            f"supports {PROTOCOL}. Unset it."
        )
    if not _is_installed():
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry; run {install_command('otel')}"
        )


def _is_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a package above it
        return False


def open_spans(endpoint: str | None, model_name: str) -> "RequestSpans | None":
    """Spans that are exported there; None: nowhere. A URL without a path means the default one."""
    if endpoint is None:
        return None
    from longshore.deploy.requests.spans import export_spans

    url = urlsplit(endpoint)
    if url.path in ("", "/"):
        url = url._replace(path="/v1/traces")
    return export_spans(url.geturl(), model_name)
