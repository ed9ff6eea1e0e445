"""The transports by name of their connector. Imports no library: each is loaded when it is made."""

from collections.abc import Callable
from typing import Final

from longshore.connectors.pull.mooncake import MooncakeTransport
from longshore.connectors.pull.moriio import MoRIIOTransport
from longshore.connectors.pull.nixl import NixlTransport
from longshore.connectors.pull.options import PullOptions
from longshore.connectors.pull.p2p.transport import P2PTransport
from longshore.connectors.pull.transport import Transport

TRANSPORTS: Final[dict[str, Callable[[PullOptions], Transport]]] = {
    "mooncake": MooncakeTransport,
    "moriio": MoRIIOTransport,
    "nixl": NixlTransport,
    "p2p_nccl": P2PTransport,
}
