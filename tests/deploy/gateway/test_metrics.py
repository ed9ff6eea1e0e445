"""What Prometheus scrapes."""

import msgspec

from longshore.deploy.gateway.metrics import GatewayMetrics
from tests.deploy.gateway.fake_engine import STATS


def value(metrics: GatewayMetrics, name: str) -> float:
    lines = metrics.render().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name} "))
    return float(line.partition(" ")[2])


def test_scheduler_s_counters_go_on_over_a_restart_of_the_engine() -> None:
    metrics = GatewayMetrics()
    for num_steps in (7, 10, 2):
        metrics.observe_scheduler("0", msgspec.structs.replace(STATS, num_steps=num_steps))
    assert value(metrics, 'longshore_scheduler_steps_total{engine="0"}') == 12


def test_every_statistic_of_the_scheduler_is_shown() -> None:
    metrics = GatewayMetrics()
    distinct = {name: 1000 + i for i, name in enumerate(STATS.__struct_fields__)}
    metrics.observe_scheduler("0", msgspec.convert(distinct, type(STATS), strict=False))
    shown = {line.rpartition(" ")[2] for line in metrics.render().decode().splitlines()}
    assert {f"{float(number)}" for number in distinct.values()} <= shown
