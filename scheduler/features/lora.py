"""Places for LoRA adapters: how many different ones run at once is what the workers can hold."""

from collections import Counter


class LoRASlots:
    """Requests that run, by adapter; those of one adapter share its place."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._running: Counter[str] = Counter()

    def has_slot(self, name: str | None) -> bool:
        """Only a new adapter beyond the limit has none."""
        return name is None or name in self._running or len(self._running) < self._max_loras

    def enter(self, name: str | None) -> None:
        """A request with this adapter takes a row."""
        if name is not None:
            self._running[name] += 1

    def leave(self, name: str | None) -> None:
        """It gives up its row."""
        if name is not None:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
