"""Cost of a step while requests arrive and end, compared with vLLM.

    python benchmarks/mixed_load.py [--running 64 256 1024] [--groups 1 2 4] [--kinds windows]
                                    [--json F]

`churn`: in each step a tenth of the running requests ends and as many are admitted. `pressure`: the
pool is too small for all requests, so they preempt each other (`preempted`, per step, on both
sides). The requests are those of `peers/workload.py`, created before timing starts. Both sides take
turns. KV cache groups and `growth` (of `total_us`) are those of `scheduler_step.py`.

`intake_us` is the cost of adding one request: our `add_request(AddRequest)`, and vLLM's
`Request(...)`, which hashes the prompt (we do that at admission), with `add_request`. `total_us` is
the mean cost of a step including added requests; `ratio` compares these. It is the mean because
under pressure a few steps have most of the cost. `median_us` and `median_ratio` are the same for
the median.
"""

from typing import Any

import numpy as np
import report
from scheduler_step import add_groups, growth, steps_us, take_turns


def summary(turns: list[dict[str, Any]]) -> dict[str, float]:
    """The samples of one side."""
    step_us = [us for turn in turns for us in steps_us(turn)]
    intake_us = [us for turn in turns for us in turn["intake_us"]]
    total_us = np.add(step_us, intake_us)
    num_finished = sum(turn["num_finished"] for turn in turns)
    return {
        "total_us": float(np.mean(total_us)),
        "median_us": float(np.median(total_us)),
        "p99_us": float(np.percentile(total_us, 99)),
        "intake_us": sum(intake_us) / max(num_finished, 1),
        "finished": num_finished / len(step_us),
        "preempted": sum(turn["num_preempted"] for turn in turns) / len(step_us),
        "cpu_share": min(turn["cpu_share"] for turn in turns),
    }


def compare(
    peer: report.Peer | None,
    load: str,
    running: int,
    mode: str,
    *,
    turns: int,
    steps: int,
    groups: list[int],
    kinds: str,
) -> list[dict[str, Any]]:
    """A row for each number of groups."""
    rows: list[dict[str, Any]] = []
    # Long enough that every block has been allocated once and that ends are evenly distributed.
    job = {"work": load, "running": running, "mode": mode, "steps": steps, "warm_up": 150}
    for count, our_turns, theirs in take_turns(peer, groups, kinds, turns=turns, **job):
        ours = summary(our_turns)
        row = {
            "load": load,
            "running": running,
            "mode": mode,
            "groups": count,
            "kinds": kinds,
            **ours,
            "total_us_each": [summary([turn])["total_us"] for turn in our_turns],
            "plan_bytes": our_turns[0]["plan_bytes"],
            "growth": growth(ours, rows[0] if rows else ours, "total_us"),
            "ratio": None,
            "median_ratio": None,
            "peer": None,
        }
        if theirs:
            row["peer"] = summary(theirs)
            row["ratio"] = row["peer"]["total_us"] / ours["total_us"]
            row["median_ratio"] = row["peer"]["median_us"] / ours["median_us"]
        rows.append(row)
    return rows


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    arguments.add_argument("--steps", type=int, default=300, help="of each turn")
    add_groups(arguments)
    options = arguments.parse_args()
    groups = {
        "turns": options.turns,
        "groups": sorted(options.groups),
        "kinds": options.kinds,
    }
    with report.peer(options.peer_python, "vllm_steps.py") as peer:
        rows = [
            row
            for load in ("churn", "pressure")
            for running in options.running
            for mode in ("sync", "async")
            for row in compare(peer, load, running, mode, steps=options.steps, **groups)
        ]
    report.write(options.json, rows, peer=peer and peer.about)


if __name__ == "__main__":
    main()
