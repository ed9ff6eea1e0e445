"""Workload files and simulations of tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longshore.deploy.simulator.cost_model import CostModel, HostTimes, StepTerms
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.records import SimulationResult
from longshore.deploy.simulator.results import summarize
from longshore.deploy.simulator.simulation import Simulation, load_jobs

ONE_SECOND_PER_STEP = CostModel(
    name="simple", kv_bytes_per_token=64, overhead=StepTerms(per_step_s=1.0)
)
"""Every step takes a second, whatever it computes, and the host takes no time."""

REALISTIC = CostModel(
    name="realistic",
    kv_bytes_per_token=64,
    memory=StepTerms(per_step_s=0.01),
    compute=StepTerms(per_token_s=1e-5),
    overhead=StepTerms(per_row_s=1e-6),
    host=HostTimes(0.001, 0.0002, 0.001),
)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def request(at_ms: float, num_input: int, num_output: int, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": num_input,
        "output_length": num_output,
        "hash_ids": list(ids),
    }


def agent_job(
    number: int, at_s: float, turns: Sequence[tuple[int, int, float]], num_shared: int = 0
) -> dict[str, Any]:
    """turns: new tokens, output tokens, gap."""
    return {
        "job_id": f"job-{number}",
        "arrival_s": at_s,
        "shared_prefix": {"id": 7, "num_tokens": num_shared},
        "turns": [
            {
                "num_new_tokens": new,
                "num_output_tokens": out,
                "tool": None if index == len(turns) - 1 else "bash",
                "gap_s": gap_s,
            }
            for index, (new, out, gap_s) in enumerate(turns)
        ],
    }


def simulated(cost: CostModel = REALISTIC, **settings: Any) -> SimulationResult:
    """Simulate, and check that no block is lost."""
    options = SimulateOptions(**{"num_blocks": 2000, **settings})
    simulation = Simulation(options, load_jobs(options), cost)
    result = simulation.run()
    simulation.check()
    return result


def summary(**settings: Any) -> dict[str, Any]:
    return summarize(simulated(**settings))
