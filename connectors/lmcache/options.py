"""The options of the lmcache connector, and the version of LMCache that it was written for."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.options import Options
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

LMCACHE_VERSION: Final = "0.5.6"

L2_ADAPTER_TYPES: Final = ("fs", "fs_native", "resp")
"""Storage below host memory that the tests of this connector run with."""

EVICTION_POLICIES: Final = ("LRU", "ARC")

_KEYS: Final = ("cpu_bytes_to_use", "eviction_policy", "l2_adapters", "lookup_timeout_s")


def install_lmcache() -> str:
    """The command. Without LMCache's dependencies: most of them are for its server, and its limits
    on the versions of numpy and others do not fit."""
    return f"{install_command('lmcache')} && pip install --no-deps lmcache=={LMCACHE_VERSION}"


class LMCacheOptions(msgspec.Struct, frozen=True):
    """cpu_bytes:       host memory of all ranks together.
    eviction_policy:  of host memory.
    l2_adapters:      storage below it, each in the form of LMCache's `--l2-adapter`.
    lookup_timeout_s: a lookup that takes longer is a miss.
    """

    cpu_bytes: int
    eviction_policy: str
    l2_adapters: tuple[dict[str, Any], ...]
    lookup_timeout_s: float

    def rank_cpu_bytes(self, config: ConnectorConfig, rank: int) -> int:
        """Host memory of one rank: all ranks have room for the same number of blocks."""
        total = sum(config.rank_block_bytes)
        return self.cpu_bytes * config.rank_block_bytes[rank] // total


def read_options(config: ConnectorConfig) -> LMCacheOptions:
    """Raises ConfigError, which names the option."""
    options = Options("lmcache", config.options, _KEYS)
    cpu_bytes = options.size_bytes("cpu_bytes_to_use")
    block_bytes = sum(config.rank_block_bytes)
    if cpu_bytes < 2 * block_bytes:
        raise options.error(
            f"'cpu_bytes_to_use' of at least {2 * block_bytes}, the size of two blocks; it is "
            f"{cpu_bytes}"
        )
    adapters = config.options.get("l2_adapters", [])
    if not isinstance(adapters, list) or not all(isinstance(each, dict) for each in adapters):
        raise options.error(
            "'l2_adapters' to be a list of objects such as "
            f'{{"type": "fs", "base_path": "/var/tmp/kv"}}; it is {adapters!r}'
        )
    for adapter in adapters:
        if adapter.get("type") not in L2_ADAPTER_TYPES:
            raise options.error(
                f"the 'type' of each of 'l2_adapters' to be one of {', '.join(L2_ADAPTER_TYPES)}, "
                f"which it was tested with; it is {adapter.get('type')!r}"
            )
        if "serde" in adapter:
            raise options.error(
                "'l2_adapters' without 'serde', which changes the stored bytes: they would not "
                "match their checksums"
            )
    return LMCacheOptions(
        cpu_bytes,
        options.choice("eviction_policy", EVICTION_POLICIES),
        tuple(adapters),
        options.number("lookup_timeout_s", 5.0, minimum=0.001),
    )


def check_library() -> None:
    """Raise ConfigError if LMCache is missing, or of another version. Imports nothing of it."""
    try:
        installed = version("lmcache")
    except PackageNotFoundError:
        raise ConfigError(
            "--kv-connector lmcache needs the package lmcache, which is not installed. Install it: "
            f"{install_lmcache()}"
        ) from None
    if installed != LMCACHE_VERSION:
        raise ConfigError(
            f"--kv-connector lmcache was written for LMCache {LMCACHE_VERSION}, but {installed} is "
            f"installed, whose interfaces may differ. Install the other one: {install_lmcache()}"
        )
