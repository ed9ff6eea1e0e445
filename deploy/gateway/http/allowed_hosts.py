"""Which requests a gateway without API keys serves: those that no page of another site can make a
browser send.

A page may send requests to any address, and with DNS rebinding also read the responses: the name of
its site then resolves to this server, so that the browser takes the server for the site. The Host
header still has that name. IP addresses are not resolved, so they are always allowed.
"""

import ipaddress
from collections.abc import Collection, Mapping
from typing import Final

from longshore.deploy.gateway.api.errors import ApiError
from longshore.protocol.errors import shortened

ANY: Final = "*"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class AllowedHosts:
    """names: of this server, beside localhost; `*`: all. origins: see `cors_allow_origins`."""

    def __init__(self, names: Collection[str], origins: Collection[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._origins = frozenset(origins)

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError (403) for a request that a page of another site may have sent."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if host and not self._allows(host):
            raise ApiError(
                403,
                f"the Host header {shortened(host)!r} is no name of this server, which has no API "
                "keys: a page of another site may have sent this. Start the server with "
                "--allowed-hosts NAME (* allows all) or with API keys, or use an IP address",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and method not in _SAFE_METHODS and not self._is_ours(origin, host, headers):
            raise ApiError(
                403,
                f"a page of {shortened(origin)!r} may not use this server; start it with "
                "--cors-allow-origins ORIGIN",
                code="origin_not_allowed",
            )

    def _allows(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        if not name or not port.isascii() or not port.isdigit():
            name = host
        name = name.rstrip(".")
        if name == "localhost" or name.endswith(".localhost"):
            return True
        if name in self._names or ANY in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def _is_ours(self, origin: str, host: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a page of this origin may send the request. For JSON the browser has asked, see
        `read_json_body`."""
        if ANY in self._origins or origin in self._origins:
            return True
        if origin.lower().partition("://")[2] == host:
            return True
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        return kind == b"application/json" or kind.endswith(b"+json")
