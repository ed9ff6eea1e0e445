"""Tells a service manager such as systemd what a deployment does, by the protocol of `sd_notify`:
one datagram to the socket that the manager names in NOTIFY_SOCKET."""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

VARIABLE: Final = "NOTIFY_SOCKET"


def notify_ready(status: str, variables: Mapping[str, str] = os.environ) -> None:
    """Requests are served. status: one line, which `systemctl status` shows."""
    _notify(f"READY=1\nSTATUS={status}", variables)


def notify_stopping(timeout_s: float, variables: Mapping[str, str] = os.environ) -> None:
    """The deployment ends within `timeout_s`. The manager waits for so long, also if its own limit
    (TimeoutStopSec) is shorter."""
    _notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(timeout_s * 1e6)}", variables)


def _notify(state: str, variables: Mapping[str, str]) -> None:
    """Does nothing without a service manager. If it cannot be reached, that is only logged: it is
    no reason to stop serving."""
    address = variables.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # a name in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
            notifier.settimeout(1.0)
            notifier.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("cannot notify the service manager at %s: %s", variables[VARIABLE], error)
