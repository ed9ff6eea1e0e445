"""Where spans of requests are exported, and what is refused."""

import re

import pytest

from longshore.deploy.requests import tracing
from longshore.deploy.requests.tracing import check_endpoint, open_spans
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command


def test_nothing_is_loaded_or_needed_without_an_endpoint() -> None:
    check_endpoint(None)
    assert open_spans(None, "tiny") is None


@pytest.mark.parametrize("endpoint", ["grpc://collector:4317", "collector:4318", "http://"])
def test_an_endpoint_must_be_a_url_of_http(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="use http://HOST:4318/v1/traces"):
        check_endpoint(endpoint)


def test_a_protocol_that_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_endpoint("http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="only supports http/protobuf"):
        check_endpoint("http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    check_endpoint("http://collector:4318")


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_extra_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def find_spec(name: str) -> None:
        if name != missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")

    monkeypatch.setattr(tracing, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=re.escape(install_command("otel"))):
        check_endpoint("http://collector:4318")
