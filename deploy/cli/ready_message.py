"""What a deployment prints when it is ready: its model, its KV cache, and where to reach it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from longshore.deploy.cli.client_options import ChatOptions
from longshore.deploy.supervisor.replica import Replica
from longshore.protocol.transport.lifeline import Ready

DEFAULT_URL: Final = ChatOptions.url


def ready_lines(url: str, message: str, *, can_chat: bool, needs_key: bool) -> Sequence[str]:
    """The last lines of the start. message: see `ready_message`."""
    lines = [message, f"dashboard: {url}/dashboard"]
    if can_chat:
        where = "" if url == DEFAULT_URL else f" --url {url}"
        lines.append(f"chat: longshore chat{where}{' --api-key KEY' if needs_key else ''}")
    return lines


def model_line(name: str, ready: Mapping[str, Ready], engines: Sequence[Replica]) -> str:
    """The model, and what computes it."""

    def workers(replica: Replica) -> str:
        details = [report.details for who, report in ready.items() if replica.has_worker(who)]
        devices = ", ".join(dict.fromkeys(each["device"] for each in details))
        number = "1 worker" if len(details) == 1 else f"{len(details)} workers"
        count = details[0].get("threads")
        threads = f" with {count} thread{'s' * (count != '1')}" if devices == "cpu" else ""
        return f"{number} on {devices}{threads}, {details[0]['dtype']}"

    return f"model {name}: {_per_engine(engines, workers)}"


def ready_message(
    url: str,
    engines: Mapping[str, Sequence[Replica]],
    ready: Mapping[str, Ready],
    *,
    num_gateways: int = 1,
) -> str:
    """Return one short line.

    engines: of each model, by the model's name.
    ready:   the processes' reports, by process name.
    """
    gateways = "" if num_gateways == 1 else f"{num_gateways} gateways, "
    if len(engines) > 1:
        return f"ready at {url} ({gateways}models {', '.join(engines)})"
    ((model_name, replicas),) = engines.items()
    gateway = next(report for name, report in ready.items() if name.startswith("gateway"))
    max_model_len = int(gateway.details["max_model_len"])
    described = _capacities(ready, replicas) if replicas else "engines on other nodes"
    return (
        f"ready at {url} (model {model_name}, {gateways}{described}, {max_model_len:,} per request)"
    )


def node_ready_message(
    node: str, model_name: str, ready: Mapping[str, Ready], engines: Sequence[Replica]
) -> str:
    """Return one short line for a node without gateways."""
    return f"node {node} is ready (model {model_name}, {_capacities(ready, engines)})"


def _capacities(ready: Mapping[str, Ready], engines: Sequence[Replica]) -> str:
    def capacity(replica: Replica) -> str:
        num_tokens = int(ready[replica.scheduler].details["kv_cache_tokens"])
        return f"a KV cache of {num_tokens:,} tokens"

    return _per_engine(engines, capacity)


def cache_sizes(ready: Mapping[str, Ready], engines: Sequence[Replica]) -> str:
    """Number of blocks and their size in bytes, per engine."""

    def sizes(replica: Replica) -> str:
        cache = ready[replica.scheduler].details
        num_blocks = int(cache["num_blocks"])
        block_bytes = [
            int(report.details["block_bytes"])
            for name, report in ready.items()
            if replica.has_worker(name)
        ]
        size = _bytes(num_blocks, block_bytes)
        return f"{num_blocks:,} blocks of {cache['block_sizes']} tokens, {size}"

    return _per_engine(engines, sizes)


def _per_engine(engines: Sequence[Replica], describe: Callable[[Replica], str]) -> str:
    """Describe each engine, or all together if the descriptions are equal."""
    each = [describe(engine) for engine in engines]
    if len(engines) == 1:
        return each[0]
    roles = Counter(engine.role for engine in engines)
    if "unified" in roles:
        kinds = f"{len(engines)} engines"
    else:
        kinds = f"{roles['prefill']} prefill and {roles['decode']} decode engines"
    if len(set(each)) == 1:
        return f"{kinds}, each with {each[0]}"
    described = zip(engines, each, strict=True)
    return f"{kinds}: " + "; ".join(f"engine {e.number} has {text}" for e, text in described)


def _bytes(num_blocks: int, block_bytes: Sequence[int]) -> str:
    """block_bytes: of each worker. Stages with different numbers of layers differ."""
    if len(set(block_bytes)) > 1:
        each = " + ".join(f"{size:,}" for size in block_bytes)
        return f"{num_blocks:,} x ({each}) = {num_blocks * sum(block_bytes):,} bytes, per worker"
    size = block_bytes[0]
    where = f" on each of {len(block_bytes)} workers" if len(block_bytes) > 1 else ""
    return f"{num_blocks:,} x {size:,} = {num_blocks * size:,} bytes{where}"
