"""Slots for LoRA adapters: limits how many different adapters run at the same time."""

from collections import Counter
from collections.abc import Collection

from longshore.protocol.errors import LongshoreError
from longshore.scheduler.hooks import Attempt, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.request import Request


class LoRASlots(SchedulerFeature):
    """Counts running requests by adapter; requests with one adapter share its slot."""

    def __init__(self, max_loras: int, waiting: WaitingRequests) -> None:
        self._max_loras = max_loras
        self._waiting = waiting
        self._running: Counter[str] = Counter()

    def gate(self, request: Request) -> Attempt | None:
        """A request whose adapter has no slot waits until other adapters run."""
        if self._has_slot(request.lora_name):
            return None
        self._waiting.park_head(SharedEvent.ADAPTERS)
        return Attempt.PARKED

    def waits_for(self, request: Request, now: float) -> str | None:
        """A slot for its adapter, unless it waits for something else first."""
        if self._has_slot(request.lora_name) or not request.is_ready:
            return None
        return (
            f"a slot for its adapter {request.lora_name!r}: max_loras={self._max_loras} others run"
        )

    def _has_slot(self, name: str | None) -> bool:
        return name is None or name in self._running or len(self._running) < self._max_loras

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """Others with the same adapter can run from now on, too."""
        if (name := request.lora_name) is not None:
            self._running[name] += 1
            if self._running[name] == 1:
                self._waiting.happened(SharedEvent.ADAPTERS)
                self._waiting.unpark_due()

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """The last request with an adapter leaves its slot to others."""
        if (name := request.lora_name) is not None:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
                self._waiting.happened(SharedEvent.ADAPTERS)

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """The adapters are those of the running requests."""
        expected = Counter(name for each in running if (name := each.lora_name) is not None)
        if expected != self._running:
            raise LongshoreError(f"adapters run as {dict(expected)}, not as {dict(self._running)}")
