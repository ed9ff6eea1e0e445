"""The scheduler's list of jobs in progress: stores from the device, and copies between tiers."""

from dataclasses import dataclass, field
from itertools import count

from longshore.connectors.base import BlockHolds
from longshore.connectors.base.groups import BlockRows
from longshore.connectors.offloading.messages import Ended, StoreJob, block_list
from longshore.protocol.kv_cache_spec import NULL_BLOCK


@dataclass(slots=True)
class Job:
    """A store or a tier job. hold_id: 0 for a tier job."""

    keys: list[bytes] = field(default_factory=list)
    num_blocks: int = 0
    hold_id: int = 0
    failed: set[int] = field(default_factory=set)
    ranks_done: set[int] = field(default_factory=set)

    @property
    def failed_keys(self) -> list[bytes]:
        return [self.keys[index] for index in sorted(self.failed)]


class Jobs:
    """A store holds the device's blocks until all ranks have ended it.

    num_storing: blocks of the device that stores hold.
    """

    def __init__(self, holds: BlockHolds, num_ranks: int) -> None:
        self._holds = holds
        self._num_ranks = num_ranks
        self._ids = count(1)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """All jobs have failed, and their holds are void."""
        self.num_storing = 0
        self._in_progress: dict[int, Job] = {}
        self._new_stores: list[StoreJob] = []

    def __len__(self) -> int:
        return len(self._in_progress)

    @property
    def num_stored_keys(self) -> int:
        """Number of offloaded blocks that are being stored."""
        return sum(len(job.keys) for job in self._in_progress.values() if job.hold_id)

    @property
    def has_new_stores(self) -> bool:
        """Whether `take_stores` would return some."""
        return bool(self._new_stores)

    def take_stores(self) -> list[StoreJob]:
        """Stores that the next plan begins."""
        stores, self._new_stores = self._new_stores, []
        return stores

    def begin_store(
        self, keys: list[bytes], groups: bytes, ids: BlockRows, tier_data: bytes
    ) -> None:
        """groups, ids: see BlockList."""
        copied = ids[ids != NULL_BLOCK]
        job = Job(keys, len(copied), self._holds.hold(copied.tolist()))
        job_id = self._begin(job)
        self.num_storing += job.num_blocks
        self._new_stores.append(StoreJob(job_id, block_list(keys, groups, ids), tier_data))

    def begin_tier_job(self) -> int:
        """The id of a new tier job."""
        return self._begin(Job())

    def _begin(self, job: Job) -> int:
        job_id = next(self._ids)
        self._in_progress[job_id] = job
        return job_id

    def ended(self, ended: Ended, rank: int) -> Job | None:
        """A rank has ended its share of a job. Returns the job if all ranks have. Repeated and
        unknown reports are ignored."""
        job = self._in_progress.get(ended.job_id)
        if job is None or rank in job.ranks_done:
            return None
        job.ranks_done.add(rank)
        job.failed.update(ended.failed)
        if len(job.ranks_done) < self._num_ranks:
            return None
        del self._in_progress[ended.job_id]
        if job.hold_id:
            self._holds.release(job.hold_id)
            self.num_storing -= job.num_blocks
        return job
