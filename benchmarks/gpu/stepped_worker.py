"""A worker driven by plans that are made in advance, so that no scheduler limits it. Rows begin
anywhere in their context, over KV at random, so that long contexts cost no time."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from torch.profiler import record_function

from longshore.connectors.base import QueueEvent
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.outputs import ModelRunnerOutput, WorkerReport
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache.buffer import KVCache, KVMemory
from longshore.worker.process.device import open_device
from longshore.worker.queues.compute_queue import Completion, ComputeQueue, open_compute_queue
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner

BLOCK_SIZE: Final = 16
NUM_IN_FLIGHT: Final = 2
NUM_WARM_UP: Final = 3
TIMEOUT_S: Final = 120.0


class Steps(NamedTuple):
    """Times of the steps after the first ones.

    step_s:    mean from the end of a step to the end of the next.
    compute_s: median time on the device.
    gaps_s:    idle time of the device before each step that was planned in time.
    num_steps: measured steps.
    """

    step_s: float
    compute_s: float
    gaps_s: list[float]
    num_steps: int


class NamedQueue:
    """A compute queue whose steps are ranges in a profile, `step 17`."""

    def __init__(self, queue: ComputeQueue) -> None:
        self._queue = queue

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        def named() -> None:
            with record_function(f"step {step_id}"):
                operation()

        return self._queue.submit(named, on_done, step_id=step_id)

    def computed(self) -> QueueEvent:
        return self._queue.computed()

    def close(self) -> None:
        self._queue.close()


class _RandomlyFilled(Worker):
    """Its KV cache holds random numbers: a GPU may compute faster with zeros."""

    def make_cache(self, config: KVCacheConfig, memory: KVMemory | None = None) -> KVCache:
        cache = super().make_cache(config, memory)
        for group in range(len(config.groups)):
            cache.view(group).planes.normal_()
        return cache


class SteppedWorker:
    """Rows of greedy requests. It is a context manager.

    settings: fields of WorkerConfig.
    """

    def __init__(self, model: Path, device: str, **settings: Any) -> None:
        config = WorkerConfig(
            model=str(model),
            device=device,
            load_format="dummy",
            block_size=BLOCK_SIZE,
            show_progress=False,
            **settings,
        )
        self._worker = _RandomlyFilled(config)
        queue = NamedQueue(open_compute_queue(open_device(device)))
        self._runner = self._worker.start(queue=queue)
        self.num_blocks = self._worker.kv_cache.num_blocks
        self.max_rows = config.max_num_seqs
        self._planner = Planner(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._worker.max_model_len,
        )
        self._rows: list[int] = []

    def fitting_rows(self, context: int, num_steps: int) -> int:
        """How many rows of this context can decode for so many steps, and for the first ones."""
        per_row = -(-(context + num_steps + NUM_WARM_UP + 1) // BLOCK_SIZE)
        return min(self.max_rows, (self.num_blocks - 1) // per_row)

    def decode(self, num_rows: int, context: int, num_steps: int) -> Steps:
        """Steps in which each of `num_rows` rows computes one token after `context - 1` others."""
        finished = self._rows
        self._rows = list(range(num_rows))
        plans = [self._planner.plan(finished=finished)] if finished else []
        plans.append(self._start(self._rows, context))
        first = len(plans) + NUM_WARM_UP
        plans += [self._planner.plan() for _ in range(NUM_WARM_UP + num_steps)]
        return self._run(plans, first, num_sampled=num_rows)

    def prefill(self, num_tokens: int, num_before: int, num_steps: int) -> Steps:
        """Steps that each compute a new prompt of `num_tokens` after `num_before` cached ones."""
        return self.mixed(0, 1, num_tokens, num_before, num_steps)

    def mixed(
        self, num_decodes: int, context: int, num_tokens: int, num_before: int, num_steps: int
    ) -> Steps:
        """Do the same beside rows that decode."""
        finished, plans = self._rows, []
        self._rows = list(range(num_decodes))
        if finished:
            plans.append(self._planner.plan(finished=finished))
        if num_decodes:
            plans.append(self._start(self._rows, context))
        first, row = len(plans) + NUM_WARM_UP, num_decodes
        for step in range(NUM_WARM_UP + num_steps):
            entry = self._entry(row, num_before, num_tokens)
            ended = [row] if step else []
            plans.append(self._planner.plan({row: num_tokens}, added=[entry], finished=ended))
        self._rows.append(row)
        return self._run(plans, first, num_sampled=num_decodes + 1)

    def _start(self, rows: Sequence[int], context: int) -> SchedulerOutput:
        """Each computes its last prompt token."""
        added = [self._entry(row, context - 1, 1) for row in rows]
        return self._planner.plan(dict.fromkeys(rows, 1), added=added)

    def _entry(self, row: int, num_computed: int, num_new: int) -> Entry:
        """A row with `num_computed` cached tokens, the rest of whose prompt is `num_new` tokens."""
        blocks = [self._planner.free.pop() for _ in range(-(-num_computed // BLOCK_SIZE))]
        prompt = [3 + (row + index) % 100 for index in range(num_computed + num_new)]
        return Entry(row, prompt, blocks=blocks, num_computed_tokens=num_computed)

    def _run(self, plans: Sequence[SchedulerOutput], first: int, *, num_sampled: int) -> Steps:
        """Execute the plans, two at a time. first: index of the first that is measured; from it on,
        each step samples `num_sampled` tokens."""
        ended_s: list[float] = []
        outputs: list[ModelRunnerOutput] = []
        failures: list[WorkerReport] = []
        in_flight = threading.Semaphore(NUM_IN_FLIGHT)

        def report(output: WorkerReport) -> None:
            ended_s.append(time.perf_counter())
            if isinstance(output, ModelRunnerOutput):
                outputs.append(output)
            else:
                failures.append(output)
            in_flight.release()

        for plan in plans:
            if not in_flight.acquire(timeout=TIMEOUT_S) or failures:
                break
            completion = self._runner.submit(plan, report)
        assert completion is not None
        assert completion.wait(TIMEOUT_S), "a step does not end"
        if failures:
            raise RuntimeError(f"a step failed: {failures[0]}")
        measured = outputs[first:]
        assert {len(output.sampled_tokens) for output in measured} == {num_sampled}
        return Steps(
            step_s=(ended_s[-1] - ended_s[first - 1]) / len(measured),
            compute_s=median(output.compute_s for output in measured),
            gaps_s=[output.gap_s for output in measured if output.gap_s is not None],
            num_steps=len(measured),
        )

    def close(self) -> None:
        self._worker.close()

    def __enter__(self) -> "SteppedWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
