"""The line that says where to ask, and what fits."""

from collections.abc import Mapping, Sequence

from longshore.deploy.replica import Replica, replicas
from longshore.protocol.lifeline import Ready


def ready_line(
    url: str,
    model_name: str,
    ready: Mapping[str, Ready],
    *,
    num_replicas: int = 1,
    num_gateways: int = 1,
) -> str:
    """ready: the processes' reports, by name."""
    gateway = next(report for name, report in ready.items() if name.startswith("gateway"))
    max_model_len = int(gateway.details["max_model_len"])
    sizes = [_size(replica, ready, max_model_len) for replica in replicas(num_replicas)]
    if num_replicas == 1:
        engines = sizes[0]
    elif len(set(sizes)) == 1:
        engines = f"{num_replicas} engines, each with {sizes[0]}"
    else:
        each = "; ".join(f"engine {number} has {size}" for number, size in enumerate(sizes))
        engines = f"{num_replicas} engines: {each}"
    by = "" if num_gateways == 1 else f"{num_gateways} gateways, "
    return f"ready at {url} (model {model_name}, {by}{engines})"


def _size(replica: Replica, ready: Mapping[str, Ready], max_model_len: int) -> str:
    cache = ready[replica.scheduler].details
    num_blocks, num_tokens = int(cache["num_blocks"]), int(cache["kv_cache_tokens"])
    block_bytes = [
        int(report.details["block_bytes"])
        for name, report in ready.items()
        if replica.has_worker(name)
    ]
    return (
        f"{num_blocks:,} blocks of {cache['block_sizes']} tokens: {num_tokens:,} tokens fit, "
        f"{max_model_len:,} per request; KV cache: {_kv_cache_size(num_blocks, block_bytes)}"
    )


def _kv_cache_size(num_blocks: int, block_bytes: Sequence[int]) -> str:
    """block_bytes: of each worker. They differ between stages with unlike numbers of layers."""
    if len(set(block_bytes)) > 1:
        each = " + ".join(f"{size:,}" for size in block_bytes)
        return f"{num_blocks:,} x ({each}) = {num_blocks * sum(block_bytes):,} bytes, by worker"
    size = block_bytes[0]
    where = f" on each of {len(block_bytes)} workers" if len(block_bytes) > 1 else ""
    return f"{num_blocks:,} x {size:,} = {num_blocks * size:,} bytes{where}"
