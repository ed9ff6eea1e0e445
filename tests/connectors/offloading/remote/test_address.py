"""URLs and options of remote stores: what is rejected, and that nothing secret is shown."""

from typing import Any

import pytest

from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.remote import address as module
from longshore.connectors.offloading.remote.address import remote_address
from longshore.connectors.offloading.remote.backend import open_backend
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command


def read(**options: Any) -> object:
    return read_options({"cpu_bytes_to_use": "1MiB"} | options)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("redis://:pa%20ss@host:6379/2", "redis://host:6379/2"),
        ("rediss://user:pass@host", "rediss://host"),
        ("unix:///run/redis?db=3", "unix:///run/redis"),
        ("file:///shared", "file:///shared"),
        ("memory://", "memory://"),
    ],
)
def test_messages_have_the_url_without_what_is_secret(url: str, name: str) -> None:
    found = remote_address(url, {}, None)
    assert found.name == name
    assert "pass" not in repr(found)
    assert found.is_redis == (name.partition(":")[0] in ("redis", "rediss", "unix"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remote_url": "gs://bucket"}, "'gs://bucket', and there is no remote tier for 'gs'"),
        ({"remote_url": "bucket"}, "no remote tier for ''"),
        ({"remote_url": "localhost:6379"}, "remote_url is 'localhost:6379', and there is no"),
        ({"remote_url": "redis:user:pa@a:1/0"}, "remote_url is 'redis:a:1/0', which names no host"),
        ({"remote_url": "redis://user:p/a@a:1/0"}, "remote_url is not a URL"),
        ({"remote_url": "redis://p/a@a:1/0"}, "remote_url is 'redis://a:1/0', where only"),
        ({"remote_url": "redis://host:port"}, "remote_url is not a URL"),
        ({"remote_url": "redis:///0"}, "'redis:///0', which names no host"),
        ({"remote_url": "redis://a/first"}, "only the number of a database may follow"),
        ({"remote_url": "redis://a?sockt_timeout=1"}, "'redis://a' with a query; set"),
        ({"remote_url": "unix:///a?password=b"}, "only the number of a database may follow"),
        ({"remote_url": "s3://a?region=b"}, "'s3://a' with a query; set remote_options"),
        ({"remote_url": "s3:///prefix"}, "which names no bucket"),
        ({"remote_url": "unix://run/redis"}, "not unix:// and an absolute path"),
        ({"remote_url": "file://folder"}, "not file:// and an absolute path"),
        ({"remote_timeout_ms": 5}, "remote_timeout_ms is set, but remote_url is not"),
        ({"remote_url": "file:///a", "remote_ttl_s": 5}, "remote_ttl_s is for Redis"),
        ({"remote_url": "file:///a", "remote_options": {"a": "b"}}, "are not used with file://"),
        ({"remote_url": "redis://a", "remote_options": {"db": "b"}}, "no option 'db' for Redis"),
        ({"remote_url": "s3://a", "remote_options": {"endpoint": 1}}, "'endpoint' must be a text"),
        ({"remote_url": "redis://a", "remote_ttl_s": 0}, "remote_ttl_s"),
        ({"remote_url": "s3://a", "remote_options": {"allow_http": "true"}}, "begins with http://"),
        ({"remote_url": "s3://a", "remote_options": {"ALLOW_HTTP": True}}, "no option"),
        ({"remote_url": "s3://a", "remote_options": {"timeout": "5s"}}, "remote_timeout_ms limits"),
        ({"remote_url": "s3://a", "remote_options": {"endpoint": "a b"}}, "http:// or https://"),
        ({"remote_url": "s3://a", "remote_options": {"aws_endpoint": True}}, "http:// or https://"),
        ({"remote_url": "s3://a", "remote_options": {"endpoint_url": "http://a:x"}}, "and a host"),
        ({"remote_url": "redis://a", "remote_timeout_ms": 0}, "remote_timeout_ms"),
        ({"remote_url": "redis://a", "remote_concurrency": 0}, "remote_concurrency"),
        ({"remote_url": "redis://a", "remote_retry_s": -1}, "remote_retry_s"),
        (
            {"remote_url": "redis://a", "remote_max_bytes_in_flight": "many"},
            "remote_max_bytes_in_flight='many' is not a size",
        ),
    ],
)
@pytest.mark.req("CFG-05")
def test_an_option_that_cannot_work_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(**options)
    assert message in str(raised.value)


def test_an_option_that_only_the_library_knows_is_rejected_at_startup() -> None:
    address = remote_address("s3://bucket", {"endpointt": "http://a"}, None)
    with pytest.raises(ConfigError, match=r"remote_options: .*endpointt"):
        open_backend(address, timeout_s=1, ttl_s=None)


def test_no_message_has_a_secret() -> None:
    found = remote_address("redis://user:s3%20cret@host:1/0", {"password": "t0psecret"}, None)
    text = "cannot reach user:s3%20cret@host with t0psecret or s3 cret\nand more"
    assert found.hide_secrets(text) == "cannot reach user:***@host with *** or ***"
    for scheme in ("gopher", "redis"):
        with pytest.raises(ConfigError) as raised:
            read(remote_url=f"{scheme}://user:s3cret@host:1/0?password=hidd3n")
        assert "s3cret" not in str(raised.value)
        assert "hidd3n" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3://bucket", "file:///folder"])
def test_a_missing_library_is_an_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        read(remote_url=url)
    assert "needs the package obstore; " in str(raised.value)
    assert install_command("s3") in str(raised.value)
    read(remote_url="redis://host")  # needs none


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_cert_reqs": "sometimes"}, "'sometimes' is not one of required, optional, none"),
        ({"ssl_ca_certs": "/no/such/file"}, "the certificates cannot be read: .*No such file"),
        ({"ssl_certfile": "/no/such/file"}, "the certificates cannot be read: .*No such file"),
    ],
)
def test_tls_options_that_cannot_work_are_rejected_at_startup(
    options: dict[str, str], message: str
) -> None:
    address = remote_address("rediss://host", options, None)
    with pytest.raises(ConfigError, match=message):
        open_backend(address, timeout_s=1, ttl_s=None)
