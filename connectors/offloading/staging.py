"""What is on its way from lower tiers into host memory.

A load reads blocks that only a lower tier has into host memory first, so that they are in both
afterwards. Blocks of requests in the queue are read ahead, by jobs of their own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from longshore.connectors.offloading.ledger import OffloadLedger, complete_stores
from longshore.connectors.offloading.read_ahead import ReadAhead, Where
from longshore.connectors.offloading.spilling import MAX_JOB_BLOCKS, Below, count_displaced
from longshore.connectors.offloading.tiers import Stage, int64s

READ_AHEAD_SHARE: Final = 0.25
"""Share of the host tier that blocks read ahead for requests in the queue may have."""

MAX_WAIT_S: Final = 60.0
"""How long a request waits for blocks that are being read ahead, if it waits without a limit."""


class Staging:
    """Blocks that are being read into host memory, each with the tier that it is read from."""

    def __init__(
        self, host: OffloadLedger, below: Sequence[Below], max_wait_s: float | None
    ) -> None:
        """below: the lower tiers by number. max_wait_s: see TieredManager."""
        self._host = host
        self._below = below
        self._reads_in_load = max_wait_s is None
        self._max_wait_s = MAX_WAIT_S if max_wait_s is None else max_wait_s
        self._ahead = ReadAhead(max(1, int(READ_AHEAD_SHARE * host.capacity)))
        self._sources: dict[bytes, int] = {}
        self._abandoned: set[bytes] = set()  # those that no request waits for
        self._overdue: Counter[int] = Counter()  # by tier, those that took too long
        self._late: set[bytes] = set()  # the same, by key
        self._jobs: dict[int, list[bytes]] = {}  # keys that are read ahead, by job

    def __contains__(self, key: bytes) -> bool:
        return key in self._sources

    def num_blocks(self) -> Counter[int]:
        """Number of blocks that are being read, by tier."""
        return Counter(self._sources.values())

    # Where a block is

    def may_load(self, key: bytes, waiting_s: float) -> bool | None:
        """Whether a load that begins now can have the block; None: not known yet, or it is being
        read. waiting_s: time since the request arrived."""
        if key in self._host:
            return True
        if key in self._sources:
            return None if waiting_s < self._max_wait_s and key not in self._abandoned else False
        if not self._host.may_store(key):
            return False  # a store is putting it into host memory
        is_below = self._is_below(key)
        if is_below is not None and (self._reads_in_load or not is_below):
            return is_below
        return None if waiting_s < self._max_wait_s else False

    def _is_below(self, key: bytes) -> bool | None:
        """Whether a lower tier has the block. One that still reads what a request has given up
        waiting for is not asked: what it is asked for now would come even later."""
        found: bool | None = False
        for number, below in enumerate(self._below):
            if self._overdue[number]:
                continue
            is_there = below.tier.has(key)
            if is_there:
                return True
            found = None if is_there is None else found
        return found

    def source_of(self, key: bytes) -> int | None:
        """The tier from which a block can be read into host memory now."""
        if self._host.may_store(key):
            for number, below in enumerate(self._below):
                if not self._overdue[number] and below.tier.has(key):
                    return number
        return None

    # Reads

    def begin(
        self, keys: Sequence[bytes], sources: Mapping[int, int]
    ) -> list[tuple[int, int, int]]:
        """Begin to read blocks for which host memory has slots. sources: the tier of each block to
        read, by index. Returns the index, the tier and its slot of each."""
        reads: list[tuple[int, int, int]] = []
        for number, below in enumerate(self._below):
            indices = [index for index, tier in sources.items() if tier == number]
            if indices:
                staged = [keys[index] for index in indices]
                slots = below.tier.begin_reads(staged)
                reads += [(index, number, slot) for index, slot in zip(indices, slots, strict=True)]
                self._sources.update(dict.fromkeys(staged, number))
        return reads

    def abandon(self, keys: Iterable[bytes], *, is_late: bool = False) -> None:
        """No request waits for the load of these blocks any more. is_late: it took too long."""
        for key in filter(self._sources.__contains__, keys):
            self._abandoned.add(key)
            if is_late and key not in self._late:
                self._late.add(key)
                self._overdue[self._sources[key]] += 1

    def end(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        """Blocks have been read into host memory, except for `failed`."""
        if not keys:
            return
        sources = [self._sources.pop(key) for key in keys]
        self._abandoned.difference_update(keys)
        for key, source in zip(keys, sources, strict=True):
            if key in self._late:
                self._late.remove(key)
                self._overdue[source] -= 1
        for number, below in enumerate(self._below):
            read = [key for key, source in zip(keys, sources, strict=True) if source == number]
            if read and below.writes_back:
                below.tier.end_reads([key for key in read if key not in failed], take=True)
                read = [key for key in read if key in failed]
            below.tier.end_reads(read)
        complete_stores(self._host, keys, failed)

    # Reading ahead

    def read_ahead(self, request_id: str, keys: Sequence[bytes]) -> None:
        """See OffloadingManager."""
        if self._below:
            self._ahead.add(request_id, keys)

    def end_read_ahead(self, request_id: str, *, is_over: bool) -> None:
        """See OffloadingManager."""
        if is_over or self._reads_in_load:  # else it goes on, for the next requests
            self._ahead.end(request_id)

    def changed(self) -> None:
        """More may be known, or there may be more room."""
        self._ahead.changed()

    @property
    def may_begin_jobs(self) -> bool:
        """Whether `begin_jobs` may return some."""
        return self._ahead.num_left > 0

    def begin_jobs(self, next_id: Callable[[], int]) -> list[tuple[int, Stage]]:
        """Jobs to begin, with their ids: they read blocks ahead, if host memory can hold these
        beside what is in use."""
        begun: list[tuple[int, Stage]] = []
        found = self._ahead.take(self._find_ahead) if self.may_begin_jobs else []
        for number in range(len(self._below)):
            of_tier = [key for key, tier in found if tier == number]
            for first in range(0, len(of_tier), MAX_JOB_BLOCKS):
                keys = of_tier[first : first + MAX_JOB_BLOCKS]
                prepared = count_displaced(self._host.prepare_store(keys), self._below)
                if prepared is None:
                    continue
                reads = self.begin(prepared.keys, dict.fromkeys(range(len(keys)), number))
                slots = int64s([slot for _, _, slot in reads])
                stage = Stage(number, prepared.keys, int64s(prepared.slots), slots)
                begun.append((next_id(), stage))
                self._jobs[begun[-1][0]] = prepared.keys
        return begun

    def _find_ahead(self, key: bytes) -> int | Where:
        if not self._host.may_store(key):
            return Where.HERE
        match self._is_below(key):
            case None:
                return Where.UNKNOWN
            case False:
                return Where.NOWHERE
        source = self.source_of(key)
        return Where.NOWHERE if source is None else source

    def has_job(self, job_id: int) -> bool:
        """Whether the job is one of `begin_jobs`."""
        return job_id in self._jobs

    def job_ended(self, job_id: int, failed: Sequence[int]) -> list[bytes]:
        """The job has ended on all ranks; returns the keys of the blocks that it did not read."""
        keys = self._jobs.pop(job_id)
        failed_keys = [keys[index] for index in failed]
        self.end(keys, failed_keys)
        return failed_keys

    # All of them

    def reset(self) -> None:
        """Forget the requests in the queue. Not called while blocks are being read."""
        self._ahead.clear()

    def begin_epoch(self) -> None:
        """All workers were replaced: reads in progress have failed."""
        self._sources.clear()
        self._jobs.clear()
        self._ahead.clear()
        self._abandoned.clear()
        self._late.clear()
        self._overdue.clear()
