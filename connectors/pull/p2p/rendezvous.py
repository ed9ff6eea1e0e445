"""How the two ends of a link exchange what their library needs to connect."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch.distributed as dist

MAX_KEYS: Final = 16


class Rendezvous(dist.Store):  # type: ignore[misc, name-defined]  # of torch
    """A store of torch.distributed that needs no server: what one side sets travels to the other
    one through the side channel, which is encrypted if there is a secret.

    share:   sends an entry to the other side.
    timeout_s: how long `get` and `wait` wait. Like all errors here, what they then raise is a
        RuntimeError, which torch passes on.
    """

    def __init__(self, share: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._share, self._timeout_s = share, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def deliver(self, key: str, value: bytes) -> None:
        """The other side has set this."""
        with self._changed:
            if len(self._values) < MAX_KEYS:
                self._values[key] = value
            self._changed.notify_all()

    def end(self) -> None:
        """Let all waits fail, now and later."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # As a store

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.deliver(key, data)
        self._share(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_over or all(key in self._values for key in keys), timeout_s
            )
            if self._is_over or not is_there:
                raise RuntimeError(
                    "the link has ended"
                    if self._is_over
                    else f"the other side did not connect within {timeout_s:g} s"
                )
