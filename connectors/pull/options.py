"""The options of the pull connectors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.connectors.options import Options
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import read_private

LOOPBACK: Final = "127.0.0.1"

MAX_READ_S: Final = 30.0
"""A pull greets, asks for blocks and reads; then connections are closed by force, or the worker is
replaced. With the deadlines of all these, its blocks are free within a minute."""

_KEYS: Final = (
    "host",
    "port",
    "remote_hosts",
    "secret_file",
    "lease_s",
    "max_leased_share",
    "read_timeout_s",
)
_MAX_SECRET_FILE_BYTES: Final = 4096
_OWN_KEYS: Final = {"mooncake": ("protocol", "device_name"), "moriio": ("protocol",)}
_PROTOCOLS: Final = {"mooncake": ("tcp", "rdma"), "moriio": ("rdma", "tcp")}


class PullOptions(msgspec.Struct, frozen=True):
    """host:   address at which other engines reach this one, and on which it listens.
    port:          of the side channel; 0: any free one.
    remote_hosts:  from which blocks may be pulled.
    secret:        which both engines must know; None: every process that connects is answered.
    lease_s:       how long blocks are kept for a reader that does not renew its lease.
    max_leased_share: of the pool, in leased blocks.
    read_timeout_s: a pull that takes longer has failed.
    protocol: of Mooncake and MoRI. device_name: of Mooncake.
    """

    host: str
    port: int
    remote_hosts: tuple[str, ...]
    secret: str | None
    lease_s: float
    max_leased_share: float
    read_timeout_s: float
    protocol: str = ""
    device_name: str = ""

    @property
    def address(self) -> str:
        """`host` in a URL."""
        return url_host(self.host)


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def read_options(
    connector: str, values: Mapping[str, Any], setting: str = "--kv-connector-config"
) -> PullOptions:
    """Raises ConfigError, which names the option."""
    keys = (*_KEYS, *_OWN_KEYS.get(connector, ()))
    options = Options(connector, values, keys, setting)
    host = options.text("host", LOOPBACK) if "host" in values else LOOPBACK
    if host in ("0.0.0.0", "::", "*"):
        raise options.error(f"'host' to be an address that other engines can reach; it is {host!r}")
    remote_hosts = values.get("remote_hosts", [host])
    if not (isinstance(remote_hosts, list) and all(isinstance(each, str) for each in remote_hosts)):
        raise options.error(
            f"'remote_hosts' to be a list of addresses such as ['10.0.0.2']; it is {remote_hosts!r}"
        )
    port = options.integer("port", 0, minimum=0)
    if port > 65535:
        raise options.error(f"'port' to be at most 65535; it is {port}")
    share = options.number("max_leased_share", 0.5, minimum=0.0)
    if share > 1:
        raise options.error(f"'max_leased_share' to be at most 1; it is {share:g}")
    secret = None
    if "secret_file" in values:
        secret = _read_secret(options, options.text("secret_file", "/etc/longshore/pull.key"))
    read_timeout_s = options.number("read_timeout_s", MAX_READ_S, minimum=0.1)
    if read_timeout_s > MAX_READ_S:
        raise options.error(
            f"'read_timeout_s' to be at most {MAX_READ_S:g}, so that no block is in quarantine for "
            f"a minute; it is {read_timeout_s:g}"
        )
    return PullOptions(
        host,
        port,
        tuple(remote_hosts),
        secret,
        options.number("lease_s", 10.0, minimum=0.1),
        share,
        read_timeout_s,
        options.choice("protocol", _PROTOCOLS[connector]) if connector in _PROTOCOLS else "",
        options.text("device_name", "mlx5_0") if "device_name" in values else "",
    )


def _read_secret(options: Options, path: str) -> str:
    """The secret in a file: 40 characters, as `zmq.curve_keypair` makes them."""
    try:
        secret = read_private(Path(path), _MAX_SECRET_FILE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise options.error(f"'secret_file' to be readable: {error}") from error
    if len(secret) != 40:
        raise ConfigError(
            f"the secret in {path} has {len(secret)} characters and must have 40, as from: python "
            "-c 'import zmq; print(zmq.curve_keypair()[1].decode())'"
        )
    return secret
