"""`longshore top`: rates and quantiles of what happened between two looks."""

import io

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from longshore.deploy.gateway.metrics import GatewayMetrics
from longshore.deploy.top import RATES, TIMES, Sample, Window, read_metrics, screen
from tests.deploy.gateway.fake_engine import STATS


def two_looks(*, seconds: float, before: dict[str, int], after: dict[str, int]) -> Window:
    registry = CollectorRegistry()
    counters = {n: Counter(n, "x", ["kind"], registry=registry) for n in sorted({*before, *after})}
    samples = []
    for taken_s, values in ((100.0, before), (100.0 + seconds, after)):
        for name, value in values.items():
            child = counters[name].labels("one")
            child.inc(value - child._value.get())
        samples.append(read_metrics(generate_latest(registry).decode(), taken_s))
    return Window(samples[1], samples[0])


def test_a_rate_is_what_was_added_per_second_over_all_labels() -> None:
    window = two_looks(seconds=2.0, before={"a": 10}, after={"a": 25})
    assert window.rate("a_total") == 7.5
    assert window.rate("unknown_total") == 0
    assert Window(window.now).rate("a_total") == 0  # one look says nothing of a rate


def test_a_count_that_fell_is_that_of_a_process_that_began_again() -> None:
    assert Window(Sample(2.0, {"a": 3.0}, {}), Sample(1.0, {"a": 50.0}, {})).rate("a") == 3.0


def test_a_share_of_nothing_is_none() -> None:
    window = two_looks(seconds=1, before={"hit": 5, "all": 9}, after={"hit": 8, "all": 13})
    assert window.share("hit_total", "all_total") == 0.75
    assert Window(window.now, window.now).share("hit_total", "all_total") is None


@pytest.mark.parametrize(("q", "bound"), [(0.5, 1.0), (0.75, 1.0), (0.76, 5.0), (1.0, 5.0)])
def test_quantiles_are_of_the_observations_between_the_looks(q: float, bound: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "x", buckets=(0.1, 1, 5), registry=registry)
    for _ in range(100):
        histogram.observe(0.05)  # long ago
    before = read_metrics(generate_latest(registry).decode(), 0.0)
    for value in (0.5, 0.6, 0.7, 4.0):
        histogram.observe(value)
    window = Window(read_metrics(generate_latest(registry).decode(), 1.0), before)
    assert window.quantile("t_seconds", q) == bound
    assert Window(window.now, window.now).quantile("t_seconds", q) is None


def test_quantiles_of_a_server_that_began_again_are_its_own() -> None:
    before = Sample(1.0, {"x": 1.0}, {"t": {1.0: 50.0, 5.0: 90.0, float("inf"): 90.0}})
    now = Sample(2.0, {"x": 1.0}, {"t": {1.0: 0.0, 5.0: 4.0, float("inf"): 4.0}})
    assert Window(now, before).quantile("t", 0.5) == 5.0


def test_every_metric_that_is_shown_exists() -> None:
    metrics = GatewayMetrics()
    metrics.observe_scheduler("0", STATS)
    sample = read_metrics(metrics.render().decode(), 1.0)
    assert {metric for _, metric in RATES} <= sample.values.keys()
    assert {metric for _, metric in TIMES} <= sample.buckets.keys()
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(screen(Window(sample), "http://host"))
    shown = console.export_text()
    for part in ("http://host", "running", "3", "75 free", "25.0%"):
        assert part in shown


def test_several_engines_are_shown_together_and_shares_as_their_mean() -> None:
    metrics = GatewayMetrics()
    for engine, usage in (("0", 0.2), ("1", 0.6)):
        stats = msgspec.structs.replace(STATS, kv_usage=usage)
        metrics.observe_scheduler(engine, stats)
    sample = read_metrics(metrics.render().decode(), 1.0)
    assert sample["longshore_scheduler_blocks"] == 200
    assert sample["longshore_scheduler_kv_usage_ratio"] == pytest.approx(0.4)
    assert sample["longshore_scheduler_steps_in_flight"] == 2.0
