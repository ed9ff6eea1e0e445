"""What the larger parts of the scheduler share: its tables, and its configured features."""

from dataclasses import dataclass, fields
from typing import Any

from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.grammar import Grammars
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.queue.shares import Shares
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable


@dataclass(slots=True, kw_only=True)
class SchedulerPart:
    """A part of one scheduler; all parts refer to the same objects.

    transfers, encoder, loras, grammars, shares: None unless configured.
    """

    config: SchedulerConfig
    running: RunningTable
    waiting: WaitingRequests
    forks: Forks
    holds: Holds
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    plan: PlanBuilder
    transfers: Transfers | None
    encoder: EncoderCache | None
    loras: LoRASlots | None
    grammars: Grammars | None
    shares: Shares | None

    def shared(self) -> dict[str, Any]:
        """The arguments with which other parts are made."""
        return {field.name: getattr(self, field.name) for field in fields(SchedulerPart)}
