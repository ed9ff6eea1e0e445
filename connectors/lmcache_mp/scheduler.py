"""The scheduler half, and the options."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.base.prefix_store.scheduler import PrefixStoreConnector
from longshore.connectors.options import Options

NAME: Final = "lmcache_mp"

_KEYS: Final = ("server_url", "chunk_size", "timeout_s")


class LMCacheMPOptions(msgspec.Struct, frozen=True):
    """server_url: ZMQ endpoint of the server.
    chunk_size:    tokens per object, as in the server.
    timeout_s:     a call that takes longer has failed.
    """

    server_url: str
    chunk_size: int
    timeout_s: float


def read_options(values: Mapping[str, Any]) -> LMCacheMPOptions:
    """Raises ConfigError, which names the option."""
    options = Options(NAME, values, _KEYS)
    server_url = "tcp://127.0.0.1:5555"
    if "server_url" in values:
        server_url = options.text("server_url", server_url)
    if not server_url.startswith(("tcp://", "ipc://")):
        raise options.error(f"'server_url' to begin with tcp:// or ipc://; it is {server_url!r}")
    return LMCacheMPOptions(
        server_url,
        options.integer("chunk_size", 256, minimum=4),
        options.number("timeout_s", 5.0, minimum=0.001),
    )


class LMCacheMPConnector(PrefixStoreConnector):
    name = NAME
    worker_half: ClassVar[str] = "longshore.connectors.lmcache_mp.worker:LMCacheMPWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        read_options(options)

    def __init__(self, config: ConnectorConfig) -> None:
        chunk_size = read_options(config.options).chunk_size
        block_size = config.specs[0].block_size
        if chunk_size % block_size:
            raise Options(NAME, config.options, _KEYS).error(
                f"'chunk_size' to be a multiple of the block size of {block_size}; it is "
                f"{chunk_size}"
            )
        super().__init__(config, chunk_size // block_size)
