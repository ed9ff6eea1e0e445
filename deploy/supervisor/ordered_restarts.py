"""Restarts that an operator has ordered, on their way from a thread to the supervisor's loop."""

import os
import threading
from concurrent.futures import Future


class OrderedRestarts:
    """Thread-safe. While it is open, `fileno` is readable when there are new orders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell: int | None = None
        self._new: list[str] = []
        self._unfinished: dict[str, Future[None]] = {}

    @property
    def is_open(self) -> bool:
        return self._bell is not None

    def open(self) -> None:
        """Orders are accepted from now on."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return -1 if self._bell is None else self._bell

    def order(self, group: str) -> "Future[None]":
        """Restart the processes of a restart group, without counting it as a death. Done when they
        are ready again; its exception is RuntimeError with the reason if they will not be.

        Raises RuntimeError if the deployment is not running, or the group is being restarted.
        """
        with self._lock:
            if self._bell is None:
                raise RuntimeError("the deployment is starting or stopping")
            if group in self._unfinished:
                raise RuntimeError(f"{group} is being restarted already")
            future = self._unfinished[group] = Future()
            self._new.append(group)
            os.eventfd_write(self._bell, 1)
            return future

    def take_new(self) -> list[str]:
        """Groups to restart that were not returned before."""
        with self._lock:
            new, self._new = self._new, []
            if new and self._bell is not None:
                os.eventfd_read(self._bell)
            return new

    def finish(self, group: str) -> None:
        """The group is ready again."""
        with self._lock:
            future = self._unfinished.pop(group, None)
        if future is not None:
            future.set_result(None)

    def close(self, reason: str) -> None:
        """No order is carried out any more; those that have not finished fail with `reason`."""
        with self._lock:
            futures = list(self._unfinished.values())
            self._unfinished.clear()
            self._new.clear()
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None
        for future in futures:
            future.set_exception(RuntimeError(reason))
