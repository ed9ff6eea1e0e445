"""The tables and books that the scheduler's parts share, so that each names only what it uses."""

from dataclasses import dataclass

from longshore.connectors.base import SchedulerConnector
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.encoder_cache import EncoderCache
from longshore.scheduler.forks import Forks
from longshore.scheduler.gates import AdmissionGates
from longshore.scheduler.in_flight import StepsInFlight
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.lora import LoRASlots
from longshore.scheduler.outputs import OutputBuckets
from longshore.scheduler.policy import SchedulingPolicy
from longshore.scheduler.running import RunningTable
from longshore.scheduler.transfers import Transfers
from longshore.scheduler.waiting import WaitingRequests


@dataclass(frozen=True, slots=True)
class Parts:
    """One scheduler's. Those who decide (planner, admission, lifecycle, answers) get them all and
    are themselves not among them, so who asks whom to act stands in their constructors.

    vocab_size: token ids stay below it.
    connector:  its scheduler half, if there is one.
    """

    config: SchedulerConfig
    vocab_size: int
    policy: SchedulingPolicy
    connector: SchedulerConnector | None
    running: RunningTable
    waiting: WaitingRequests
    forks: Forks
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    outputs: OutputBuckets
    transfers: Transfers
    gates: AdmissionGates
    loras: LoRASlots
    encoder: EncoderCache
