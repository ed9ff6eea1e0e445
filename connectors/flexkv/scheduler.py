"""The scheduler half, and the options."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.base.prefix_store.scheduler import PrefixStoreConnector
from longshore.connectors.options import Options
from longshore.protocol.errors import ConfigError

NAME: Final = "flexkv"

REMOTE_KEYS: Final = (
    "remote_cache_path",
    "remote_cache_size_mode",
    "remote_file_num",
    "remote_file_prefix",
    "remote_file_size",
    "remote_config_custom",
)
"""Fields of FlexKV's CacheConfig, passed on as they are."""

_KEYS: Final = ("cpu_bytes_to_use", "ssd_bytes", "ssd_path", "remote", "timeout_s")


class FlexKVOptions(msgspec.Struct, frozen=True):
    """cpu_bytes: host memory of all ranks together.
    ssd_bytes, ssd_path: of the files on SSD; 0: none.
    remote:    fields of FlexKV's configuration of remote storage; empty: none.
    timeout_s: a transfer that takes longer has failed.
    """

    cpu_bytes: int
    ssd_bytes: int
    ssd_path: str
    remote: dict[str, Any]
    timeout_s: float


def read_options(values: Mapping[str, Any]) -> FlexKVOptions:
    """Raises ConfigError, which names the option."""
    options = Options(NAME, values, _KEYS)
    has_ssd = "ssd_bytes" in values or "ssd_path" in values
    remote = values.get("remote", {})
    if not isinstance(remote, dict) or set(remote) - set(REMOTE_KEYS):
        raise options.error(
            f"'remote' to be an object with some of {', '.join(REMOTE_KEYS)}; it is {remote!r}"
        )
    if remote and not has_ssd:
        raise options.error("'ssd_bytes' and 'ssd_path' for 'remote', which is below the SSD")
    return FlexKVOptions(
        options.size_bytes("cpu_bytes_to_use"),
        options.size_bytes("ssd_bytes") if has_ssd else 0,
        options.text("ssd_path", "/var/tmp/flexkv") if has_ssd else "",
        remote,
        options.number("timeout_s", 20.0, minimum=0.001),
    )


class FlexKVConnector(PrefixStoreConnector):
    name = NAME
    worker_half: ClassVar[str] = "longshore.connectors.flexkv.worker:FlexKVWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        read_options(options)

    def __init__(self, config: ConnectorConfig) -> None:
        read_options(config.options)
        if len(set(config.rank_block_bytes)) > 1:
            raise ConfigError(
                f"--kv-connector {NAME} needs blocks of the same size on all ranks, because FlexKV "
                "does; here the pipeline stages have different numbers of layers"
            )
        super().__init__(config)
