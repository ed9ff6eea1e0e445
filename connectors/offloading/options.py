"""The options of the offloading connector, and how they are checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from longshore.connectors.offloading.policies.registry import load_eviction_policy
from longshore.connectors.offloading.remote.address import RemoteAddress, remote_address
from longshore.connectors.options import parse_size
from longshore.connectors.settings import VerifyKV
from longshore.protocol.errors import ConfigError

DEFAULT_SPEC: Final = "CPUOffloadingSpec"

PositiveInt: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class OffloadingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--kv-connector-config` of the offloading connector.

    cpu_bytes_to_use: size of the host tier, for all ranks together, as a number or as "8GiB".
    spec_name:        class of the OffloadingSpec, or an installed one (see `spec.py`).
    spec_module_path: module of that class; None: one of this package, or an installed one.
    spec_options:     options of a spec of another package.
    block_size:       tokens per offloaded block, a multiple of the GPU block; None: that block.
    eviction_policy:  of the host tier: built in, an installed one, or package.module:Class.
    eviction_policy_options: keyword arguments of the policy.
    write_policy:     "through": blocks are written to the lower tiers as soon as they are in host
                      memory. "selective": only those that were looked up `store_threshold` times,
                      at least 2, are stored. "back": a block is written to disk when host memory
                      evicts it, and is in one of both.
    prefetch:         what a request does while some of its blocks are only in lower tiers. "wait":
                      it waits until they have been read. "timeout": at most `prefetch_timeout_ms`
                      since it arrived. "best_effort": it loads what is in host memory. In any case,
                      they are read ahead while it is queued.
    prefetch_timeout_ms: see `prefetch`.
    store_threshold:  store only blocks that were looked up this often; 0 and 1 store all.
    max_tracker_size: number of blocks whose lookups are counted for that.
    disk_path:        folder of the disk tier; None: no disk tier.
    disk_bytes:       its maximum size, for all ranks together.
    disk_io:          "nixl", "threads", or "auto".
    verify_kv:        how often the checksum of a block is verified when it is loaded from host
                      memory. Blocks from disk and remote stores are always verified.
    remote_url:       of the remote tier; None: no remote tier.
    remote_options:   of the library that connects to it: endpoint, region, credentials.
    remote_timeout_ms: of one operation.
    remote_concurrency: operations per batch in progress, on each rank.
    remote_max_bytes_in_flight: bytes of the operations in progress, on each rank.
    remote_ttl_s:     how long Redis keeps a block after it was last written; None: until it evicts
                      it.
    remote_negative_ttl_s: how long a block that was absent is not asked for again.
    remote_failure_threshold: failures in a row after which the store is not used for
                      `remote_retry_s` seconds, at least 0.1: each time, one operation is tried.
    """

    cpu_bytes_to_use: int | str
    spec_name: str = DEFAULT_SPEC
    spec_module_path: str | None = None
    spec_options: dict[str, Any] = {}
    block_size: int | None = None
    eviction_policy: str = "lru"
    eviction_policy_options: dict[str, Any] = {}
    write_policy: Literal["through", "selective", "back"] = "through"
    prefetch: Literal["wait", "timeout", "best_effort"] = "wait"
    prefetch_timeout_ms: PositiveInt | None = None
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    disk_path: str | None = None
    disk_bytes: int | str | None = None
    disk_io: Literal["auto", "nixl", "threads"] = "auto"
    verify_kv: VerifyKV = "sampled"
    remote_url: str | None = None
    remote_options: dict[str, Any] = {}
    remote_timeout_ms: PositiveInt = 1000
    remote_concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    remote_max_bytes_in_flight: int | str = "256MiB"
    remote_ttl_s: PositiveInt | None = None
    remote_negative_ttl_s: Seconds = 10.0
    remote_failure_threshold: PositiveInt = 3
    remote_retry_s: Annotated[float, msgspec.Meta(ge=0.1)] = 10.0

    @property
    def host_bytes(self) -> int:
        return parse_size("cpu_bytes_to_use", self.cpu_bytes_to_use)

    @property
    def max_wait_s(self) -> float | None:
        """How long a request waits for blocks in lower tiers; None: as long as their load takes."""
        match self.prefetch:
            case "wait":
                return None
            case "timeout":
                assert self.prefetch_timeout_ms is not None
                return self.prefetch_timeout_ms / 1000
        return 0.0

    @property
    def min_lookups(self) -> int:
        """Store only blocks that were looked up this often."""
        if self.write_policy == "selective" and not self.store_threshold:
            return 2
        return self.store_threshold

    @property
    def remote(self) -> RemoteAddress | None:
        """The options of the remote store. Raises ConfigError."""
        if self.remote_url is None:
            return None
        return remote_address(self.remote_url, self.remote_options, self.remote_ttl_s)


def read_options(options: Mapping[str, Any]) -> OffloadingOptions:
    """Raises ConfigError, which names the option."""
    unknown = sorted(set(options) - set(OffloadingOptions.__struct_fields__))
    if unknown:
        known = ", ".join(OffloadingOptions.__struct_fields__)
        raise ConfigError(
            f"the offloading connector has no option {unknown[0]!r}; its options are {known}"
        )
    if "cpu_bytes_to_use" not in options:
        raise ConfigError(
            "the offloading connector needs cpu_bytes_to_use, the size of its host memory: "
            '--kv-connector-config \'{"cpu_bytes_to_use": "8GiB"}\''
        )
    try:
        read = msgspec.convert(options, OffloadingOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--kv-connector-config of the offloading connector: {error}{_choices_of(error)}"
        ) from None
    parse_size("cpu_bytes_to_use", read.cpu_bytes_to_use)
    if read.spec_options and (read.spec_name, read.spec_module_path) == (DEFAULT_SPEC, None):
        raise ConfigError(
            f"spec_options are for a spec of another package, but spec_name is {DEFAULT_SPEC}, "
            "which has none. Remove them, or set spec_name."
        )
    if (read.disk_path is None) != (read.disk_bytes is None):
        raise ConfigError(
            "disk_path and disk_bytes belong together: the folder of the disk tier and its maximum "
            "size. Set both or neither."
        )
    if read.disk_path == "":
        raise ConfigError("disk_path is empty; it is the folder of the disk tier")
    if read.write_policy == "back" and read.disk_path is None:
        raise ConfigError(
            'write_policy="back" writes blocks to disk when host memory evicts them, but there is '
            "no disk tier. Set disk_path and disk_bytes, or remove write_policy."
        )
    if (read.prefetch == "timeout") != (read.prefetch_timeout_ms is not None):
        raise ConfigError(
            'prefetch="timeout" and prefetch_timeout_ms belong together: how long a request waits '
            "for blocks from lower tiers. Set both or neither."
        )
    if read.write_policy == "selective" and read.store_threshold == 1:
        raise ConfigError(
            'store_threshold=1 stores all blocks; write_policy="selective" needs at least 2, which '
            "is its default"
        )
    if read.disk_bytes is not None:
        parse_size("disk_bytes", read.disk_bytes)
    parse_size("remote_max_bytes_in_flight", read.remote_max_bytes_in_flight)
    set_options = sorted(name for name in options if name.startswith("remote_"))
    if read.remote is None and set_options:
        raise ConfigError(f"{set_options[0]} is set, but remote_url is not. Set both or neither.")
    return read


def check_options(options: Mapping[str, Any]) -> None:
    """As `read_options`, and whether the eviction policy exists. Raises ConfigError."""
    read = read_options(options)
    load_eviction_policy(read.eviction_policy, 1, read.eviction_policy_options)


def _choices_of(error: msgspec.ValidationError) -> str:
    """The allowed values of the option that an error is about, if there are a few."""
    name = str(error).rpartition("$.")[2].rstrip("`")
    hint = get_type_hints(OffloadingOptions).get(name)
    if get_origin(hint) is not Literal:
        return ""
    return f"; use one of {', '.join(map(repr, get_args(hint)))}"
