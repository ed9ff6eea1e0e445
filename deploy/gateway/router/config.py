"""Settings of the routing of a gateway, and the objects made of them."""

from dataclasses import dataclass

import msgspec

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.policies import (
    LeastLoaded,
    PrefixAware,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from longshore.deploy.gateway.settings import RoutingSettings
from longshore.scheduler.kv_cache.block_hash import BlockHasher


class PrefixRoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy `prefix_aware` needs.

    hash_seed: of block hashes, in hexadecimal; secret.
    hash_algorithm, tokens_per_hash: as in CacheConfig.
    """

    hash_seed: str
    hash_algorithm: str
    tokens_per_hash: int


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(RoutingSettings):
    """How one gateway routes.

    prefix: set for the policy `prefix_aware`.
    """

    prefix: PrefixRoutingConfig | None = None


def make_policy(config: RoutingConfig) -> RoutingPolicy:
    """The policy of one gateway, without engines."""
    prefix = config.prefix
    match config.routing_policy:
        case "round_robin":
            return RoundRobin()
        case "session_affinity":
            return SessionAffinity()
        case "prefix_aware" if prefix is not None:
            index = BlockIndex(
                0, tokens_per_hash=prefix.tokens_per_hash, max_hashes=config.routing_index_blocks
            )
            seed = bytes.fromhex(prefix.hash_seed)
            hasher = BlockHasher(prefix.tokens_per_hash, seed, prefix.hash_algorithm)
            return PrefixAware(index, hasher)
        case _:
            return LeastLoaded()
