"""Settings of the routing of a gateway, and the objects made of them."""

import msgspec

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.policies import (
    LeastLoaded,
    PolicyName,
    PrefixAware,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from longshore.protocol.events import EventSource
from longshore.scheduler.kv_cache.block_hash import BlockHasher


class PrefixRoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy `prefix_aware` needs.

    events:    where each engine publishes its KV events at the start of the deployment.
    hash_seed: of block hashes, in hexadecimal; secret.
    hash_algorithm, tokens_per_hash: as in CacheConfig.
    max_hashes: limit of the index, for all engines together.
    """

    events: tuple[EventSource, ...]
    hash_seed: str
    hash_algorithm: str
    tokens_per_hash: int
    max_hashes: int


class RoutingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """session_header: request header that names a session.
    prefix: set for the policy `prefix_aware`."""

    policy: PolicyName = "least_loaded"
    session_header: str = "x-session-id"
    prefix: PrefixRoutingConfig | None = None


def make_policy(config: RoutingConfig) -> RoutingPolicy:
    """The policy of one gateway, without engines."""
    prefix = config.prefix
    match config.policy:
        case "round_robin":
            return RoundRobin()
        case "session_affinity":
            return SessionAffinity()
        case "prefix_aware" if prefix is not None:
            index = BlockIndex(
                0, tokens_per_hash=prefix.tokens_per_hash, max_hashes=prefix.max_hashes
            )
            seed = bytes.fromhex(prefix.hash_seed)
            hasher = BlockHasher(prefix.tokens_per_hash, seed, prefix.hash_algorithm)
            return PrefixAware(index, hasher)
        case _:
            return LeastLoaded()
