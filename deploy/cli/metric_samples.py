"""What `/metrics` said at one time, and what has been added between two of those."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Labels: TypeAlias = frozenset[tuple[str, str]]
NO_LABELS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True)
class Sample:
    """One look.

    taken_s: on the clock of `perf_counter`.
    series:  by name, then by labels.
    """

    taken_s: float
    series: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """Over all series that have these labels; 0 if there is none."""
        wanted = labels.items()
        of_name = self.series.get(name, {})
        return sum(value for having, value in of_name.items() if wanted <= having)

    def buckets(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> dict[float, float]:
        """Of a histogram: observations of at most so much, by bound, over all such series."""
        counts: dict[float, float] = {}
        for having, value in self.series.get(f"{name}_bucket", {}).items():
            if labels.items() <= having:
                bound = float(dict(having)["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return counts

    def label_values(self, name: str, *labels: str) -> list[tuple[str, ...]]:
        """The values that series of this name have for these labels, in order."""
        found = [dict(having) for having in self.series.get(name, {})]
        return sorted({tuple(having.get(label, "") for label in labels) for having in found})


@dataclass(frozen=True)
class Window:
    """The last look, and an earlier one to compare with."""

    now: Sample
    before: Sample = field(default_factory=lambda: Sample(0.0, {}))

    @property
    def elapsed_s(self) -> float | None:
        """None if there is nothing to compare with."""
        return self.now.taken_s - self.before.taken_s if self.before.series else None

    def added(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float:
        """A smaller count is another process's, which began again."""
        now = self.now.total(name, labels)
        difference = now - self.before.total(name, labels)
        return difference if difference >= 0 else now

    def rate(self, name: str, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Per second; None if there is nothing to compare with."""
        return self.added(name, labels) / self.elapsed_s if self.elapsed_s else None

    def share(self, part: str, whole: str, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Of what was added; None if nothing was."""
        total = self.added(whole, labels)
        return self.added(part, labels) / total if total else None

    def quantile(self, name: str, q: float, labels: Mapping[str, str] = NO_LABELS) -> float | None:
        """Of what a histogram observed meanwhile: the upper bound of its bucket, or the greatest
        bound there is. None if it observed nothing."""
        earlier, now = self.before.buckets(name, labels), self.now.buckets(name, labels)
        if any(count < earlier.get(bound, 0.0) for bound, count in now.items()):
            earlier = {}  # another process's, which ended
        counts = {bound: count - earlier.get(bound, 0.0) for bound, count in now.items()}
        total = max(counts.values(), default=0.0)
        if total <= 0:
            return None
        bound = min(bound for bound, count in counts.items() if count >= q * total)
        return min(bound, max((each for each in counts if each < float("inf")), default=bound))


def read_metrics(text: str, taken_s: float) -> Sample:
    """text: in Prometheus' format. Raises ValueError for another."""
    series: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Sample(taken_s, series)
