"""Differences between two samples of `/metrics`."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from longshore.deploy.gateway.metric_samples import (
    Sample,
    Window,
    read_metrics,
)


def look(registry: CollectorRegistry, taken_s: float) -> Sample:
    return read_metrics(generate_latest(registry).decode(), taken_s)


def two_looks(*, seconds: float, before: dict[str, int], after: dict[str, int]) -> Window:
    registry = CollectorRegistry()
    counters = {n: Counter(n, "x", ["kind"], registry=registry) for n in sorted({*before, *after})}
    samples = []
    for taken_s, values in ((100.0, before), (100.0 + seconds, after)):
        for name, value in values.items():
            child = counters[name].labels("one")
            child.inc(value - child._value.get())
        samples.append(look(registry, taken_s))
    return Window(samples[1], samples[0])


def test_a_rate_is_what_was_added_per_second_over_all_labels() -> None:
    window = two_looks(seconds=2.0, before={"a": 10}, after={"a": 25})
    assert window.rate("a_total") == 7.5
    assert window.rate("unknown_total") == 0
    assert Window(window.now).rate("a_total") is None  # one sample gives no rate


def test_a_count_that_fell_is_that_of_a_process_that_began_again() -> None:
    before, now = ({"a": {frozenset[tuple[str, str]](): value}} for value in (50.0, 3.0))
    assert Window(Sample(2.0, now), Sample(1.0, before)).rate("a") == 3.0


def test_a_share_of_nothing_is_none() -> None:
    window = two_looks(seconds=1, before={"hit": 5, "all": 9}, after={"hit": 8, "all": 13})
    assert window.share("hit_total", "all_total") == 0.75
    assert Window(window.now, window.now).share("hit_total", "all_total") is None


def test_series_are_told_apart_by_their_labels() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g", "x", ["engine", "worker"], registry=registry)
    histogram = Histogram("t_seconds", "x", ["engine"], buckets=(1, 5), registry=registry)
    for engine, worker, value in (("1", "0", 4), ("0", "0", 1), ("0", "1", 2)):
        gauge.labels(engine, worker).set(value)
        histogram.labels(engine).observe(value)
    sample = look(registry, 1.0)
    assert sample.total("g") == 7
    assert sample.total("g", {"engine": "0"}) == 3
    assert sample.total("g", {"engine": "0", "worker": "1"}) == 2
    assert sample.total("g", {"engine": "7"}) == 0
    assert sample.label_values("g", "engine", "worker") == [("0", "0"), ("0", "1"), ("1", "0")]
    assert sample.buckets("t_seconds", {"engine": "0"}) == {1: 1, 5: 2, float("inf"): 2}
    assert sample.buckets("t_seconds") == {1: 1, 5: 3, float("inf"): 3}


@pytest.mark.parametrize(("q", "bound"), [(0.5, 1.0), (0.75, 1.0), (0.76, 5.0), (1.0, 5.0)])
def test_quantiles_are_of_the_observations_between_the_looks(q: float, bound: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "x", buckets=(0.1, 1, 5), registry=registry)
    for _ in range(100):
        histogram.observe(0.05)  # long ago
    before = look(registry, 0.0)
    for value in (0.5, 0.6, 0.7, 4.0):
        histogram.observe(value)
    window = Window(look(registry, 1.0), before)
    assert window.quantile("t_seconds", q) == bound
    assert Window(window.now, window.now).quantile("t_seconds", q) is None


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    registry = CollectorRegistry()
    Histogram("t_seconds", "x", buckets=(0.1, 5), registry=registry).observe(99.0)
    assert Window(look(registry, 1.0)).quantile("t_seconds", 0.5) == 5.0


def test_quantiles_of_a_server_that_began_again_are_its_own() -> None:
    def sample(taken_s: float, counts: tuple[int, int]) -> Sample:
        registry = CollectorRegistry()
        histogram = Histogram("t_seconds", "x", buckets=(1, 5), registry=registry)
        for value, count in zip((0.5, 3.0), counts, strict=True):
            for _ in range(count):
                histogram.observe(value)
        return look(registry, taken_s)

    assert Window(sample(2.0, (0, 4)), sample(1.0, (50, 40))).quantile("t_seconds", 0.5) == 5.0


def test_what_is_no_metrics_is_rejected() -> None:
    with pytest.raises(ValueError, match="html"):
        read_metrics("<html>\n<body>it works</body>", 1.0)
