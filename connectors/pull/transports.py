"""The transports by name of their connector. Imports no library: each is loaded when it is made."""

from collections.abc import Callable
from typing import Final

from longshore.connectors.pull.nixl import NixlTransport
from longshore.connectors.pull.transport import Transport

TRANSPORTS: Final[dict[str, Callable[[], Transport]]] = {"nixl": NixlTransport}
