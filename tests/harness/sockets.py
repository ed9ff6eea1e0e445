"""Typed channels on sockets that are closed after the test."""

import threading
from typing import Any

import zmq

from longshore.protocol.handshake import ToClient, ToEngine
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    ServerChannel,
    close_context,
    open_socket,
)

Context = zmq.Context[zmq.Socket[bytes]]
WAIT_S = 60.0


class Sockets:
    """Opens contexts and sockets, and closes all of them."""

    def __init__(self) -> None:
        self._contexts: list[Context] = []
        self._sockets: list[Any] = []

    def new_context(self) -> Context:
        self._contexts.append(zmq.Context())
        return self._contexts[-1]

    def open(
        self, kind: int, endpoint: Endpoint, *, bind: bool, context: Context | None = None
    ) -> Any:
        """A socket of `context`, by default of the context opened first."""
        if context is None:
            context = self._contexts[0] if self._contexts else self.new_context()
        self._sockets.append(open_socket(context, kind, endpoint, bind=bind))
        return self._sockets[-1]

    def engine(self, endpoint: Endpoint, context: Context | None = None) -> Channel[Any, Any]:
        """The end that binds and receives ToEngine."""
        return Channel(self.open(zmq.DEALER, endpoint, bind=True, context=context), ToEngine)

    def server(self, endpoint: Endpoint, context: Context | None = None) -> ServerChannel[Any, Any]:
        """The same for many clients."""
        return ServerChannel(self.open(zmq.ROUTER, endpoint, bind=True, context=context), ToEngine)

    def client(self, endpoint: Endpoint, context: Context | None = None) -> Channel[Any, Any]:
        return Channel(self.open(zmq.DEALER, endpoint, bind=False, context=context), ToClient)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        for context in self._contexts:
            # In a thread, because a context that is still in use would block here forever.
            closer = threading.Thread(target=close_context, args=(context,), daemon=True)
            closer.start()
            closer.join(WAIT_S)
            assert not closer.is_alive(), "the context does not terminate"
