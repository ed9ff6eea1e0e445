"""Samples of `/metrics`, and rates, shares and quantiles between two of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Labels: TypeAlias = frozenset[tuple[str, str]]
NO_LABELS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True)
class Sample:
    """All series at one time.

    taken_s: time of the sample, from `perf_counter`.
    series:  values by name, then by labels.
    """

    taken_s: float
    series: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """Sum of all series with these labels; 0 if there is none."""
        wanted = labels.items()
        series = self.series.get(name, {})
        return sum(value for found, value in series.items() if wanted <= found)

    def buckets(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> dict[float, float]:
        """Cumulative bucket counts of a histogram by upper bound, summed over all such series."""
        counts: dict[float, float] = {}
        for found, value in self.series.get(f"{name}_bucket", {}).items():
            if labels.items() <= found:
                bound = float(dict(found)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return counts

    def label_values(self, name: str, *labels: str) -> list[tuple[str, ...]]:
        """The distinct values of these labels among the series of this name, sorted."""
        series = [dict(found) for found in self.series.get(name, {})]
        return sorted({tuple(found.get(label, "") for label in labels) for found in series})


@dataclass(frozen=True)
class Window:
    """The latest sample, and an earlier one to compare with."""

    now: Sample
    before: Sample = field(default_factory=lambda: Sample(0.0, {}))

    @property
    def elapsed_s(self) -> float | None:
        """Seconds between the samples, None without an earlier sample."""
        return self.now.taken_s - self.before.taken_s if self.before.series else None

    def added(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """Increase of a counter. A lower value than before comes from a restarted process."""
        now = self.now.total(name, labels)
        difference = now - self.before.total(name, labels)
        return difference if difference >= 0 else now

    def rate(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Increase per second; None without an earlier sample."""
        return self.added(name, labels) / self.elapsed_s if self.elapsed_s else None

    def share(self, part: str, whole: str, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Increase of `part` over that of `whole`; None if `whole` did not increase."""
        total = self.added(whole, labels)
        return self.added(part, labels) / total if total else None

    def quantile(self, name: str, q: float, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Quantile of a histogram's observations in the window: the upper bound of its bucket, or
        the largest finite bound. None without observations."""
        earlier, now = self.before.buckets(name, labels), self.now.buckets(name, labels)
        if any(count < earlier.get(bound, 0.0) for bound, count in now.items()):
            earlier = {}  # the process was restarted in between
        counts = {bound: count - earlier.get(bound, 0.0) for bound, count in now.items()}
        total = max(counts.values(), default=0.0)
        if total <= 0:
            return None
        bound = min(bound for bound, count in counts.items() if count >= q * total)
        return min(bound, max((each for each in counts if each < float("inf")), default=bound))


def read_metrics(text: str, taken_s: float) -> Sample:
    """Parse Prometheus' text format. Raises ValueError for anything else."""
    return sample_of(text_string_to_metric_families(text), taken_s)


def sample_of(families: Iterable[Metric], taken_s: float) -> Sample:
    """The sample of these metrics; equal series, of several models, are added up."""
    series: dict[str, dict[Labels, float]] = {}
    for family in families:
        for sample in family.samples:
            of_name = series.setdefault(sample.name, {})
            labels = frozenset(sample.labels.items())
            of_name[labels] = of_name.get(labels, 0.0) + sample.value
    return Sample(taken_s, series)
