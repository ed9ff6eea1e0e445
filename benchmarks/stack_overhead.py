"""What gateway and scheduler add to the time of forward passes, for one HTTP client and stream.

    python benchmarks/stack_overhead.py [--model DIR] [--requests 30] [--json F]

Bare: the same model runner in this process executes plans that were made beforehand, so that a
token costs only its forward pass and sampling. Stack: `longshore serve` in separate processes, over
HTTP with streaming. The two take turns, request by request, with the same prompts.
"""

import asyncio
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import report

from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from longshore.worker.config import WorkerConfig
from longshore.worker.worker import Worker

NUM_BLOCKS = 512
TIMEOUT_S = 120.0


def plans_for(
    prompts: list[list[int]], *, output_len: int, worker: Worker
) -> list[list[SchedulerOutput]]:
    """The plans of each prompt, one request after the other. They do not depend on the tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=worker.max_model_len, max_steps_in_flight=1),
        CacheConfig(enable_prefix_caching=False),
        kv_cache=worker.kv_cache,
        hash_seed=b"",
        vocab_size=worker.model_config.vocab_size,
    )
    made = []
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        request = AddRequest(str(index), index, int32_array(prompt), sampling)
        scheduler.add_request(request, client=0, now=0.0)
        plans = []
        while (plan := scheduler.schedule(0.0)) is not None:
            plans.append(plan)
            is_last = plan.num_scheduled_tokens == 0
            token = int32_array([] if is_last else [0])
            output = ModelRunnerOutput(epoch=1, step=plan.step, sampled_tokens=token)
            scheduler.update_from_output(output, 0.0)
        made.append(plans)
    return made


def run_bare(runner: Any, plans: list[SchedulerOutput]) -> tuple[float, float]:
    """(seconds to the first token, mean seconds per further token)."""
    times = []
    for plan in plans:
        started = time.perf_counter()
        runner.execute(plan)
        times.append(time.perf_counter() - started)
    return times[0], statistics.fmean(times[1:-1])  # the last plan only drops the row


async def run_stack(
    endpoint: HttpEndpoint, model: str, prompt: list[int], output_len: int
) -> tuple[float, float]:
    """Measure the same as a client sees it. Tokens that arrive together are counted separately."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,  # an event per token, even for a model without a tokenizer
    }
    answer = await endpoint.request(
        "POST", "/v1/completions", json.dumps(body).encode(), timeout_s=TIMEOUT_S
    )
    assert answer.status == 200, answer.body
    arrivals = [at for at, data in answer.events if data != b"[DONE]"]
    first, last = arrivals[0], arrivals[-1]
    return first - answer.sent_s, (last - first) / (output_len - 1)


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[str]:
    """Run a server on a free port, on the CPU; yields its address."""
    command = [sys.executable, "-m", "longshore.deploy", "serve", str(model), "--port", "0"]
    command += ["--device", "cpu", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = None
        while found is None and (line := process.stdout.readline()):
            found = re.search(r"ready at (\S+)", line)
        assert found is not None, "the server did not start; its log is above"
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def measure(options: Any, url: str, worker: Worker, runner: Any) -> list[dict[str, Any]]:
    """One row per quantity: bare, stack and their difference at the median of the requests."""
    prompts = random_prompts(
        options.requests + 2,
        input_len=options.input_len,
        shared_prefix=0,
        vocab_size=worker.model_config.vocab_size,
        generator=np.random.default_rng(0),
    )
    plans = plans_for(prompts, output_len=options.output_len, worker=worker)
    endpoint = HttpEndpoint(url)
    name = Path(options.model).resolve().name
    bare, stack = [], []
    for prompt, prompt_plans in zip(prompts, plans, strict=True):
        bare.append(run_bare(runner, prompt_plans))
        stack.append(await run_stack(endpoint, name, prompt, options.output_len))
    bare, stack = bare[2:], stack[2:]
    return [
        _row("first token", [run[0] for run in bare], [run[0] for run in stack]),
        _row("further token", [run[1] for run in bare], [run[1] for run in stack]),
    ]


def _row(quantity: str, bare_s: list[float], stack_s: list[float]) -> dict[str, Any]:
    bare_ms, stack_ms = statistics.median(bare_s) * 1e3, statistics.median(stack_s) * 1e3
    return {
        "quantity": quantity,
        "bare_p50_ms": bare_ms,
        "stack_p50_ms": stack_ms,
        "added_p50_ms": stack_ms - bare_ms,
        "stack_p99_ms": float(np.percentile(stack_s, 99)) * 1e3,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    arguments.add_argument("--requests", type=int, default=30)
    arguments.add_argument("--input-len", type=int, default=128)
    arguments.add_argument("--output-len", type=int, default=64)
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    config = WorkerConfig(model=str(options.model), num_blocks=NUM_BLOCKS, threads=options.threads)
    flags = ["--threads", str(options.threads), "--num-blocks", str(NUM_BLOCKS)]
    flags += ["--no-enable-prefix-caching"]
    with serving(options.model, *flags) as url, Worker(config) as worker:
        rows = asyncio.run(measure(options, url, worker, worker.start()))
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
