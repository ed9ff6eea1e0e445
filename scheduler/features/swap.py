"""Swapping: running requests leave the device before its memory is full, and keep their KV.

When more than `preempt_threshold` of the blocks are held, the policy's victim is withheld from the
next steps until its last one is answered. Then the connector copies what it does not have yet, and
the request is preempted; transfers own its blocks until the copy has ended. Where memory fills
faster, requests are preempted as without swapping (`StepPlanner`). Swapping follows PagedAttention
(Kwon et al., 2023, section 4.5).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from longshore.connectors.base import RequestView, SchedulerConnector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.scheduler.config import CacheConfig, SchedulerConfig, check_preemption_mode
from longshore.scheduler.features.connector_hooks import view_of
from longshore.scheduler.features.swap_cost import PrefillRate, SwapCost
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.hooks import SchedulerFeature
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.lifecycle import Lifecycle
from longshore.scheduler.queue.policies import SchedulingPolicy
from longshore.scheduler.request import Request
from longshore.scheduler.step.admission import AdmissionGates
from longshore.scheduler.step.in_flight import StepsInFlight
from longshore.scheduler.step.running import RunningTable

REST_STEPS: Final = 32
"""Steps without a swap after one that had no room in host memory, or cost more than recomputing:
each attempt costs its victim a step, and neither reason ends soon."""


@dataclass(frozen=True, slots=True)
class _Victim:
    """A request that is to be swapped out once plan `last_step`, its last one, is answered."""

    request: Request
    generation: int
    last_step: int


@dataclass(slots=True, kw_only=True, eq=False)
class Swaps(SchedulerFeature):
    """The request that is being swapped out, if there is one.

    num_swapped_out, num_swapped_out_blocks: requests swapped out, and the blocks that they held.
    num_refused: victims for which host memory had no room.
    num_too_slow: victims that were cheaper to recompute, with the mode `auto`.
    """

    config: SchedulerConfig
    running: RunningTable
    kv_cache: KVCacheManager
    in_flight: StepsInFlight
    transfers: Transfers
    prefill_rate: PrefillRate
    policy: SchedulingPolicy
    gates: AdmissionGates
    lifecycle: Lifecycle
    num_swapped_out: int = 0
    num_swapped_out_blocks: int = 0
    num_refused: int = 0
    num_too_slow: int = 0
    _victim: _Victim | None = None
    _next_attempt: int = 0

    def is_eventful(self) -> bool:
        """Whether `begin_step` could do something."""
        return self._victim is not None or (self.running.num_rows > 1 and self._is_short)

    @property
    def _is_short(self) -> bool:
        """Whether memory is short, also when the copies in progress have ended and other features
        have yielded their blocks."""
        num_leaving = self.transfers.num_leaving_blocks + self.kv_cache.num_yieldable
        return self.gates.is_short(self.kv_cache.num_free_blocks + num_leaving)

    def begin_step(self, step: int, budget: int, now: float) -> None:
        """If memory is short, choose a victim, or swap it out."""
        if not budget:
            return
        self.running.withheld = -1
        victim, self._victim = self._victim, None
        if victim is not None and self.running.generation_of(victim.request) != victim.generation:
            victim = None  # it has ended, or was preempted
        if self.running.num_rows < 2 or not self._is_short:
            return
        self.gates.is_closed = True  # otherwise the request could return at once
        if victim is None and step >= self._next_attempt:
            victim = self._choose(step)
        if victim is not None and victim.last_step > self.in_flight.last_answered_step:
            self._victim = victim
            self.running.withheld = victim.request.row
        elif victim is not None and self._can_swap(victim.request):  # a failed load can rewind it
            self._swap_out(victim.request, step, now)

    def _choose(self, step: int) -> _Victim | None:
        """The first victim of the policy that can be swapped, but not the last running request."""
        candidates = self.running.requests_in_order()
        while len(candidates) > 1:
            request = candidates.pop(self.policy.pick_victim(candidates))
            if not self._can_swap(request):
                continue
            if not self._is_cheaper(request):
                self.num_too_slow += 1
                self._next_attempt = step + REST_STEPS
                return None
            generation = self.running.generation_of(request)
            return _Victim(request, generation, self.in_flight.newest_step)
        return None

    def _can_swap(self, request: Request) -> bool:
        """Whether the request has KV to keep, and would free a block that no one else uses."""
        if request.must_compute_prompt or self.transfers.knows(request.request_id):
            return False
        row = request.row
        if not self.running.num_computed[row] > 0:
            return False
        block_ids = np.concatenate(self.kv_cache.blocks_in_use(row)).astype(np.int64)
        return bool((self.kv_cache.pool.num_references(block_ids) == 1).any())

    def _is_cheaper(self, request: Request) -> bool:
        """Whether a swap takes less time than computing everything again. While a rate is unknown,
        requests are swapped, which measures it."""
        if self.config.preemption_mode != "auto":
            return True
        bandwidth = self.transfers.statistics.bandwidth
        store_bandwidth = bandwidth("GPU", "CPU")
        load_bandwidth = bandwidth("CPU", "GPU") or store_bandwidth
        tokens_per_s = self.prefill_rate.tokens_per_s
        if store_bandwidth is None or load_bandwidth is None or tokens_per_s is None:
            return True
        num_computed = int(self.running.num_computed[request.row])
        cost = SwapCost(
            store_bandwidth=store_bandwidth,
            load_bandwidth=load_bandwidth,
            prefill_rate=tokens_per_s,
        )
        transfers = self.transfers
        size = transfers.hooks.call(transfers.connector.swap_size, *self._kv_of(request))
        return cost.prefers_swap(size, num_computed)

    def _swap_out(self, request: Request, step: int, now: float) -> None:
        if not self.transfers.swap_out(*self._kv_of(request)):
            self.num_refused += 1
            self._next_attempt = step + REST_STEPS
            return
        self.num_swapped_out += 1
        self.num_swapped_out_blocks += sum(map(len, self.kv_cache.blocks_in_use(request.row)))
        request.is_swapped = True
        self.lifecycle.preempt(request, now)

    def _kv_of(self, request: Request) -> tuple[RequestView, tuple[Int32Array, ...], int]:
        """The connector's view of a running request, its block tables, and its computed tokens."""
        view, row = view_of(request, self.running.tokens_of(request.row)), request.row
        return view, self.kv_cache.block_ids(row), int(self.running.num_computed[row])

    def counts(self) -> dict[str, int]:
        """Fields of SchedulerStats."""
        return {
            "num_swapped_out": self.num_swapped_out,
            "num_swapped_in": self.transfers.num_restored,
            "num_swapped_out_blocks": self.num_swapped_out_blocks,
            "num_swapped_in_blocks": self.transfers.num_swapped_in_blocks,
            "num_swaps_refused": self.num_refused,
            "num_swaps_too_slow": self.num_too_slow,
        }

    def begin_epoch(self, epoch: int) -> None:
        """All rows are empty, and steps are counted anew."""
        self._victim = None
        self.running.withheld = -1
        self._next_attempt = 0


def check_swaps(
    config: SchedulerConfig, cache: CacheConfig, connector: SchedulerConnector | None
) -> None:
    """Raise ConfigError if the preemption mode needs what the cache or the connector lacks."""
    check_preemption_mode(config, cache)
    if config.preemption_mode == "recompute" or (connector is not None and connector.can_swap):
        return
    reason = "no connector is configured"
    if connector is not None:
        reason = f"{type(connector).__name__} cannot keep the KV of a preempted request"
    raise ConfigError(
        f"preemption_mode={config.preemption_mode} needs a connector that can swap, such as "
        f"offloading, but {reason}. Use --kv-connector offloading, or --preemption-mode recompute."
    )
