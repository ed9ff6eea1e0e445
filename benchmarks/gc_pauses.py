"""Python's garbage collector in a scheduler under a mixed load: number and duration of collections.

    python benchmarks/gc_pauses.py [--running 64] [--steps 100000] [--json F]

In each step a tenth of the requests ends and as many arrive (`churn` of `peers/workload.py`). As in
the scheduler process, messages are decoded from frames, and all objects that exist before the first
step are frozen. A full collection (generation 2) visits all live objects, so there should be none.
If there was one, `alive` in the JSON counts the types of objects that the first one visited.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import report
from peers import workload
from scheduler_step import Load

from longshore.protocol.handshake import FromWorker, ToEngine
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.transport.codec import Decoder, Encoder

NUM_DIFFERENT = 20_000  # requests, reused under the same ids


class DecodingLoad(Load):
    """A load whose messages are decoded from frames, as in the scheduler process."""

    def __init__(self, work: workload.Workload, *, mode: str) -> None:
        self._answers: tuple[Encoder[FromWorker], Decoder[FromWorker]]
        self._answers = Encoder(), Decoder(FromWorker)
        super().__init__(work, mode=mode)

    def _later(self, messages: list[AddRequest]) -> Iterator[AddRequest]:
        encoder: Encoder[ToEngine] = Encoder()
        decoder: Decoder[AddRequest] = Decoder(ToEngine)
        frames = [list(map(bytes, encoder.encode(message))) for message in messages]
        return map(decoder.decode, cycle(frames))

    def _answer(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        encoder, decoder = self._answers
        answer = decoder.decode(encoder.encode(super()._answer(plan)))
        assert isinstance(answer, ModelRunnerOutput)
        return answer


class Watch:
    """A callback of the collector that counts and times collections, by generation."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]
        self.total_us = [0.0, 0.0, 0.0]
        self.longest_us = [0.0, 0.0, 0.0]
        self.alive: Counter[str] = Counter()
        self._started = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        generation = info["generation"]
        if phase == "start":
            if generation == 2 and not self.alive:
                self.alive.update(type(thing).__qualname__ for thing in gc.get_objects())
            self._started = time.perf_counter_ns()
            return
        elapsed_us = (time.perf_counter_ns() - self._started) / 1e3
        self.counts[generation] += 1
        self.total_us[generation] += elapsed_us
        self.longest_us[generation] = max(self.longest_us[generation], elapsed_us)


def measure(running: int, mode: str, num_steps: int) -> dict[str, Any]:
    """One row."""
    num_different_steps = max(NUM_DIFFERENT * 10 // running, 1)
    load = DecodingLoad(workload.make("churn", running, num_different_steps), mode=mode)
    load.step()
    gc.collect()
    gc.freeze()
    watch = Watch()
    gc.callbacks.append(watch)
    started = time.perf_counter()
    for _ in range(num_steps):
        load.step()
        load.forget_samples()
    elapsed_s = time.perf_counter() - started
    gc.callbacks.remove(watch)
    gc.unfreeze()
    row: dict[str, Any] = {"running": running, "mode": mode, "steps": num_steps}
    for generation in range(3):
        row[f"gen{generation}"] = {
            "collections": watch.counts[generation],
            "longest_us": watch.longest_us[generation],
        }
    row["share_of_time"] = sum(watch.total_us) / 1e6 / elapsed_s
    row["alive"] = [list(item) for item in watch.alive.most_common(15)]
    return row


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--running", type=int, nargs="+", default=[64])
    arguments.add_argument("--steps", type=int, default=100_000)
    options = arguments.parse_args()
    rows = [
        measure(running, mode, options.steps)
        for running in options.running
        for mode in ("sync", "async")
    ]
    report.write(options.json, rows)
    for row in rows:
        if row["alive"]:
            print(f"{row['mode']}: alive at the first full collection:", row["alive"])


if __name__ == "__main__":
    main()
