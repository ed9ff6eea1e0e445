"""CPUOffloadingSpec: blocks in host memory, and optionally in tiers below it."""

from longshore.connectors.base import KVCaches, TransferQueues, WorkerConnectorConfig
from longshore.connectors.offloading.disk_tier import DiskTier
from longshore.connectors.offloading.ledger import OffloadLedger, capacity_blocks
from longshore.connectors.offloading.policies.registry import load_eviction_policy
from longshore.connectors.offloading.remote.address import RemoteAddress
from longshore.connectors.offloading.remote_tier import RemoteTier
from longshore.connectors.offloading.reuse_filter import make_reuse_filter
from longshore.connectors.offloading.spec import (
    OffloadingHandlers,
    OffloadingManager,
    OffloadingSpec,
)
from longshore.connectors.offloading.tiered_manager import TieredManager
from longshore.connectors.offloading.tiers import LowerTier
from longshore.connectors.options import parse_size
from longshore.protocol.errors import ConfigError


class CPUOffloadingSpec(OffloadingSpec):
    """Options: see OffloadingOptions."""

    can_swap = True

    @property
    def slot_bytes(self) -> int:
        """Bytes of one offloaded block of all ranks."""
        return self.groups.factor * sum(self.config.rank_block_bytes)

    @property
    def num_slots(self) -> int:
        """Offloaded blocks that fit into host memory."""
        try:
            return capacity_blocks(self.options.host_bytes, self.slot_bytes)
        except ConfigError as error:
            raise ConfigError(
                f"cpu_bytes_to_use={self.options.cpu_bytes_to_use}: {error}"
            ) from None

    @property
    def has_disk(self) -> bool:
        return self.options.disk_path is not None

    @property
    def disk_bytes(self) -> int:
        """The capacity of the disk tier, for all ranks."""
        assert self.options.disk_bytes is not None
        return parse_size("disk_bytes", self.options.disk_bytes)

    @property
    def remote(self) -> RemoteAddress | None:
        """The store of the remote tier."""
        return self.options.remote

    @property
    def has_lower_tiers(self) -> bool:
        return self.has_disk or self.remote is not None

    def make_manager(self) -> OffloadingManager:
        options = self.options
        return TieredManager(
            self._make_ledger(self.num_slots),
            self._lower_tiers(),
            make_reuse_filter(options.min_lookups, options.max_tracker_size),
            writes_back=options.write_policy == "back",
            max_wait_s=options.max_wait_s,
            num_ranks=self.config.num_ranks,
            counted_group=self.groups.most_complete,
            publishes_events=self.config.publishes_events,
        )

    def _lower_tiers(self) -> list[LowerTier]:
        """In the same order as `tier_workers.open_tiers`."""
        num_ranks = self.config.num_ranks
        tiers: list[LowerTier] = []
        if self.has_disk:
            tiers.append(DiskTier(num_ranks, self._make_ledger))
        if self.remote is not None:
            partial = (group.number for group in self.groups.groups if not group.needs_all)
            tiers.append(RemoteTier(num_ranks, frozenset(partial)))
        return tiers

    def _make_ledger(self, num_slots: int) -> OffloadLedger:
        options = self.options
        policy = load_eviction_policy(
            options.eviction_policy, num_slots, options.eviction_policy_options
        )
        return OffloadLedger(num_slots, policy)

    def make_handlers(
        self, config: WorkerConnectorConfig, kv_caches: KVCaches, queues: TransferQueues
    ) -> OffloadingHandlers:
        from longshore.connectors.offloading.host_handlers import HostHandlers

        return HostHandlers(self, config, kv_caches, queues)
