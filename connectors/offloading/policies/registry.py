"""Loads eviction policies by name: built-in ones, installed entry points, or a class by its path.

Entry point group `longshore.eviction_policies`, or `package.module:Class`.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final

from longshore.connectors.offloading.policies.arc import ARC
from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.policies.policy import EvictionPolicy
from longshore.connectors.offloading.policies.reuse_rate import ReuseRate
from longshore.connectors.offloading.policies.s3fifo import S3FIFO
from longshore.protocol.errors import ConfigError

ENTRY_POINT_GROUP: Final = "longshore.eviction_policies"
POLICIES: Final[Mapping[str, type[EvictionPolicy]]] = MappingProxyType(
    {"lru": LRU, "arc": ARC, "s3fifo": S3FIFO, "reuse_rate": ReuseRate}
)
NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


def load_eviction_policy(
    name: str, capacity: int, options: Mapping[str, Any] = NO_OPTIONS
) -> EvictionPolicy:
    """Create the policy of one tier.

    name:     a built-in policy, an installed entry point, or `package.module:Class`.
    capacity: in blocks.
    options:  keyword arguments of the policy's constructor.

    Raises ConfigError.
    """
    source, chosen = _find(name)
    try:
        policy = chosen(capacity, **options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"eviction policy {name!r}{source} cannot be created with options {dict(options)}: "
            f"{error!r}"
        ) from error
    if not isinstance(policy, EvictionPolicy):
        raise ConfigError(
            f"eviction policy {name!r}{source} is a {type(policy).__name__}; it must extend "
            "longshore.connectors.offloading.policies.policy.EvictionPolicy"
        )
    return policy


def _find(name: str) -> tuple[str, Any]:
    """Where the policy comes from, for messages, and the object that creates it."""
    if name in POLICIES:
        return "", POLICIES[name]
    installed = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
    if name in installed:
        point = installed[name]
    elif ":" in name:
        point = EntryPoint(name, name, ENTRY_POINT_GROUP)
    else:
        raise ConfigError(
            f"unknown eviction policy {name!r}; use one of {', '.join((*POLICIES, *installed))} or "
            f"package.module:Class (other packages register names as {ENTRY_POINT_GROUP})"
        )
    try:
        return f" ({point.value})", point.load()
    except Exception as error:
        raise ConfigError(
            f"eviction policy {name!r} ({point.value}) cannot be loaded: {error!r}"
        ) from error
