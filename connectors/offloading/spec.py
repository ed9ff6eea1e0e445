"""The seam of offloading: the connector layer knows the contract and no memory, a spec knows memory
and no scheduler.

A spec makes two objects: a manager in the scheduler, which decides what each tier holds, and
handlers in every worker, which copy. What the manager writes into `tier_data`, only the handlers of
the same spec read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Final, NamedTuple, Protocol

from longshore.connectors.base import (
    ConnectorConfig,
    ConnectorStats,
    KVCaches,
    TransferQueues,
    WorkerConnectorConfig,
)
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.offloading.messages import LoadJob, StoreJob, TierJob
from longshore.connectors.offloading.options import DEFAULT_SPEC, OffloadingOptions
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEvent
from longshore.protocol.requests import CacheHint, Tenant
from longshore.protocol.statistics import TransferOperation

ENTRY_POINT_GROUP: Final = "longshore.offload_tiers"

BUILT_IN_MODULE: Final = "longshore.connectors.offloading.host_spec"


class HintedKeys(NamedTuple):
    """The keys of a request with a cache hint that has ended, of all groups, in order of position.

    prefixes: the number of leading keys of each of the hint's prefixes.
    """

    keys: Sequence[bytes]
    prefixes: Sequence[int]
    hint: CacheHint
    tenant: Tenant
    now: float


class PreparedLoad(NamedTuple):
    """Keys that will be loaded, a leading part of those asked for, and where from."""

    num_keys: int
    tier_data: bytes


class PreparedBlocks(NamedTuple):
    """indices: which of the given keys will be stored; the others need no store."""

    indices: Sequence[int]
    tier_data: bytes


class OffloadingManager(Protocol):
    """What the tiers hold, in the scheduler. Does no I/O. Keys of a call are those of one request,
    in the order of its prefix; `position` is the index of the first."""

    def lookup(self, keys: Sequence[bytes], waiting_s: float = 0.0) -> int | None:
        """Number of leading keys that can be loaded; None: not known yet. Reserves nothing.

        waiting_s: time since the request arrived.
        """

    def read_ahead(self, request_id: str, keys: Sequence[bytes]) -> None:
        """A request was queued: prepare for loading its blocks of one group, of which a hit needs
        all. `touch` was called before."""

    def end_read_ahead(self, request_id: str, *, is_over: bool) -> None:
        """The request begins to compute or load, or ends (`is_over`)."""

    def num_without_room(self, keys: Sequence[bytes]) -> int:
        """Of keys that `lookup` has found, of all groups: by how many a load of all of them is too
        large now. 0: `prepare_load` will load all of them."""
        return 0

    def touch(self, keys: Sequence[bytes], position: int = 0) -> None:
        """A request uses these keys, whether they are stored or not. Called once per request."""

    def refresh(self, keys: Sequence[bytes]) -> None:
        """A request with these keys has ended: of them, evict the last ones first."""

    def retain(self, hinted: HintedKeys) -> None:
        """A request with a cache hint has ended, and its keys were refreshed; see
        `OffloadLedger.retain`."""

    def expire(self, now: float) -> None:
        """A request has ended at this time: so have the hints whose time to live has passed."""

    def prepare_load(self, keys: Sequence[bytes]) -> PreparedLoad:
        """Pin keys that `lookup` has found, until `complete_load`."""

    def load_abandoned(self, keys: Sequence[bytes]) -> None:
        """No request waits for this load any more; it may never end."""

    def load_expired(self, keys: Sequence[bytes]) -> None:
        """Like `load_abandoned`, because the load has taken too long."""
        self.load_abandoned(keys)

    def complete_load(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        """A load has ended on all ranks. failed: keys that some rank could not read; they are
        removed."""

    def prepare_store(self, keys: Sequence[bytes], position: int = 0) -> PreparedBlocks | None:
        """Reserve room for the keys that are worth storing and not stored yet. None: there is no
        room now. The `tier_data` of several calls is joined in one job."""

    def prepare_stores(self, runs: Sequence[tuple[Sequence[bytes], int]]) -> PreparedBlocks | None:
        """`prepare_store` for several requests at once; the indices are those of all keys in order.
        runs: keys and position of each. None, and nothing has changed: ask for each request."""
        return None

    def complete_store(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        """A store has ended on all ranks: the keys can be loaded, except for `failed`."""

    def take_jobs(self, next_id: Callable[[], int]) -> list[TierJob]:
        """Copies between tiers to begin with the next plan; `next_id` gives their job ids."""

    def job_ended(self, job_id: int, failed: Sequence[int]) -> None:
        """A tier job has ended on all ranks."""

    def receive(self, rank: int, tier_data: bytes) -> None:
        """A message of a rank's handlers."""

    @property
    def has_jobs(self) -> bool:
        """Whether `take_jobs` would return some."""

    def end_step(self) -> None:
        """A plan has been made."""

    def take_events(self) -> list[KVEvent]:
        """See `SchedulerConnector.take_events`."""

    def stats(self) -> ConnectorStats:
        """Statistics of the tiers, the one in which blocks are stored first of all, and what is
        queued between them. Stores and loads of requests are counted by the connector."""

    def reset(self) -> bool:
        """Remove everything. False if a transfer is in progress."""

    def begin_epoch(self) -> None:
        """All workers were replaced: transfers and jobs in progress have failed."""

    # With `OffloadingSpec.can_swap`

    def prepare_swap(self, keys: Sequence[bytes]) -> PreparedBlocks | None:
        """Keep these keys until `release_swap`, whatever else is stored, and reserve room for those
        that are not stored yet. None, and nothing has changed, if there is no room. Private keys
        (`groups.is_private`) are found by `lookup_swap` alone, and stay in this tier."""

    def lookup_swap(self, keys: Sequence[bytes]) -> bool | None:
        """Whether all of these keys, kept by `prepare_swap`, can be loaded. None: not yet."""

    def release_swap(self, keys: Sequence[bytes]) -> None:
        """The keys need not be kept any longer; private ones are removed."""

    def check(self) -> None:
        """Raise LongshoreError if an invariant is violated. For tests."""


class OffloadingHandlers(Protocol):
    """Copies blocks, in a worker. `on_done` is called on any thread, once, when a job has ended,
    with the indices of the offloaded blocks that were not copied."""

    def load(self, job: LoadJob, on_done: Callable[[Sequence[int]], None]) -> None: ...

    def store(self, job: StoreJob, on_done: Callable[[Sequence[int]], None]) -> None: ...

    def run(self, job: TierJob, on_done: Callable[[Sequence[int]], None]) -> None: ...

    def take_messages(self) -> list[bytes]:
        """Messages to the manager."""

    def take_operations(self) -> Sequence[TransferOperation]:
        """What was moved since the last call, recorded before the `on_done` of its job."""

    def close(self) -> None:
        """End all jobs, then release what they use: memory, files, locks."""


class OffloadingSpec(ABC):
    """A kind of memory to offload to. Constructed in every process, before anything is allocated.
    Raises ConfigError for options that do not fit.

    can_swap: requests can be swapped out to it.
    """

    can_swap: ClassVar[bool] = False

    def __init__(
        self, config: ConnectorConfig, options: OffloadingOptions, groups: StoredGroups
    ) -> None:
        self.config = config
        self.options = options
        self.groups = groups

    @property
    def has_lower_tiers(self) -> bool:
        """Whether the manager reads ahead for queued requests."""
        return False

    @abstractmethod
    def make_manager(self) -> OffloadingManager:
        """Called once, in the scheduler; must not import torch."""

    @abstractmethod
    def make_handlers(
        self, config: WorkerConnectorConfig, kv_caches: KVCaches, queues: TransferQueues
    ) -> OffloadingHandlers:
        """Called once, in each worker."""


def load_spec(config: ConnectorConfig, options: OffloadingOptions) -> OffloadingSpec:
    """The spec that the options name: a class of `spec_module_path`, else an installed entry point
    of the group `longshore.offload_tiers`, else a class of this package. Raises ConfigError."""
    return _spec_class(options)(config, options, StoredGroups(config, options.block_size))


def _spec_class(options: OffloadingOptions) -> type[OffloadingSpec]:
    name, module = options.spec_name, options.spec_module_path
    installed: dict[str, EntryPoint] = {}
    if module is None and name != DEFAULT_SPEC:
        installed = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
    value = f"{module or BUILT_IN_MODULE}:{name}"
    point = installed.get(name) or EntryPoint(name, value, ENTRY_POINT_GROUP)
    try:
        found = point.load()
    except ModuleNotFoundError as error:
        setting = f"spec_name={name!r}" if module is None else f"spec_module_path={module!r}"
        raise ConfigError(f"{setting}: there is no module {error.name}") from None
    except AttributeError:
        found = None
    if not (isinstance(found, type) and issubclass(found, OffloadingSpec)):
        names = ", ".join([DEFAULT_SPEC, *sorted(installed)])
        raise ConfigError(
            f"spec_name={name!r} is not an OffloadingSpec of module {point.module}. Correct "
            f"spec_name, or give its module as spec_module_path. Installed ones: {names}"
        )
    return found
