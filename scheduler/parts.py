"""The tables and books that the scheduler's parts share, so that each names only what it uses."""

from dataclasses import dataclass

from longshore.connectors.base import SchedulerConnector
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.features.lora import LoRASlots
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.queue.waiting import WaitingRequests
from longshore.scheduler.step.client_outputs import OutputBuckets
from longshore.scheduler.step.gates import AdmissionGates
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.running import RunningTable


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
