"""When KV proves wrong after others may have built on it: un-name it, and send back who used it.

A name is provisional until the output of its step is applied. A failed load or numbers that are not
finite make every block computed from the bad position on worthless, and with it every request that
holds one of them: also those that found it by its name while the step was in flight, and those that
have left their rows since, whose blocks may still be found.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array, int32_array
from longshore.protocol.plan import Rewind
from longshore.scheduler.encoder_cache import EncoderCache
from longshore.scheduler.in_flight import StepsInFlight
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.running import RunningTable
from longshore.scheduler.waiting import WaitingRequests


@dataclass(slots=True)
class _Holder:
    """A request and its blocks, on its row or as it left it. num_hits: leading blocks that others
    had computed, per group; num_good: leading tokens not spoilt."""

    request: Request
    generation: int
    is_running: bool
    tables: tuple[Int32Array, ...]
    num_hits: tuple[int, ...]
    num_good: int


@dataclass(frozen=True, slots=True)
class Spoilt:
    """All bad blocks, and who holds one of them. With a running request come the leading tokens
    whose KV is good."""

    block_ids: Int32Array
    running: list[tuple[Request, int]]
    waiting: list[Request]


class Recovery:
    """Finds what bad blocks have spoilt, and rewinds rows."""

    def __init__(
        self,
        *,
        running: RunningTable,
        waiting: WaitingRequests,
        kv_cache: KVCacheManager,
        in_flight: StepsInFlight,
        encoder: EncoderCache,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._encoder = encoder
        self.num_rewinds = 0

    def forget_from(self, sources: dict[int, int]) -> Spoilt:
        """Un-name everything computed from a bad position on, and say who is concerned.

        sources: generation of a request that ran while the plan was unanswered -> leading tokens of
        it whose KV is good.

        Others are spoilt where they found a spoilt block; what they computed behind it may have
        been found in turn, so this goes on until nothing is added. A block that was handed out anew
        since is nobody's hit, so its new owner is not concerned. Tokens on their way to requests
        that left their rows may rest on bad blocks, and are void.
        """
        bad = np.zeros(self._kv_cache.num_blocks, np.bool_)
        holders = list(self._holders(sources))
        spoilt = [holder for holder in holders if holder.generation in sources]
        for holder in spoilt:
            self._mark(holder, bad)
        has_grown = True
        while has_grown:
            has_grown = False
            for holder in holders:
                num_good = self._num_good_hits(holder, bad)
                if num_good < holder.num_good:
                    holder.num_good = num_good
                    self._mark(holder, bad)
                    spoilt.append(holder)
                    has_grown = True
        waiting = [
            request
            for request in self._waiting
            if request.held is not None and any(bad[ids].any() for ids in request.held.block_ids)
        ]
        bad[0] = False
        block_ids = int32_array(np.flatnonzero(bad))
        self._kv_cache.forget_from(block_ids)
        self._in_flight.void_departed()
        running = {holder.request: holder.num_good for holder in spoilt if holder.is_running}
        return Spoilt(block_ids, list(running.items()), waiting)

    def rewind(self, request: Request, num_good: int) -> Rewind:
        """The running request computes again from the last block border up to `num_good` tokens at
        which every group has KV."""
        row = request.row
        newest_step = self._in_flight.newest_step
        num_tokens = min(num_good, int(self._running.num_tokens[row]) - 1)
        num_tokens -= num_tokens % max(self._kv_cache.block_sizes)
        self._kv_cache.truncate(row, num_tokens, newest_step)
        request.num_hit_tokens = min(request.num_hit_tokens, num_tokens)
        if request.multimodal:  # items that it had passed may have to be encoded again
            self._encoder.pending[request.request_id] = request
        self.num_rewinds += 1
        return self._running.send_back(row, num_tokens, newest_step)

    def _holders(self, sources: dict[int, int]) -> Iterator[_Holder]:
        sizes = self._kv_cache.block_sizes
        for request in self._running.requests_in_order():
            generation = int(self._running.generation[request.row])
            num_tokens = int(self._running.num_computed[request.row])
            yield _Holder(
                request,
                generation,
                True,
                self._kv_cache.block_ids(request.row),
                tuple(request.num_hit_tokens // size for size in sizes),
                sources.get(generation, num_tokens),
            )
        for generation, left in self._in_flight.departures():
            yield _Holder(
                left.request,
                generation,
                False,
                left.tables,
                tuple(left.num_hit_tokens // size for size in sizes),
                sources.get(generation, max(map(len, left.tables)) * max(sizes)),
            )

    def _mark(self, holder: _Holder, bad: BoolArray) -> None:
        for table, size in zip(holder.tables, self._kv_cache.block_sizes, strict=True):
            bad[table[holder.num_good // size :]] = True

    def _num_good_hits(self, holder: _Holder, bad: BoolArray) -> int:
        """Leading tokens of the holder before the first bad block that it found."""
        num_good = holder.num_good
        sizes = self._kv_cache.block_sizes
        for table, num_hits, size in zip(holder.tables, holder.num_hits, sizes, strict=True):
            found = bad[table[:num_hits]]
            if found.any():
                num_good = min(num_good, int(np.argmax(found)) * size)
        return num_good
