"""The worker's connection to its scheduler, which may die and be restarted."""

import time
from types import TracebackType
from typing import Final

import zmq

from longshore.protocol.handshake import FromWorker, ToWorker
from longshore.protocol.transport.channel import Channel, Endpoint, open_socket

RECONNECT_INTERVAL_MS: Final = 5
MAX_POLL_S: Final = 1.0


class SchedulerLost(Exception):
    """The scheduler process has ended without a Shutdown."""


class SchedulerLink:
    """channel: replaced by `connect`.
    monitor: readable when the connection has broken.
    """

    channel: Channel[FromWorker, ToWorker]
    monitor: "zmq.Socket[bytes]"

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
        self._is_open = False
        self.connect()

    def connect(self) -> None:
        """Wait for the next scheduler at the same address."""
        self._is_open = True
        socket = open_socket(self._context, zmq.DEALER, self._endpoint, bind=False)
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.channel = Channel(socket, ToWorker)

    @property
    def is_lost(self) -> bool:
        """Whether the connection broke. Messages that arrived before can still be received."""
        return bool(self.monitor.poll(0))

    def receive(self, timeout_s: float) -> ToWorker | None:
        """The next message, None after `timeout_s`. Raises SchedulerLost."""
        poller = zmq.Poller()
        poller.register(self.channel.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            # Not longer: a signal just before the call would wait for its end.
            poller.poll(int(1000 * min(left_s, MAX_POLL_S)) + 1)
            message = self.channel.receive()
            if message is not None:
                return message
            if self.is_lost:
                raise SchedulerLost
        return None

    def disconnect(self, linger_ms: int | None = 0) -> None:
        """Drop what was not sent; the next scheduler must not get it. None: it is still sent, for
        the time that sockets linger."""
        if self._is_open:
            self._is_open = False
            self.channel.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.channel.socket.close(linger_ms)

    def __enter__(self) -> "SchedulerLink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect(linger_ms=None)
        self._context.term()
