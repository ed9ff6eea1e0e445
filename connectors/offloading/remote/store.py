"""One rank's share of a remote tier: KV blocks in a store that several engines use.

A store that fails is a store without the block: errors and timeouts are misses, counted and logged,
never exceptions. Names contain the identity of the model and the rank, so only blocks of the same
kind are ever found, and every value that is read is verified.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from longshore.connectors.base.checksum import BlockBuffer
from longshore.connectors.offloading.disk.identity import IDENTITY_FILE, StoreIdentity
from longshore.connectors.offloading.disk.results import Outcome
from longshore.connectors.offloading.remote.address import RemoteAddress
from longshore.connectors.offloading.remote.backend import open_backend
from longshore.connectors.offloading.remote.breaker import BreakerState, CircuitBreaker
from longshore.connectors.offloading.remote.lane import Lane, RareWarnings
from longshore.connectors.offloading.remote.limits import AbsentKeys, ByteBudget
from longshore.connectors.offloading.remote.record import (
    HEADER_BYTES,
    decode_record,
    encode_record,
)

logger = logging.getLogger(__name__)

NAME_PREFIX: Final = "longshore-kv"

FIRST_LOOKUP: Final = 16
LOOKUP_GROWTH: Final = 4
"""A lookup of leading blocks asks for 16 names, then for 64, and so on, until one is absent."""


@dataclass(frozen=True, kw_only=True)
class RemoteLimits:
    """timeout_s:     of one operation.
    max_bytes_in_flight: of the operations in progress.
    concurrency:   operations per batch in progress.
    ttl_s:         how long Redis keeps a block after it was last written; None: until it evicts it.
    negative_ttl_s: how long a block that was absent is not asked for again.
    failure_threshold: failures in a row after which the store is not used for a while.
    retry_s:       how long that is.
    """

    timeout_s: float = 1.0
    max_bytes_in_flight: int = 256 << 20
    concurrency: int = 8
    ttl_s: int | None = None
    negative_ttl_s: float = 10.0
    failure_threshold: int = 3
    retry_s: float = 10.0


class RemoteRead(NamedTuple):
    """`buffer` is writable and has the size of the block."""

    key: bytes
    buffer: BlockBuffer


class RemoteWrite(NamedTuple):
    """`checksum` is `block_checksum` of the buffer, the store's `identity_digest` and the key."""

    key: bytes
    buffer: BlockBuffer
    checksum: int


@dataclass
class RemoteStoreStats:
    """Counters since the store was opened.

    num_present, num_absent: blocks looked up, by the answer of the store.
    num_known_absent: blocks that were not looked up, because they were absent lately.
    num_missing, num_corrupt: reads of blocks that did not exist, or were not intact.
    num_skipped:      writes of blocks that the store had already.
    num_failed, num_timed_out, num_rejected: see LaneCounts; reads and writes together.
    num_opened:       how often a circuit breaker has opened.
    """

    num_present: int = 0
    num_absent: int = 0
    num_known_absent: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_written: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    num_timed_out: int = 0
    num_rejected: int = 0
    num_opened: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    bytes_in_flight: int = 0
    reads: BreakerState = BreakerState.CLOSED
    writes: BreakerState = BreakerState.CLOSED


class _Found(NamedTuple):
    """payload: None unless the outcome is OK."""

    outcome: Outcome
    payload: memoryview | None = None


class RemoteStore:
    """Thread-safe; `exists`, `get` and `put` block, and belong in a transfer thread each."""

    def __init__(
        self,
        address: RemoteAddress,
        identity: StoreIdentity,
        *,
        rank: int,
        limits: RemoteLimits = RemoteLimits(),
    ) -> None:
        """Raises ConfigError for wrong options. A server that does not answer is only a warning."""
        self.identity_digest: Final = identity.rank_digest(rank)
        self._name = address.name
        self._folder = f"{NAME_PREFIX}/{identity.digest}"
        self._rank = rank
        self._absent = AbsentKeys(limits.negative_ttl_s)
        self._budget = ByteBudget(limits.max_bytes_in_flight)
        self._warnings = RareWarnings()
        self._lock = threading.Lock()  # of the counters
        self._stats = RemoteStoreStats()
        concurrency = limits.concurrency
        self._backend = open_backend(address, timeout_s=limits.timeout_s, ttl_s=limits.ttl_s)
        self._identity_file = (
            f"{self._folder}/{IDENTITY_FILE}",
            msgspec.json.format(msgspec.json.encode(identity)),
        )

        def lane(kind: str, num_users: int, probe: Callable[[], object]) -> Lane:
            return Lane(
                f"remote tier {self._name}: {kind}",
                num_threads=num_users * concurrency,
                concurrency=concurrency,
                timeout_s=limits.timeout_s,
                breaker=CircuitBreaker(limits.failure_threshold, limits.retry_s),
                budget=self._budget,
                probe=probe,
                interrupt=self._backend.interrupt,
                describe=lambda error: address.hide_secrets(f"{type(error).__name__}: {error}"),
            )

        name = self._identity_file[0]
        self._reads = lane("reads", 2, partial(self._backend.exists, [name], is_write=False))
        self._writes = lane("writes", 1, self._write_identity)
        logger.info("remote tier %s: blocks in %s/%d", self._name, self._folder, rank)
        if rank == 0:  # a store that cannot be written is found now
            self._writes.run([0], lambda _: self._write_identity, lambda *_: None)

    def _write_identity(self) -> None:
        """For people who look into the store."""
        self._backend.put(*self._identity_file)

    def exists(
        self, keys: Sequence[bytes], *, leading: bool = False, ends_s: float = math.inf
    ) -> list[bool]:
        """Which blocks the store has. leading: only those before the first absent one count, so
        that the others need not be looked up. Those that are not known by `ends_s` count as absent.
        """
        present: list[bool] = []
        count = FIRST_LOOKUP if leading else len(keys)
        while len(present) < len(keys):
            part = keys[len(present) : len(present) + count]
            present += self._exist(part, ends_s)
            if leading and not all(present):
                break
            count *= LOOKUP_GROWTH
        if leading and not all(present):
            del present[present.index(False) :]
        return present + [False] * (len(keys) - len(present))

    def _exist(self, keys: Sequence[bytes], ends_s: float) -> list[bool]:
        present = [False] * len(keys)
        asked = [index for index, key in enumerate(keys) if key not in self._absent]
        num_absent = 0

        def end(index: int, is_present: bool) -> None:
            nonlocal num_absent
            present[index] = is_present
            if not is_present:
                num_absent += 1
                self._absent.add(keys[index])

        self._ask(keys, asked, self._reads, end, ends_s)
        self._count(
            num_present=sum(present),
            num_absent=num_absent,
            num_known_absent=len(keys) - len(asked),
        )
        return present

    def get(self, batch: Sequence[RemoteRead], ends_s: float = math.inf) -> list[Outcome]:
        """Read blocks into their buffers and verify them. One that is not intact is deleted. Those
        that are not read by `ends_s` are LATE."""
        outcomes = [Outcome.FAILED] * len(batch)
        buffers = [np.frombuffer(read.buffer, np.uint8) for read in batch]
        started_s = time.perf_counter()

        def begin(index: int) -> partial[_Found]:
            return partial(self._get, batch[index].key, len(buffers[index]))

        def end(index: int, found: _Found) -> None:
            outcomes[index] = found.outcome
            if found.payload is not None:
                buffers[index][:] = np.frombuffer(found.payload, np.uint8)
            elif found.outcome is Outcome.MISSING:
                self._absent.add(batch[index].key)

        self._reads.run([HEADER_BYTES + len(data) for data in buffers], begin, end, ends_s)
        if time.monotonic() >= ends_s:
            late = {Outcome.FAILED: Outcome.LATE}
            outcomes = [late.get(outcome, outcome) for outcome in outcomes]
        self._count(
            num_read=outcomes.count(Outcome.OK),
            num_missing=outcomes.count(Outcome.MISSING),
            num_corrupt=outcomes.count(Outcome.CORRUPT),
            read_bytes=_bytes_of(buffers, outcomes),
            read_s=time.perf_counter() - started_s,
        )
        return outcomes

    def put(self, batch: Sequence[RemoteWrite]) -> list[Outcome]:
        """Store the blocks that the store does not have: OK or FAILED for each. The buffers are not
        read after the call."""
        outcomes = [Outcome.FAILED] * len(batch)
        buffers = [np.frombuffer(write.buffer, np.uint8) for write in batch]
        started_s = time.perf_counter()
        absent: list[int] = []

        def end_lookup(index: int, is_present: bool) -> None:
            if is_present:
                outcomes[index] = Outcome.OK
            else:
                absent.append(index)

        keys = [write.key for write in batch]
        self._ask(keys, range(len(keys)), self._writes, end_lookup)
        num_skipped = outcomes.count(Outcome.OK)

        def begin(number: int) -> partial[None]:
            write = batch[absent[number]]
            # A copy: an operation that is abandoned may read it later.
            record = encode_record(write.buffer, write.checksum, self.identity_digest)
            return partial(self._backend.put, self._name_of(write.key), record)

        def end(number: int, _: None) -> None:
            outcomes[absent[number]] = Outcome.OK

        self._writes.run([HEADER_BYTES + len(buffers[index]) for index in absent], begin, end)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._absent.discard(key)
        written = [outcomes[index] for index in absent]
        self._count(
            num_skipped=num_skipped,
            num_written=written.count(Outcome.OK),
            written_bytes=_bytes_of([buffers[index] for index in absent], written),
            write_s=time.perf_counter() - started_s,
        )
        return outcomes

    def stats(self) -> RemoteStoreStats:
        lanes = (self._reads, self._writes)
        with self._lock:
            return replace(
                self._stats,
                num_failed=sum(lane.counts.num_failed for lane in lanes),
                num_timed_out=sum(lane.counts.num_timed_out for lane in lanes),
                num_rejected=sum(lane.counts.num_rejected for lane in lanes),
                num_opened=sum(lane.breaker.num_opened for lane in lanes),
                bytes_in_flight=self._budget.used_bytes,
                reads=self._reads.breaker.state,
                writes=self._writes.breaker.state,
            )

    def interrupt(self) -> None:
        """Abandon what is in progress; later operations fail at once."""
        self._reads.stop()
        self._writes.stop()
        self._backend.interrupt()

    def close(self) -> None:
        """Abandon what is in progress."""
        self.interrupt()
        self._reads.close()
        self._writes.close()
        self._backend.close()

    def _ask(
        self,
        keys: Sequence[bytes],
        asked: Sequence[int],
        lane: Lane,
        end: Callable[[int, bool], None],
        ends_s: float = math.inf,
    ) -> None:
        """Look up the keys with these indices, several names at a time."""
        count = self._backend.num_names_per_lookup
        parts = [asked[first : first + count] for first in range(0, len(asked), count)]
        is_write = lane is self._writes

        def begin(number: int) -> partial[list[bool]]:
            names = [self._name_of(keys[index]) for index in parts[number]]
            return partial(self._backend.exists, names, is_write=is_write)

        def end_part(number: int, present: list[bool]) -> None:
            for index, is_present in zip(parts[number], present, strict=True):
                end(index, is_present)

        lane.run([0] * len(parts), begin, end_part, ends_s)

    def _get(self, key: bytes, num_bytes: int) -> _Found:
        """On a thread of the lane."""
        name = self._name_of(key)
        value = self._backend.get(name, HEADER_BYTES + num_bytes + 1)  # one more: it is too long
        if value is None:
            return _Found(Outcome.MISSING)
        payload = decode_record(value, num_bytes, self.identity_digest, key)
        if isinstance(payload, memoryview):
            return _Found(Outcome.OK, payload)
        self._warnings.warn(
            "corrupt",
            f"remote tier {self._name}: block {name} is not intact: {payload}; it is deleted and "
            "will be computed again",
        )
        self._backend.delete(name)
        return _Found(Outcome.CORRUPT)

    def _name_of(self, key: bytes) -> str:
        text = key.hex()
        return f"{self._folder}/{self._rank}/{text[:2]}/{text}"

    def _count(self, **increments: float) -> None:
        with self._lock:
            for name, increment in increments.items():
                setattr(self._stats, name, getattr(self._stats, name) + increment)


def _bytes_of(buffers: Sequence[NDArray[np.uint8]], outcomes: Sequence[Outcome]) -> int:
    return sum(
        len(data) for data, outcome in zip(buffers, outcomes, strict=True) if outcome is Outcome.OK
    )
