"""Cost of the flight recorder per step of the scheduler, with 256 running requests.

    python benchmarks/recording.py [--running 256] [--turns 40] [--steps 100] [--json F]

Two schedulers with the same requests take turns, one of which records (`serve --record`). A step
adds requests, plans, encodes the plan, applies the output and encodes the outputs, as in
`scheduler_step.py`. `steady`: all requests decode. `churn`: every request ends after 10 tokens. The
time of a step on a device is not part of it.
"""

import gc
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
import scheduler_step
from peers import workload
from scheduler_step import Load

from longshore.scheduler.recorder.recorder import RecordedScheduler, Recorder
from longshore.scheduler.scheduler import Scheduler

RECORD_BYTES = 256 << 20
WARM_UP = 64


def load_of(work: str, running: int, num_steps: int, recorder: Recorder | None) -> Load:
    """A scheduler with its requests, recorded or not."""
    kind = Scheduler if recorder is None else partial(RecordedScheduler, recorder=recorder)
    scheduler_step.Scheduler = kind  # type: ignore[misc, assignment]
    load = Load(workload.make(work, running, num_steps + WARM_UP), mode="async")
    for _ in range(WARM_UP):
        load.step()
    return load


def measure(work: str, running: int, turns: int, steps: int) -> dict[str, Any]:
    """Microseconds of the steps of both schedulers, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record", RECORD_BYTES)
        loads = [load_of(work, running, turns * steps, each) for each in (None, recorder)]
        times: list[list[float]] = [[], []]
        gc.collect()
        gc.freeze()
        for _ in range(turns):
            for load, samples in zip(loads, times, strict=True):
                load.forget_samples()
                for _ in range(steps):
                    load.step()
                parts = (load.intake_us, load.plan_us, load.apply_us)
                samples += map(sum, zip(*parts, strict=True))
        gc.unfreeze()
        recorder.close()
        size_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    plain, recorded = (np.array(samples) for samples in times)
    return {
        "work": work,
        "running": running,
        "step_us": float(np.median(plain)),
        "recorded_step_us": float(np.median(recorded)),
        "p25_us": float(np.percentile(plain, 25)),
        "recorded_p25_us": float(np.percentile(recorded, 25)),
        "ratio": float(np.median(recorded) / np.median(plain)),
        "bytes_per_step": size_bytes / (turns * steps),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    works = ("steady", "churn")
    rows = [measure(work, options.running, options.turns, options.steps) for work in works]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
