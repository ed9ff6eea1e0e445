"""A thread with sockets, and what others give to it."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import zmq

logger = logging.getLogger(__name__)

SHORT_WAIT_S: Final = 0.0005
"""ZeroMQ waits for whole milliseconds. A shorter wait than this is a sleep, which no event ends."""

T = TypeVar("T")


class SocketThread(Generic[T]):
    """Calls `step` again and again, on a thread of its own, until `close`. It ends with the first
    exception, which `failure` then has.

    step: called with what others have `put`, in order; returns when it is to be called again even
          if nothing happens, as `time.monotonic()`, or None.
    """

    def __init__(self, name: str, step: Callable[[list[T]], float | None]) -> None:
        self.poller = zmq.Poller()
        self.failure: Exception | None = None
        self._step = step
        self._items: deque[T] = deque()
        self._is_closing = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller.register(self._fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: T) -> None:
        """Hand an item to the thread. Call it on any thread, before `close`."""
        self._items.append(item)
        os.eventfd_write(self._fd, 1)

    def close(self, timeout_s: float) -> bool:
        """Have the thread end; False if it has not within this time."""
        self._is_closing = True
        os.eventfd_write(self._fd, 1)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        os.close(self._fd)
        return True

    def _run(self) -> None:
        try:
            while not self._is_closing:
                items = [self._items.popleft() for _ in range(len(self._items))]
                wake_at = self._step(items)
                if self._fd in dict(self.poller.poll(_timeout_ms(wake_at))):
                    os.eventfd_read(self._fd)
        except Exception as error:
            logger.exception("%s has failed", self._thread.name)
            self.failure = error


def _timeout_ms(wake_at: float | None) -> int | None:
    """For the poller; the rest of a short wait has passed when this returns."""
    if wake_at is None:
        return None
    wait_s = max(wake_at - time.monotonic(), 0.0)
    if wait_s < SHORT_WAIT_S:
        time.sleep(wait_s)
        return 0
    return math.ceil(wait_s * 1e3)
