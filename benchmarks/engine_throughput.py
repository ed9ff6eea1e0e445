"""Steps per second through real processes: the scheduler, a worker that answers at once, and a
client that reads the outputs; with a profile of the scheduler process.

    python benchmarks/engine_throughput.py [--running 256] [--steps 5000] [--json F]

All requests decode; their prompts have 512 to 543 tokens. `cpu` is the share of a core that the
scheduler process uses, including ZMQ's thread; `tokens_per_s` is what the client received. The
profile (`profile` in the JSON: calls, own and total microseconds per step of each function) is from
a separate run under cProfile, which overestimates the cost of Python functions.
"""

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import report
import zmq
from live_engine import EPOCH, TIMEOUT_S, VOCAB_SIZE, LiveEngine, connect_worker, long_request
from scheduler_step import num_sampled

from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.outputs import EngineOutputs, ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.transport.channel import Endpoint

WARM_UP = 200


def answer_plans(
    endpoint: Endpoint, identity: EngineIdentity, num_steps: int, result: Connection
) -> None:
    """A worker in a separate process, which answers every plan at once. It sends the arrival times
    of the first and the last measured plan, then answers no more and waits for the message to stop.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = connect_worker(context, endpoint, identity)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, identity.max_num_seqs, np.int32)
    num_full_steps = 0
    while num_full_steps < WARM_UP + num_steps:
        plan = worker.receive(TIMEOUT_S)
        assert isinstance(plan, SchedulerOutput), plan
        num_full_steps += plan.num_rows == identity.max_num_seqs
        if num_full_steps == WARM_UP:
            result.send(time.monotonic())
        answer = ModelRunnerOutput(EPOCH, plan.step, sampled_tokens=tokens[: num_sampled(plan)])
        worker.send(answer)
    result.send(time.monotonic())
    while isinstance(worker.receive(TIMEOUT_S), SchedulerOutput):
        continue
    worker.close()
    context.term()


def measure(
    running: int, mode: str, *, steps: int, instrument: str | None = None
) -> tuple[dict[str, Any], Any]:
    """One row, and the findings of the instrument."""
    max_model_len = 544 + WARM_UP + steps + 200
    live = LiveEngine(
        num_rows=running, max_model_len=max_model_len, mode=mode, instrument=instrument
    )
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    with live:
        worker = spawn.Process(target=answer_plans, args=(*live.worker_setup, steps, theirs))
        worker.start()
        live.wait_until_ready()
        client = live.connect_client()
        for handle in range(running):
            client.send(long_request(handle, 512 + handle % 32))
        num_tokens = 0
        marks: list[tuple[float, float, int]] = []
        while len(marks) < 2:
            assert worker.is_alive()
            outputs = client.receive(0.05)
            if outputs is not None:
                assert isinstance(outputs, EngineOutputs), outputs
                num_tokens += len(outputs.tokens)
            if ours.poll():
                marks.append((ours.recv(), live.cpu_s(), num_tokens))
    worker.join()
    (began, cpu_began, tokens_began), (ended, cpu_ended, tokens_ended) = marks
    elapsed_s = ended - began
    row = {
        "running": running,
        "mode": mode,
        "steps_per_s": steps / elapsed_s,
        "us_per_step": elapsed_s / steps * 1e6,
        "tokens_per_s": (tokens_ended - tokens_began) / elapsed_s,
        "cpu": (cpu_ended - cpu_began) / elapsed_s,
    }
    return row, live.findings


def profile(running: int, mode: str, *, steps: int, num_functions: int) -> list[dict[str, Any]]:
    """The functions of the scheduler process with the most own time per step."""
    _, table = measure(running, mode, steps=steps, instrument="cprofile")
    num_steps = steps + WARM_UP
    return [
        {
            "mode": mode,
            "function": row["function"],
            "calls": row["calls"] / num_steps,
            "own_us": row["own_us"] / num_steps,
            "total_us": row["total_us"] / num_steps,
        }
        for row in table[:num_functions]
    ]


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--running", type=int, nargs="+", default=[256])
    arguments.add_argument("--steps", type=int, default=5000)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--functions", type=int, default=25, help="in the profile: %(default)s")
    options = arguments.parse_args()
    rows, profiles = [], []
    for running in options.running:
        for mode in ("sync", "async"):
            runs = [measure(running, mode, steps=options.steps)[0] for _ in range(options.repeats)]
            runs.sort(key=lambda run: run["steps_per_s"])
            rates = [run["steps_per_s"] for run in runs]
            rows.append({**runs[len(runs) // 2], "steps_per_s_each": rates})
            profiles += profile(running, mode, steps=options.steps, num_functions=options.functions)
    report.write(None, profiles)
    print()
    report.write(options.json, rows, profile=profiles)


if __name__ == "__main__":
    main()
