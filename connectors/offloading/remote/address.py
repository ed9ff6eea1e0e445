"""Where a remote store is: the URL and its options, checked without contacting it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

_REDIS: Final = ("redis", "rediss", "unix")
_OBJECTS: Final = ("s3", "file", "memory")
_EXAMPLES: Final = "s3://bucket/prefix, redis://host:port/db, rediss://…, unix:///path/to/socket, "
_REDIS_OPTIONS: Final = (
    "username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs",
)  # fmt: skip
# Of obstore's HTTP client, which are no options of a store: it panics.
_CLIENT_OPTIONS: Final = frozenset({
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type",
    "default_headers", "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle", "http2_max_frame_size", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url",
    "randomize_addresses", "read_timeout", "timeout", "user_agent",
})  # fmt: skip
ENDPOINT_OPTIONS: Final = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_SECRET: Final = re.compile("password|secret|token|key", re.IGNORECASE)


@dataclass(frozen=True)
class RemoteAddress:
    """A remote store. It can contain secrets, so show only `name`.

    name:    the URL without user, password and query, for messages.
    options: of the client library, by name.
    """

    url: str = field(repr=False)
    name: str
    options: Mapping[str, str | bool] = field(repr=False)

    @property
    def is_redis(self) -> bool:
        return self.url.partition(":")[0] in _REDIS

    def hide_secrets(self, text: str) -> str:
        """A message of a client library, one line, without passwords and keys."""
        for secret in self._secrets():
            text = text.replace(secret, "***")
        return text.partition("\n")[0][:300]

    def _secrets(self) -> list[str]:
        parts = urlsplit(self.url)
        values = [
            value
            for name, value in self.options.items()
            if isinstance(value, str) and _SECRET.search(name)
        ]
        values += [parts.password or "", unquote(parts.password or "")]
        return sorted(filter(None, values), key=len, reverse=True)


def remote_address(url: str, options: Mapping[str, Any], ttl_s: int | None) -> RemoteAddress:
    """Check `remote_url` and `remote_options`. Raises ConfigError, also if the library for this
    kind of store is not installed; the message never has the URL's password."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is not a number
    except ValueError as error:
        raise _error(f"is not a URL ({error})") from None
    name = _name_of(parts)
    if parts.scheme not in (*_REDIS, *_OBJECTS):
        raise _error(f"is {name!r}, and there is no remote tier for {parts.scheme!r}")
    if parts.scheme in ("s3", "redis", "rediss") and not parts.hostname:
        raise _error(f"is {name!r}, which names no {'bucket' if parts.scheme == 's3' else 'host'}")
    if parts.scheme in ("unix", "file") and (parts.netloc or not parts.path.startswith("/")):
        raise _error(f"is {name!r}, which is not {parts.scheme}:// and an absolute path")
    database = dict(parse_qsl(parts.query)) if parts.scheme == "unix" else {"db": parts.path[1:]}
    if parts.scheme in _REDIS and not (database.keys() <= {"db"} and _is_number(database)):
        raise _error(f"is {name!r}, where only the number of a database may follow the server")
    if parts.scheme != "unix" and (parts.query or parts.fragment):
        raise _error(f"is {name!r} with a query; set remote_options instead")
    address = RemoteAddress(url, name, dict(options))
    for key, value in options.items():
        if not isinstance(value, str | bool):
            raise ConfigError(f"remote_options: {key!r} must be a text, true or false")
        if address.is_redis and key not in _REDIS_OPTIONS:
            known = ", ".join(_REDIS_OPTIONS)
            raise ConfigError(
                f"remote_options has no option {key!r} for Redis; its options are {known}"
            )
        if parts.scheme == "s3" and key.lower() in _CLIENT_OPTIONS:
            raise ConfigError(
                f"remote_options has no option {key!r} for S3. HTTP without TLS is allowed by an "
                "endpoint that begins with http://, and remote_timeout_ms limits an operation."
            )
        if key.lower() in ENDPOINT_OPTIONS and not _is_http(value):
            raise ConfigError(f"remote_options: {key!r} must be http:// or https:// and a host")
        if parts.scheme in ("file", "memory"):
            raise ConfigError(f"remote_options are not used with {parts.scheme}://; remove them")
    if ttl_s is not None and not address.is_redis:
        raise ConfigError(
            "remote_ttl_s is for Redis. An object store deletes old objects by its own lifecycle "
            "rules: remove remote_ttl_s, and set a rule for the bucket."
        )
    if not address.is_redis and find_spec("obstore") is None:
        raise ConfigError(
            f"remote_url needs the package obstore; install it with: {install_command('s3')}"
        )
    return address


def _name_of(parts: SplitResult) -> str:
    """Without what comes before an @, even in a URL that is wrong."""
    if parts.scheme in _OBJECTS:
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    slashes = "//" if parts.netloc or parts.path.startswith("/") else ""
    return f"{parts.scheme}:{slashes}{(parts.netloc + parts.path).rpartition('@')[2]}"


def _is_http(endpoint: str | bool) -> bool:
    try:
        parts = urlsplit(str(endpoint))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_number(database: Mapping[str, str]) -> bool:
    return not database.get("db") or database["db"].isdecimal()


def _error(text: str) -> ConfigError:
    return ConfigError(
        f"remote_url {text}. Use one of: {_EXAMPLES}file:///folder/that/engines/share"
    )
