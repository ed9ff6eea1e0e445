"""The options of the encoder connectors that pull."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from longshore.connectors.base import ECRole
from longshore.connectors.options import Options
from longshore.connectors.pull.options import LOOPBACK, PullOptions, read_options

SETTING: Final = "--ec-connector-config"
MAX_OUTPUTS: Final = 1 << 16
MAX_PEERS: Final = 64

_SHARED: Final = ("host", "port", "secret_file", "lease_s", "read_timeout_s")
_MOONCAKE_KEYS: Final = ("protocol", "device_name")


class Peer(NamedTuple):
    host: str
    port: int


class EncoderOptions(NamedTuple):
    """peers:    side channels of engines that may have an output, asked in this order.
    max_outputs: that each worker keeps in host memory.
    pull:        options of the transport and of the side channel.
    """

    peers: tuple[Peer, ...]
    max_outputs: int
    pull: PullOptions


def read_encoder_options(transport: str, values: Mapping[str, Any], role: ECRole) -> EncoderOptions:
    """Raises ConfigError, which names the option."""
    shared = (*_SHARED, *(_MOONCAKE_KEYS if transport == "mooncake" else ()))
    options = Options(transport, values, ("peers", "max_outputs", *shared), SETTING)
    given = values.get("peers", [])
    peers = tuple(map(_peer, given)) if isinstance(given, list) else (None,)
    if not all(peers) or len(peers) > MAX_PEERS:
        raise options.error(
            f"'peers' to be a list of at most {MAX_PEERS} addresses such as ['10.0.0.2:5600']; it "
            f"is {given!r}"
        )
    if bool(peers) != (role != "ec_producer"):
        needs = "is for engines that load outputs" if peers else "must name the engines to ask"
        raise options.error(f"'peers' {needs}; --ec-role is {role}", verb=":")
    max_outputs = options.integer("max_outputs", 64, minimum=1)
    if max_outputs > MAX_OUTPUTS:
        raise options.error(f"'max_outputs' to be at most {MAX_OUTPUTS}; it is {max_outputs}")
    known = tuple(peer for peer in peers if peer is not None)
    hosts = sorted({values.get("host", LOOPBACK), *(peer.host for peer in known)}, key=str)
    of_pull = {"read_timeout_s": 5.0} | {key: values[key] for key in shared if key in values}
    pull = read_options(transport, {**of_pull, "remote_hosts": hosts}, SETTING)
    return EncoderOptions(known, max_outputs, pull)


def _peer(text: object) -> Peer | None:
    if not isinstance(text, str):
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return None
    return Peer(host, int(port))
