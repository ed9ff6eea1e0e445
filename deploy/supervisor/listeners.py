"""The port of a deployment: one listening socket per gateway, all bound before the model is loaded.

With several gateways, the kernel distributes new connections among their sockets by a hash of both
addresses (SO_REUSEPORT). Of 256 simultaneous connections, each of four processes gets 55 to 73.
With one inherited socket, one process gets 179 and another 5, because the process that wakes first
empties the queue, and its connections stream for minutes. One inherited socket would keep the queue
of a gateway that dies, but here all processes are stopped when one dies.
"""

import socket
from contextlib import ExitStack

from longshore.protocol.errors import ConfigError


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """`count` sockets at one address, bound but not listening; port 0 selects a free port. Raises
    ConfigError if the address cannot be bound."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        with ExitStack() as opened:
            listeners: list[socket.socket] = []
            for number in range(count):
                listener = opened.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # The first one binds without it, so as not to share another deployment's port.
                if number:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind(listeners[0].getsockname() if listeners else address)
                if count > 1:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listeners.append(listener)
            opened.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}. Choose another --port (0 selects a "
            "free one) or --host, or stop the process that uses it."
        ) from error
    return listeners


def url_of(listener: socket.socket) -> str:
    """The URL for clients on this host."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
