"""The experts of a request's tokens, read from the memory that rank 0 writes.

They are read once, when an output ends, before its blocks are freed; nothing is done per step. A
preempted request loses its blocks, and a stop string may end it before it has computed them again,
so what it had is kept.
"""

import numpy as np

from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.routed_experts import (
    RoutedExperts,
    RoutedExpertsShape,
    group_with_experts,
    map_slots,
)
from longshore.scheduler.hooks import SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.request import Outcome, Request, RequestStatus
from longshore.scheduler.step.in_flight import StepsInFlight


class RoutedExpertsReader:
    """fd, shape: see `map_slots`."""

    def __init__(self, fd: int, shape: RoutedExpertsShape, kv_cache: KVCacheConfig) -> None:
        self._shape = shape
        self._group = group_with_experts(kv_cache.groups)
        self._lines = map_slots(fd, shape, kv_cache)

    def read(self, request: Request, blocks: HeldBlocks | None) -> None:
        """Set the experts of a request that has lost its row because it was preempted or its output
        ends: those of all tokens from `routed_experts_prompt_start` on, except the last one, whose
        KV need not be computed. blocks: that it had; None: it had no row."""
        num_bytes, kept = self._num_bytes(request), request.routed_experts
        if kept is not None and len(kept.data) >= num_bytes:
            # Without a new token since it was preempted, not all may be in its blocks again.
            request.routed_experts = RoutedExperts(self._shape, kept.data[:num_bytes])
        elif blocks is not None:
            request.routed_experts = self._read(request, blocks)

    def _read(self, request: Request, blocks: HeldBlocks) -> RoutedExperts:
        block_size, start = self._lines.shape[1], self._start(request)
        first, end = start // block_size, -(-(request.num_tokens - 1) // block_size)
        data = np.take(self._lines, blocks.block_ids[self._group][first:end], axis=0).reshape(-1)
        begin = (start - first * block_size) * self._shape.token_bytes
        return RoutedExperts(self._shape, data[begin : begin + self._num_bytes(request)])

    def _num_bytes(self, request: Request) -> int:
        return max(request.num_tokens - 1 - self._start(request), 0) * self._shape.token_bytes

    @staticmethod
    def _start(request: Request) -> int:
        return min(request.sampling.routed_experts_prompt_start, request.num_prompt_tokens)


class RoutedExpertsHooks(SchedulerFeature):
    """Reads the experts of a request when it is preempted, and when its output ends."""

    def __init__(self, reader: RoutedExpertsReader, in_flight: StepsInFlight) -> None:
        self._reader = reader
        self._in_flight = in_flight

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """The experts of a preempted request's tokens in flight will be in blocks that others get,
        so it samples these tokens again."""
        if request.status is RequestStatus.PREEMPTED and blocks is not None:
            if request.has_new_token:  # else slots may still hold the experts of others' tokens
                self._reader.read(request, blocks)
            self._in_flight.void_past_occupants(request)

    def output_ended(
        self,
        request: Request,
        outcome: Outcome,
        blocks: HeldBlocks | None,
        now: float,
        *,
        ran: bool,
    ) -> bool:
        """An output that does not end regularly has no experts."""
        if outcome.ends_output:
            self._reader.read(request, blocks if ran else None)
        else:
            request.routed_experts = None
        return False
