"""Slots for LoRA adapters: limits how many different adapters run at the same time."""

from collections import Counter
from collections.abc import Iterable

from longshore.protocol.errors import LongshoreError


class LoRASlots:
    """Counts running requests by adapter; requests with one adapter share its slot."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._running: Counter[str] = Counter()

    def has_slot(self, name: str | None) -> bool:
        """Whether a request with this adapter can run without exceeding the limit."""
        return name is None or name in self._running or len(self._running) < self._max_loras

    def acquire(self, name: str | None) -> bool:
        """A request with this adapter was admitted. True if others with it can run since then."""
        if name is None:
            return False
        self._running[name] += 1
        return self._running[name] == 1

    def check(self, names: Iterable[str | None]) -> None:
        """Raise LongshoreError unless these are the adapters of the running requests."""
        expected = Counter(name for name in names if name is not None)
        if expected != self._running:
            raise LongshoreError(f"adapters run as {dict(expected)}, not as {dict(self._running)}")

    def release(self, name: str | None) -> bool:
        """A request with this adapter has lost its row. True if this leaves its slot to others."""
        if name is None:
            return False
        self._running[name] -= 1
        if self._running[name]:
            return False
        del self._running[name]
        return True
