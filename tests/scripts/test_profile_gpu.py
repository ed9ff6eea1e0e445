"""scripts/profile_gpu: the gaps and kernels of a trace, and a profile of the CPU."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.trace import (
    Gap,
    Span,
    TimeOf,
    busy_us,
    by_kernel,
    by_neighbours,
    device_spans,
    idle_gaps,
    read_events,
    step_spans,
)
from tests.conftest import ROOT


def event(category: str, name: str, start_us: float, duration_us: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us}


EVENTS = [
    event("user_annotation", "step 4", 0, 20),
    event("user_annotation", "step 5", 20, 20),
    event("cpu_op", "aten::mm", 1, 5),
    event("gpu_user_annotation", "step 4", 100, 40),
    event("gpu_user_annotation", "step 5", 150, 30),
    event("gpu_user_annotation", "another range", 0, 500),
    event("kernel", "matmul", 100, 10),
    event("kernel", "norm", 112, 4),
    event("gpu_memcpy", "Memcpy HtoD", 113, 20),  # on another stream
    event("kernel", "matmul", 134, 6),
    event("kernel", "norm", 150, 10),
    event("kernel", "matmul", 160, 20),
    {"ph": "M", "name": "process_name"},
]
STEPS = [Span(100, 140, "step 4"), Span(150, 180, "step 5")]


def test_the_device_is_idle_when_no_stream_has_work() -> None:
    assert step_spans(EVENTS) == STEPS
    assert idle_gaps(device_spans(EVENTS), STEPS) == [
        Gap(110, 2, "matmul", "norm", ("step 4", "step 4")),
        Gap(133, 1, "Memcpy HtoD", "matmul", ("step 4", "step 4")),
        Gap(140, 10, "matmul", "norm", ("step 4", "step 5")),
    ]
    assert [gap.is_between_steps for gap in idle_gaps(device_spans(EVENTS), STEPS)] == [
        False,
        False,
        True,
    ]
    assert busy_us(device_spans(EVENTS)) == 80 - 13


def test_a_kernel_within_another_leaves_no_gap() -> None:
    spans = [Span(0, 100, "long"), Span(10, 20, "short"), Span(90, 130, "next")]
    assert idle_gaps(spans, ()) == []
    assert busy_us(spans) == 130
    assert busy_us([]) == 0


def test_a_gap_outside_of_steps_has_none() -> None:
    spans = [Span(0, 1, "a"), Span(120, 130, "b")]
    (gap,) = idle_gaps(spans, STEPS)
    assert gap.steps == (None, "step 4")


def test_gaps_and_kernels_are_added_up_by_name() -> None:
    spans = device_spans(EVENTS)
    assert by_kernel(spans) == [
        TimeOf("matmul", 3, 36, 20),
        TimeOf("Memcpy HtoD", 1, 20, 20),
        TimeOf("norm", 2, 14, 10),
    ]
    assert by_neighbours(idle_gaps(spans, STEPS))[0] == TimeOf("matmul -> norm", 2, 12, 10)


def test_a_trace_without_a_gpu_has_the_operators_of_steps() -> None:
    events = [
        event("user_annotation", "step 4", 0, 20),
        event("cpu_op", "aten::mm", 1, 5),
        event("cpu_op", "aten::add", 50, 5),
    ]
    assert device_spans(events) == [Span(1, 6, "aten::mm")]


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert read_events(path) == EVENTS


def test_a_dry_run_writes_a_trace_with_a_range_per_step(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    sizes = ("--batch", "2", "--context", "20", "--tokens", "24", "--steps", "3")
    command = [sys.executable, "scripts/profile_gpu", "mixed", *sizes, "--dry-run"]
    done = subprocess.run(
        [*command, "--trace", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(path)
    numbers = [int(step.name.split()[1]) for step in step_spans(events)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert len(numbers) >= 3
    attention = [s for s in device_spans(events) if s.name == "aten::scaled_dot_product_attention"]
    assert len(attention) >= 3 * 2  # of two layers
    for title in ("idle between steps", "idle within steps", "kernels", "longest gaps"):
        assert f"\n{title}" in done.stdout
    assert "3 steps of" in done.stdout
