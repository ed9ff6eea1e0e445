"""How fast the simulator is: steps per minute, and simulated seconds per second.

    python benchmarks/simulator_speed.py [--requests 400] [--engines 16] [--json F]

`running`: 256 requests of 512 to 527 tokens decode 3,000 tokens each on one engine, so that in
every step 16 of them complete a block. `conversation`: the first `--requests` requests of the
conversation trace on several engines, with two routers; 12,031 are all of them. Costs are those of
`h100-llama-8b`. `times_real_time` counts the time of the deployment, not of each engine. One thread
computes; times are its CPU time (`cpu_s`) and the wall time, which other processes may lengthen.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import report

from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.rooflines import ROOFLINES
from longshore.deploy.simulator.simulation import Simulation, load_jobs
from longshore.deploy.simulator.workloads import AgentJob, Job, Turn

TRACE: Final = Path(__file__).resolve().parent / "traces" / "conversation_trace.jsonl.gz"
NUM_RUNNING: Final = 256
NUM_OUTPUT: Final = 3000
NUM_BLOCKS: Final = 60_000


def running_jobs() -> list[Job]:
    return [
        AgentJob(
            number=number,
            job_id=None,
            arrival_s=0.0,
            turns=(Turn(512 + number % 16, NUM_OUTPUT),),
            session_key=None,
            shared_token=0,
            num_shared=0,
        )
        for number in range(NUM_RUNNING)
    ]


def measure(name: str, options: SimulateOptions, jobs: Sequence[Job]) -> dict[str, Any]:
    simulation = Simulation(options, jobs, ROOFLINES[options.cost_model])
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    result = simulation.run()
    wall_s, cpu_s = time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s
    num_steps = sum(each.num_steps for each in result.engines)
    duration_s = max(each.end_s or 0.0 for each in result.requests)
    return {
        "workload": name,
        "requests": len(result.requests),
        "engines": options.engines,
        "steps": num_steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "steps_per_minute": num_steps / cpu_s * 60,
        "times_real_time": duration_s / cpu_s,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--requests", type=int, default=400, help="of the trace")
    arguments.add_argument("--engines", type=int, default=16, help="for the trace")
    given = arguments.parse_args()
    options = SimulateOptions(max_num_seqs=NUM_RUNNING, num_blocks=NUM_BLOCKS)
    rows = [measure("running", options, running_jobs())]
    for router in ("least_loaded", "prefix_aware"):
        options = SimulateOptions(
            trace=TRACE, num_requests=given.requests, engines=given.engines, router=router
        )
        rows.append(measure(f"conversation, {router}", options, load_jobs(options)))
    report.write(given.json, rows)


if __name__ == "__main__":
    main()
