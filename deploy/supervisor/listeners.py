"""The port of a deployment: one listening socket per gateway, all bound before anything is loaded.

With several gateways the kernel deals new connections out among their sockets by a hash of both
addresses (SO_REUSEPORT). Of 256 connections at once each of four processes then gets 55 to 73; from
one socket that all of them inherit one gets 179 and another 5, because whoever wakes first empties
the queue, and what it takes streams for minutes (`benchmarks/port_sharing.py`). The advantage of
that one socket, that a gateway which dies leaves its queue to the others, is none here: when one
dies, all are stopped.
"""

import socket
from contextlib import ExitStack

from longshore.protocol.errors import ConfigError


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """So many sockets at one address, bound and not listening; port 0 takes a free one. Raises
    ConfigError if it cannot be had."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with ExitStack() as opened:
            listeners: list[socket.socket] = []
            for number in range(count):
                listener = opened.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # The first one binds without it: another deployment's port is not joined.
                if number:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind(listeners[0].getsockname() if listeners else address)
                if count > 1:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listeners.append(listener)
            opened.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port (0 takes a "
            "free one) or --host, or stop what uses it."
        ) from error
    return listeners


def url_of(listener: socket.socket) -> str:
    """Where clients on this host find it."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
