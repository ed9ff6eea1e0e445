"""What a trace of torch's profiler says about the device: when it was idle, and which kernels took
its time. Works on the events of the trace's JSON; all times are in microseconds."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

Event: TypeAlias = Mapping[str, Any]

KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a GPU."""

HOST_OPERATORS: Final = ("cpu_op",)
"""The same on a CPU."""

STEP: Final = re.compile(r"step \d+")
"""Names of the ranges of our steps."""


class Span(NamedTuple):
    start_us: float
    end_us: float
    name: str


@dataclass(frozen=True)
class Gap:
    """The device was idle. before, after: names of what ran around the gap. steps: the steps of
    these two, which differ if the gap is between steps; None: of no step."""

    start_us: float
    duration_us: float
    before: str
    after: str
    steps: tuple[str | None, str | None]

    @property
    def is_between_steps(self) -> bool:
        return self.steps[0] != self.steps[1]


def profiled(activities: Sequence[ProfilerActivity]) -> profile:
    """A profiler of all threads: on a CPU, steps are computed on a thread of their own."""
    return profile(
        activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    )


class TimeOf(NamedTuple):
    """Calls of one kernel, or gaps of one kind."""

    name: str
    count: int
    total_us: float
    longest_us: float


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, which may be compressed."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def has_gpu(events: Iterable[Event]) -> bool:
    return any(event.get("cat") in KERNELS for event in events)


def device_spans(events: Iterable[Event]) -> list[Span]:
    """What ran on the device, in order of its start; of a trace without a GPU, what the host
    computed within steps."""
    events = list(events)
    spans = _spans(events, KERNELS)
    if spans:
        return spans
    steps = step_spans(events)
    return [span for span in _spans(events, HOST_OPERATORS) if _step_at(steps, span.start_us)]


def step_spans(events: Iterable[Event]) -> list[Span]:
    """The ranges of steps in order: on the GPU if the trace has one, else on the host."""
    events = list(events)
    for category in ("gpu_user_annotation", "user_annotation"):
        found = [span for span in _spans(events, (category,)) if STEP.fullmatch(span.name)]
        if found:
            return found
    return []


def idle_gaps(spans: Sequence[Span], steps: Sequence[Span]) -> list[Gap]:
    """Times at which nothing ran, of whatever stream, between the first and the last span.

    spans: by start; they may overlap and contain each other.
    """
    gaps = []
    busy_until: Span | None = None
    for span in spans:
        if busy_until is not None and span.start_us > busy_until.end_us:
            around = _step_at(steps, busy_until.start_us), _step_at(steps, span.start_us)
            duration_us = span.start_us - busy_until.end_us
            gaps.append(Gap(busy_until.end_us, duration_us, busy_until.name, span.name, around))
        if busy_until is None or span.end_us > busy_until.end_us:
            busy_until = span
    return gaps


def busy_us(spans: Sequence[Span]) -> float:
    """Return for how long anything ran."""
    if not spans:
        return 0.0
    whole_us = max(span.end_us for span in spans) - spans[0].start_us
    return whole_us - sum(gap.duration_us for gap in idle_gaps(spans, ()))


def by_kernel(spans: Iterable[Span]) -> list[TimeOf]:
    """The most time first."""
    return _totals((span.name, span.end_us - span.start_us) for span in spans)


def by_neighbours(gaps: Iterable[Gap]) -> list[TimeOf]:
    """Gaps between the same two kernels together; the most time first."""
    return _totals((f"{gap.before} -> {gap.after}", gap.duration_us) for gap in gaps)


def _totals(times: Iterable[tuple[str, float]]) -> list[TimeOf]:
    durations = defaultdict(list)
    for name, duration_us in times:
        durations[name].append(duration_us)
    totals = [TimeOf(name, len(all_), sum(all_), max(all_)) for name, all_ in durations.items()]
    return sorted(totals, key=lambda total: -total.total_us)


def _spans(events: Iterable[Event], categories: Sequence[str]) -> list[Span]:
    return sorted(
        Span(event["ts"], event["ts"] + event.get("dur", 0.0), event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in categories
    )


def _step_at(steps: Sequence[Span], time_us: float) -> str | None:
    """The last step that began before, if it had not ended."""
    return next(
        (step.name for step in reversed(steps) if step.start_us <= time_us <= step.end_us), None
    )
