"""What one step costs the scheduler in a steady decode, by the number of running requests.

    python benchmarks/scheduler_step.py [--running 64 256 1024 4096] [--json F]

A step is: plan, encode the plan, apply the answer to it, encode the message to the gateway. Prompts
of 512 tokens and a few more, staggered so that block borders are crossed evenly; prefix caching on,
blocks named with sha256. `async` keeps two plans unanswered, `sync` one.
"""

import gc
import time
from collections import deque
from typing import Any

import numpy as np
import report

from longshore.protocol.client import AddRequest
from longshore.protocol.codec import Encoder
from longshore.protocol.handshake import ToClient, ToWorker
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.results import ModelRunnerOutput
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 4096


class Load:
    """A scheduler with `num_running` requests, all past their prompts."""

    def __init__(self, num_running: int, *, steps_in_flight: int) -> None:
        self._steps_in_flight = steps_in_flight
        blocks_per_request = MAX_MODEL_LEN // BLOCK_SIZE
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype_bytes=2)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=num_running,
                max_num_batched_tokens=num_running * 1024,
                max_steps_in_flight=steps_in_flight,
            ),
            CacheConfig(block_size=BLOCK_SIZE),
            kv_cache=KVCacheConfig(
                num_running * blocks_per_request + 1, (KVCacheGroup(("layer",), spec),), "bfloat16"
            ),
            hash_seed=b"benchmark",
            vocab_size=VOCAB_SIZE,
        )
        self._plans: Encoder[ToWorker] = Encoder()
        self._messages: Encoder[ToClient] = Encoder()
        self._unanswered: deque[SchedulerOutput] = deque()
        self._tokens = np.full(num_running, 7, np.int32)
        self.plan_bytes = 0
        rng = np.random.default_rng(0)
        for index in range(num_running):
            prompt = rng.integers(0, VOCAB_SIZE, 512 + index % 32).astype(np.int32)
            sampling = SamplingParams(max_tokens=None, ignore_eos=True)
            request = AddRequest(f"request-{index}", index, prompt, sampling)
            self.scheduler.add_request(request, client=0, now=0.0)

    def step(self) -> None:
        """Plan until enough is in flight, then answer the oldest plan."""
        while (plan := self.scheduler.schedule(0.0)) is not None:
            self.plan_bytes = sum(map(len, self._plans.encode(plan)))
            self._unanswered.append(plan)
        oldest = self._unanswered.popleft()
        output = ModelRunnerOutput(
            epoch=1, step=oldest.step, sampled_tokens=self._tokens[: oldest.num_rows]
        )
        self.scheduler.update_from_output(output, 0.0)
        for _, message in self.scheduler.take_outputs():
            self._messages.encode(message)


def measure(num_running: int, *, steps_in_flight: int, num_steps: int) -> dict[str, Any]:
    """One row of the result."""
    load = Load(num_running, steps_in_flight=steps_in_flight)
    for _ in range(100):
        load.step()
    gc.collect()
    gc.freeze()
    times_us, plan_bytes = [], []
    for _ in range(num_steps):
        started = time.perf_counter_ns()
        load.step()
        times_us.append((time.perf_counter_ns() - started) / 1e3)
        plan_bytes.append(load.plan_bytes)
    gc.unfreeze()
    return {
        "running": num_running,
        "mode": "async" if steps_in_flight == 2 else "sync",
        "step_us": float(np.median(times_us)),
        "mean_us": float(np.mean(times_us)),
        "p99_us": float(np.percentile(times_us, 99)),
        "plan_bytes": float(np.mean(plan_bytes)),
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024, 4096])
    arguments.add_argument("--steps", type=int, default=1000)
    options = arguments.parse_args()
    rows = [
        measure(num_running, steps_in_flight=steps_in_flight, num_steps=options.steps)
        for num_running in options.running
        for steps_in_flight in (1, 2)
    ]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
