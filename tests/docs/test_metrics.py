"""docs/metrics.md lists what `/metrics` returns."""

from pathlib import Path
from random import Random

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from longshore.deploy.gateway.engines.split_metrics import SplitMetrics
from longshore.deploy.gateway.engines.split_requests import SplitRequests
from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.policies import PrefixAware, RoutedPrompt
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.gateway.router.routing_metrics import RoutingMetrics
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.gateway.vllm_metrics import ALWAYS, NAMES, PREFIX
from longshore.deploy.supervisor.restart_history import RestartRecord
from longshore.protocol.commands import Role
from longshore.protocol.handshake import EngineReady
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from tests.deploy.gateway.fake_engine import CAPACITY, IDENTITY, STATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def routing() -> RoutingMetrics:
    index = BlockIndex(1, tokens_per_hash=16, max_hashes=1)
    router = Router(1, PrefixAware(index, BlockHasher(16, b"")))
    router.choose(RoutedPrompt(()), [0], [True], 0.0)
    return RoutingMetrics(router, index, {0: EventFollower(index, 0, lambda request: None)})


def split() -> SplitMetrics:
    roles: tuple[Role, ...] = ("prefill", "decode")
    return SplitMetrics(
        SplitRequests(
            SplitSettings(),
            {},
            Router(2, roles=roles),
            Random(),
            num_gateways=1,
            usable=list,
            now=lambda: 0.0,
        )
    )


def rows() -> set[str]:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", STATS)
    metrics.responses.labels("/v1/models", "200").inc()
    metrics.keys.counts("a")
    metrics.watch(routing())
    metrics.watch(split())
    metrics.watch_restarts(lambda: RestartRecord({"worker 0": {"death": 1}}))
    metrics.engine_ready("0", EngineReady("engine-0.1", IDENTITY, 100, CAPACITY))
    rows, ending = set(), {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name in {PREFIX + name for name in ALWAYS}:
            continue  # listed beside ours
        ending[family.name] = "_total" if family.type == "counter" else ""
        if family.name.endswith("_created"):
            continue  # the gateway process disables them
        name = f"{family.name}{ending[family.name]}"
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        by = f" by {', '.join(f'`{label}`' for label in labels)}" if labels else ""
        rows.add(f"| `{name}`<br>{family.type}{by} | {family.documentation} |")
    for theirs, ours in NAMES.items():
        rows.add(f"- `{PREFIX}{theirs}{ending[ours]}`: `{ours}{ending[ours]}`")
    return rows


def test_the_page_lists_every_metric_as_it_describes_itself() -> None:
    listed = {line for line in PAGE.read_text().splitlines() if line.startswith(("| `", "- `"))}
    expected = rows()
    assert sorted(expected - listed) == [], "not in docs/metrics.md"
    assert sorted(listed - expected) == [], "in docs/metrics.md only"


def test_every_statistic_of_an_engine_has_a_value_here() -> None:
    """Otherwise its labels would not be checked above."""
    assert STATS.workers
    assert all(value is not None for value in msgspec.structs.asdict(STATS).values())
