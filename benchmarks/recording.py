"""Cost of the flight recorder per step of the scheduler, with 256 running requests.

    python benchmarks/recording.py [--running 256] [--turns 30] [--steps 256] [--json F]

Two schedulers with the same requests take turns, one of which records (`serve --record`). A step
adds requests, plans, encodes the plan, applies the output and encodes the outputs, as in
`scheduler_step.py`. `steady`: all requests decode. `churn`: every request ends after 10 tokens. The
time of a step on a device is not part of it.

All times are CPU times. `thread`: that of the scheduler's thread; `process`: with the thread that
writes the record. Of each, the shortest turn and the median of all turns; a ratio of medians is the
median of the ratios of two turns in a row. `pause_ms`: with 1,000 waiting requests in addition, how
long the scheduler stops when a file with a snapshot begins: median and maximum of 20.
"""

import gc
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
import scheduler_step
from peers import workload
from scheduler_step import Load

from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.recorder.recorder import RecordedScheduler, Recorder
from longshore.scheduler.scheduler import Scheduler

RECORD_BYTES = 256 << 20
WARM_UP = 64
NUM_WAITING = 1000
NUM_PAUSES = 20


def load_of(work: str, running: int, num_steps: int, recorder: Recorder | None) -> Load:
    """A scheduler with its requests, recorded or not."""
    kind = Scheduler if recorder is None else partial(RecordedScheduler, recorder=recorder)
    scheduler_step.Scheduler = kind  # type: ignore[misc, assignment]
    load = Load(workload.make(work, running, num_steps + WARM_UP), mode="async")
    for _ in range(WARM_UP):
        load.step()
    return load


def measure(work: str, running: int, turns: int, steps: int) -> dict[str, Any]:
    """Microseconds per step of both schedulers, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record", RECORD_BYTES)
        loads = [load_of(work, running, turns * steps, each) for each in (None, recorder)]
        times: list[list[tuple[int, int]]] = [[], []]
        gc.collect()
        gc.freeze()
        for _ in range(turns):
            for load, samples in zip(loads, times, strict=True):
                load.forget_samples()
                thread, process = time.thread_time_ns(), time.process_time_ns()
                for _ in range(steps):
                    load.step()
                samples.append((time.thread_time_ns() - thread, time.process_time_ns() - process))
        gc.unfreeze()
        recorder.close()
        size_bytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    row: dict[str, Any] = {"work": work, "running": running}
    plain, recorded = (np.array(samples) / steps / 1e3 for samples in times)
    for index, kind in enumerate(("thread", "process")):
        least, least_recorded = plain[:, index].min(), recorded[:, index].min()
        row |= {
            f"{kind}_us": float(least),
            f"recorded_{kind}_us": float(least_recorded),
            f"{kind}_ratio": float(least_recorded / least),
            f"median_{kind}_ratio": float(np.median(recorded[:, index] / plain[:, index])),
        }
    return row | {"bytes_per_step": size_bytes / (turns * steps)}


def measure_pause(running: int) -> dict[str, Any]:
    """How long the scheduler stops for a snapshot."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "record", RECORD_BYTES)
        load = load_of("steady", running, NUM_PAUSES + 64, recorder)
        sampling = SamplingParams(max_tokens=100)
        for number in range(NUM_WAITING):
            prompt = np.arange(500, dtype=np.int32)
            message = AddRequest(f"waiting-{number}", 1_000_000 + number, prompt, sampling)
            load.scheduler.add_request(message, client=0, now=0.0)
        pauses_ms = []
        for _ in range(NUM_PAUSES):
            load.step()
            started = time.perf_counter()
            recorder.begin_file()
            pauses_ms.append((time.perf_counter() - started) * 1e3)
            recorder.flush(waits=True)
        recorder.close()
    return {"pause_ms": float(np.median(pauses_ms)), "longest_pause_ms": max(pauses_ms)}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    works = ("steady", "churn")
    rows = [measure(work, options.running, options.turns, options.steps) for work in works]
    report.write(options.json, [*rows, measure_pause(options.running)])


if __name__ == "__main__":
    main()
