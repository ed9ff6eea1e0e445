"""What an operator has ordered, on its way from a thread to the supervisor's loop."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from longshore.deploy.supervisor.process import ProcessSpec


@dataclass(frozen=True)
class RestartGroup:
    """Restart the processes of a restart group, without counting it as a death."""

    group: str


@dataclass(frozen=True)
class StartGroup:
    """Start the processes of a new restart group, in this order."""

    group: str
    specs: tuple[ProcessSpec, ...]


@dataclass(frozen=True)
class StopGroup:
    """Stop the processes of a restart group for good."""

    group: str


@dataclass(frozen=True, eq=False)
class Call:
    """Call a function in the loop, where no process is started meanwhile."""

    function: Callable[[], None]


Order: TypeAlias = RestartGroup | StartGroup | StopGroup | Call


class GroupBusy(RuntimeError):
    """Another order for the group has not finished."""


class Orders:
    """Orders of the operator to the supervisor's loop. Thread-safe. While it is open, `fileno` is
    readable when there are new orders.

    Each order returns its future, whose exception is RuntimeError with the reason if it is not
    carried out. An order raises RuntimeError if the deployment is not running, and GroupBusy.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell: int | None = None
        self._new: dict[str | Call, Order] = {}
        self._unfinished: dict[str | Call, Future[None]] = {}

    @property
    def is_open(self) -> bool:
        return self._bell is not None

    def open(self) -> None:
        """Orders are accepted from now on."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return -1 if self._bell is None else self._bell

    def restart(self, group: str) -> "Future[None]":
        """See RestartGroup. Done when its processes are ready again."""
        return self._order(group, RestartGroup(group))

    def start(self, group: str, specs: Sequence[ProcessSpec]) -> "Future[None]":
        """See StartGroup. Done when they are ready. If they will not be, all of them are ended, and
        nothing else has changed."""
        return self._order(group, StartGroup(group, tuple(specs)))

    def stop(self, group: str) -> "Future[None]":
        """See StopGroup. Done when they have ended."""
        return self._order(group, StopGroup(group))

    def call(self, function: Callable[[], None]) -> "Future[None]":
        """See Call. The function must not raise and not block."""
        order = Call(function)
        return self._order(order, order)

    def _order(self, key: str | Call, order: Order) -> "Future[None]":
        with self._lock:
            if self._bell is None:
                raise RuntimeError("the deployment is starting or stopping")
            if key in self._unfinished:
                raise GroupBusy(f"{key} is being started, restarted or stopped already")
            future = self._unfinished[key] = Future()
            self._new[key] = order
            os.eventfd_write(self._bell, 1)
            return future

    def take_new(self) -> list[Order]:
        """Orders that were not returned before."""
        with self._lock:
            new = list(self._new.values())
            self._new.clear()
            if new and self._bell is not None:
                os.eventfd_read(self._bell)
            return new

    def finish(self, key: str | Call) -> None:
        """The order for this group, or this call, has been carried out. One that was not taken yet
        has not: something else made the group ready."""
        with self._lock:
            future = None if key in self._new else self._unfinished.pop(key, None)
        if future is not None:
            future.set_result(None)

    def fail(self, key: str | Call, reason: str) -> None:
        """An order is not carried out, for this reason."""
        with self._lock:
            future = self._unfinished.pop(key, None)
        if future is not None:
            future.set_exception(RuntimeError(reason))

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
