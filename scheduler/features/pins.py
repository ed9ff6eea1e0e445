"""Pins: the KV of a job's turn, kept on the device for the job's next turn (policy `continuum`).

A pin is one more reference to the full blocks of a turn that has ended. The next turn finds them in
the prefix cache, and the pin ends when that turn is admitted. No pin is necessary: it ends with its
time to live, and when blocks are short. After Continuum (arXiv 2511.02230); see docs/agents.md.
"""

import math
from collections.abc import Collection, Iterator
from typing import Final, cast

import msgspec
import numpy as np

from longshore.connectors.base import FinishAction
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.statistics import BlockState
from longshore.scheduler.features.connector_hooks import view_of
from longshore.scheduler.features.swap_cost import PrefillRate, SwapCost
from longshore.scheduler.features.tool_calls import Decoder, ToolCallEstimator
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.heap import KeyedHeap
from longshore.scheduler.hooks import SchedulerFeature, Yielded
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.queue.policies import ContinuumPolicy
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.request import Outcome, Request, RequestStatus

_QUEUED: Final = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.PREEMPTED,
)


class Pin(msgspec.Struct):
    """The kept KV of one turn.

    number:          the pins are numbered in the order in which they were made.
    request_id, client: of the turn that has ended.
    first_arrival_s: of its job.
    blocks:          the pin owns one reference to each.
    num_own_blocks:  those of them that no one else held when the pin was made.
    saved_s:         seconds that the next turn saves per own block.
    value:           the same, times the probability that it arrives in time. The pin with the
                     lowest value is released first.
    """

    number: int
    request_id: str
    client: int
    first_arrival_s: float
    blocks: HeldBlocks
    num_own_blocks: int
    saved_s: float
    value: float
    expires_at_s: float


class Pins(SchedulerFeature):
    """At most one pin per job.

    policy:  learns at the beginning of the next step which jobs have a pin, or a turn that was
             admitted on it and has not ended.
    transfers: None: there is no connector.
    prefill_rate: what computing KV again costs.
    max_ttl_s: no pin is kept for longer, and none is made for a tool that always takes longer.
    decode:  the text of token ids; None: the names of tools are not known.

    num_hits:     turns that were admitted while their job had a pin.
    num_expired, num_yielded: pins that have ended with their time to live, and because other
                  requests needed the blocks.
    """

    def __init__(
        self,
        policy: ContinuumPolicy,
        waiting: WaitingRequests,
        kv_cache: KVCacheManager,
        transfers: Transfers | None,
        prefill_rate: PrefillRate,
        *,
        max_ttl_s: float,
        decode: Decoder | None = None,
    ) -> None:
        self._policy = policy
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._transfers = transfers
        self._max_ttl_s = max_ttl_s
        self._calls = ToolCallEstimator(decode)
        self.prefill_rate = prefill_rate
        self._pins: dict[str, Pin] = {}
        self._num_made = 0
        # Jobs. Of equal pins, the oldest is first.
        self._least_valuable: KeyedHeap[tuple[float, int], str] = KeyedHeap()
        self._next_to_expire: KeyedHeap[tuple[float, int], str] = KeyedHeap()
        self._newest: KeyedHeap[float, str] = KeyedHeap()
        self._taken_over: dict[str, Request] = {}  # by job, the turn that was admitted on its pin
        self._is_announced = True
        self.num_hits = self.num_expired = self.num_yielded = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Own blocks of all pins: about what is free if all of them end."""
        return self._kv_cache.num_yieldable

    def __iter__(self) -> Iterator[Pin]:
        """All pins, the oldest first."""
        return iter(self._pins.values())

    @property
    def job_ids(self) -> Collection[str]:
        """The jobs that have a pin, the oldest pin first."""
        return self._pins.keys()

    def poll(self, now: float) -> None:
        """Release the pins that have expired, and let the policy know which jobs have one."""
        while (first := self._next_to_expire.first()) is not None and first[0][0] <= now:
            self._release(first[1])
            self.num_expired += 1
        if not self._is_announced:
            self._is_announced = True
            self._waiting.update_pinned_state((*self._pins, *self._taken_over))

    # What happens to turns

    def arrived(self, request: Request, now: float) -> None:
        """A turn was queued. A pin of its job lasts until it is admitted."""
        job_id = request.options.job_id
        if job_id is None:
            return
        self._calls.turn_arrived(job_id, request.arrival_time)
        if (pin := self._pins.get(job_id)) is not None:
            pin.expires_at_s = math.inf
            pin.value = pin.saved_s
            self._rank(job_id, pin)

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """A turn has a row, which holds what it has found of the pin of its job."""
        job_id = request.options.job_id
        if job_id is not None and job_id in self._pins:
            self._release(job_id)
            self._taken_over[job_id] = request
            self.num_hits += 1

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> FinishAction | None:
        """The request's KV is pinned, unless it was the last turn or has not ended regularly; an
        earlier pin of the job is released. The pin takes references of its own."""
        if (job_id := request.options.job_id) is not None:
            self._turn_ended(job_id, request, blocks, outcome, now)
        return None

    def _turn_ended(
        self,
        job_id: str,
        request: Request,
        blocks: HeldBlocks | None,
        outcome: Outcome,
        now: float,
    ) -> None:
        if job_id in self._pins:
            self._release(job_id)
        if self._taken_over.get(job_id) is request:
            del self._taken_over[job_id]
            self._is_announced = False
        if request.options.is_last_step:
            self._calls.job_ended(job_id)
        elif outcome.ends_output:
            output_ids = request.token_ids[request.num_prompt_tokens :].tolist()
            self._calls.turn_ended(job_id, output_ids, now)
            if blocks is not None and not request.options.no_store:  # no later turn finds it
                self._pin(job_id, request, blocks, now)

    def _pin(self, job_id: str, request: Request, blocks: HeldBlocks, now: float) -> None:
        # Only full blocks can be found; the KV of the last token is not computed.
        block_size = min(self._kv_cache.block_sizes)
        num_tokens = (request.num_tokens - 1) // block_size * block_size
        kept, _ = self._kv_cache.cut(blocks, num_tokens)
        ids = np.concatenate(kept.block_ids).astype(np.int64)
        ids = ids[ids != NULL_BLOCK]
        if not len(ids):
            return
        num_own = max(int(np.count_nonzero(self._kv_cache.pool.num_references(ids) == 1)), 1)
        saved_s = self._saved_s(request, blocks, num_tokens)
        ttl = self._calls.predict(
            job_id,
            now,
            saved_s=None if saved_s is None else saved_s * num_own / len(ids),
            share=num_own / self._kv_cache.num_usable_blocks,
            max_ttl_s=self._max_ttl_s,
        )
        if ttl.seconds <= 0:
            return
        self._kv_cache.share(kept)
        if saved_s is None:  # as long as no prefill was measured, only their sizes are compared
            saved_s = float(num_tokens)
        saved_s /= len(ids)
        expires_at_s, value = now + ttl.seconds, saved_s * ttl.probability
        if self._has_queued_turn(job_id):
            expires_at_s, value = math.inf, saved_s
        self._num_made += 1
        pin = self._pins[job_id] = Pin(
            self._num_made,
            request.request_id,
            request.client_index,
            self._policy.first_arrival_s(request),
            kept,
            num_own,
            saved_s,
            value,
            expires_at_s,
        )
        self._rank(job_id, pin)
        self._newest.add(job_id, -pin.first_arrival_s, job_id)
        self._kv_cache.num_yieldable += num_own
        self._is_announced = False

    def _rank(self, job_id: str, pin: Pin) -> None:
        """Its value and its expiry are new."""
        self._least_valuable.add(job_id, (pin.value, pin.number), job_id)
        self._next_to_expire.add(job_id, (pin.expires_at_s, pin.number), job_id)

    def _has_queued_turn(self, job_id: str) -> bool:
        turns = cast(Collection[Request], self._policy.turns_of(job_id))
        return any(turn.status in _QUEUED for turn in turns)

    def _saved_s(self, request: Request, blocks: HeldBlocks, num_tokens: int) -> float | None:
        """Seconds until a turn without a pin has this KV again: it loads what the connector has,
        and computes the rest. None: no prefill has been measured yet."""
        tokens_per_s = self.prefill_rate.tokens_per_s
        if tokens_per_s is None:
            return None
        transfers = self._transfers
        if transfers is not None and transfers.connector.can_swap:
            bandwidth = transfers.statistics.bandwidth
            bytes_per_s = bandwidth("CPU", "GPU") or bandwidth("GPU", "CPU")
            if bytes_per_s is not None:
                hook, view = transfers.connector.swap_size, view_of(request)
                size = transfers.hooks.call(hook, view, blocks.block_ids, num_tokens)
                cost = SwapCost(
                    store_bandwidth=bytes_per_s,
                    load_bandwidth=bytes_per_s,
                    prefill_rate=tokens_per_s,
                )
                return cost.recompute_s(size, num_tokens)
        return num_tokens / tokens_per_s

    # Pressure

    def yield_blocks(self, to: Request | None, besides: Request | None) -> Yielded:
        """The least valuable pin, with `to` only of jobs that began later."""
        job_ids: Iterator[str] = iter(self._least_valuable)
        if to is not None:
            job_ids = self._later_than(self._policy.first_arrival_s(to))
        elif besides is not None:
            own = besides.options.job_id
            job_ids = iter(sorted(job_ids, key=lambda job_id: job_id == own))
        job_id = next(job_ids, None)
        if job_id is None:
            return Yielded.NOTHING
        self._release(job_id)
        self.num_yielded += 1
        return Yielded.BLOCKS

    def _later_than(self, first_arrival_s: float) -> Iterator[str]:
        """Jobs that began later, the one with the least valuable pin first."""
        newest, pins = self._newest.first(), self._pins
        if newest is not None and -newest[0] > first_arrival_s:
            for job_id in self._least_valuable:
                if pins[job_id].first_arrival_s > first_arrival_s:
                    yield job_id

    # The end of pins

    def release_kept(self, client: int | None) -> None:
        """No turn of the client's jobs follows."""
        for job_id, pin in list(self._pins.items()):
            if client is None or pin.client == client:
                self._release(job_id)

    def _release(self, job_id: str) -> None:
        pin = self._pins.pop(job_id)
        for heap in (self._least_valuable, self._next_to_expire, self._newest):
            heap.remove(job_id)
        self._kv_cache.num_yieldable -= pin.num_own_blocks
        self._is_announced = False
        self._kv_cache.release(pin.blocks)

    def begin_epoch(self, epoch: int) -> None:
        """All KV is lost. No reference is released, because the pool is reset."""
        for pins in (self._pins, self._least_valuable, self._next_to_expire, self._newest):
            pins.clear()
        self._taken_over.clear()
        self._kv_cache.num_yieldable = 0
        self._is_announced = False

    # Reports

    def counts(self) -> dict[str, int]:
        """Fields of SchedulerStats."""
        return {
            "num_pins": len(self._pins),
            "num_pinned_blocks": self.num_blocks,
            "num_pin_hits": self.num_hits,
            "num_pins_expired": self.num_expired,
            "num_pins_yielded": self.num_yielded,
        }

    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """The blocks of all pins, with the turn that has ended."""
        for pin in self:
            yield BlockState.KEPT, pin.request_id, pin.blocks

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Raise LongshoreError unless the blocks of pins are counted, the heaps have what the pins
        say, and no ended turn counts as one that was admitted on a pin."""
        if sum(pin.num_own_blocks for pin in self) != self.num_blocks:
            raise LongshoreError(f"pins do not have {self.num_blocks} blocks, which are counted")
        values = sorted(self._pins, key=lambda job_id: self._pins[job_id].value)
        expiries = sorted(self._pins, key=lambda job_id: self._pins[job_id].expires_at_s)
        if [*self._least_valuable] != values or [*self._next_to_expire] != expiries:
            raise LongshoreError("pins would be released in another order than theirs")
        if {*self._newest} != self._pins.keys():
            raise LongshoreError("the newest jobs with pins are not those that have one")
        if any(turn.status.is_finished for turn in self._taken_over.values()):
            raise LongshoreError("a job is preempted last for a turn that has ended")
