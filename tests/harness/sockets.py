"""Typed channels on sockets that are closed after the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from longshore.protocol.handshake import ToClient, ToEngine
from longshore.protocol.transport.channel import (
    Channel,
    ClientChannel,
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

    def engine(self, endpoint: Endpoint) -> Channel[Any, Any]:
        """The end that binds and receives ToEngine."""
        return Channel(self.open(zmq.DEALER, endpoint, bind=True), ToEngine)

    def server(self, endpoint: Endpoint, context: Context | None = None) -> ServerChannel[Any, Any]:
        """The same for many clients."""
        return ServerChannel(self.open(zmq.ROUTER, endpoint, bind=True, context=context), ToEngine)

    def peer(self, endpoint: Endpoint) -> Channel[Any, Any]:
        """The other end of `engine`."""
        return Channel(self.open(zmq.DEALER, endpoint, bind=False), ToClient)

    def client(self, endpoint: Endpoint, context: Context | None = None) -> ClientChannel[Any, Any]:
        """A client of `server`."""
        return ClientChannel(self.open(zmq.DEALER, endpoint, bind=False, context=context), ToClient)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        for context in self._contexts:
            # In a thread, because a context that is still in use would block here forever.
            closer = threading.Thread(target=close_context, args=(context,), daemon=True)
            closer.start()
            closer.join(WAIT_S)
            assert not closer.is_alive(), "the context does not terminate"


class _Wire:
    """In place of a socket: sends each message `times` times."""

    def __init__(self, socket: Any, times: int) -> None:
        self._socket = socket
        self._times = times

    def send(self, frame: bytes, flags: int) -> None:
        for _ in range(self._times):
            self._socket.send(frame, flags)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        for _ in range(self._times):
            self._socket.send_multipart(frames, flags)


@contextmanager
def sending(channel: Any, *, times: int) -> Iterator[None]:
    """Each message that the channel sends meanwhile arrives so often; 0: it is lost."""
    socket = channel.socket
    channel.socket = _Wire(socket, times)
    try:
        yield
    finally:
        channel.socket = socket
