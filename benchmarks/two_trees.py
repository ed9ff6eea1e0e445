"""What the benchmarks of the core cost in two checkouts, in turns: before and after a change.

    python benchmarks/two_trees.py BEFORE [AFTER] [--turns 5] [--only LOAD ...] [--json F]

BEFORE and AFTER are checkouts; AFTER is this one by default. In each turn, each load runs once in
each tree, in a process of its own, and the trees take turns in going first. The loads are those of
`scheduler_step.py`, `mixed_load.py`, `prefix_lookup.py` and `block_pool.py`, which are called in
the tree that is measured and must have kept their interface.

`before_us` and `after_us` are the lowest of the turns, because other programs can only slow a run
down; `best_ratio` divides them. `ratio` is the median of the turns' own ratios. Above 1, AFTER is
faster.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import report

MEASURE: Final = "--measure"  # of the child process


def steps(work: str, running: int, mode: str, groups: int, num_steps: int) -> dict[str, float]:
    """Medians of the steps; under pressure their mean, because a few of them bear the cost."""
    scheduler_step = importlib.import_module("scheduler_step")
    warm_up = 64 if work == "steady" else 150
    samples = scheduler_step.measure_ours(
        work, running=running, mode=mode, steps=num_steps, warm_up=warm_up, groups=groups
    )
    step_us = np.add(samples["intake_us"], scheduler_step.steps_us(samples))
    return {"": float(np.mean(step_us) if work == "pressure" else np.median(step_us))}


def lookup(num_tokens: int, num_repeats: int) -> dict[str, float]:
    """Medians of the parts of admitting and freeing one prompt that is cached."""
    prefix_lookup = importlib.import_module("prefix_lookup")
    tokens = np.random.default_rng(0).integers(3, 32_000, num_tokens + 1).astype(np.int32)
    cache = prefix_lookup.Cache(tokens, "sha256", 1, "windows")
    for _ in range(num_repeats):
        cache.look_up()
    return {f": {part}": float(np.median(us)) for part, us in cache.samples_us.items()}


def blocks(at_a_time: int) -> dict[str, float]:
    """Medians per block."""
    block_pool = importlib.import_module("block_pool")
    times: dict[str, float] = block_pool.measure(at_a_time, evicting=True)
    return {f": {part.removesuffix('_us')}": us for part, us in times.items()}


LOADS: Final[dict[str, Callable[[], dict[str, float]]]] = {
    **{
        f"step, {running} running, {mode}": partial(steps, "steady", running, mode, 1, num_steps)
        for running, num_steps in ((1, 4000), (64, 2000), (256, 1500), (1024, 1000), (4096, 400))
        for mode in ("sync", "async")
    },
    **{
        f"{work}, {running} running, {mode}": partial(steps, work, running, mode, 1, num_steps)
        for work in ("churn", "pressure")
        for running, num_steps in ((64, 1200), (256, 500), (1024, 200))
        for mode in ("sync", "async")
    },
    **{
        f"{work}, 256 running, {groups} groups": partial(steps, work, 256, "sync", groups, 500)
        for work in ("steady", "churn")
        for groups in (2, 4)
    },
    **{
        f"prefix of {size} tokens": partial(lookup, size, 2**21 // size)
        for size in (512, 4096, 32768)
    },
    **{f"{count} blocks at a time": partial(blocks, count) for count in (1, 16, 64, 256)},
}


def measure(tree: Path, load: str) -> dict[str, float]:
    """The figures of one load in one tree, measured in a process of its own."""
    folders = os.pathsep.join(str(tree.resolve() / name) for name in ("src", "benchmarks"))
    ran = subprocess.run(
        [sys.executable, "-P", __file__, MEASURE, load],
        env={**os.environ, "PYTHONPATH": folders},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(ran.stdout)
    return figures


def compare(load: str, before: Path, after: Path, turns: int) -> list[dict[str, Any]]:
    """A row for each figure of this load."""
    ours: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    for turn in range(turns):
        sides = [(before, others), (after, ours)]
        for tree, samples in sides if turn % 2 == 0 else reversed(sides):
            samples.append(measure(tree, load))
    rows = []
    for name in ours[0].keys() & others[0].keys():
        before_us, after_us = ([sample[name] for sample in side] for side in (others, ours))
        row = {
            "load": load + name,
            "before_us": min(before_us),
            "after_us": min(after_us),
            "best_ratio": min(before_us) / min(after_us),
            "ratio": float(np.median(np.divide(before_us, after_us))),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: str(row["load"]))


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("before", type=Path, metavar="BEFORE")
    arguments.add_argument("after", type=Path, metavar="AFTER", nargs="?", default=report.ROOT)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--only", nargs="+", default=[""], help="loads that begin with this")
    options = arguments.parse_args()
    rows = [
        row
        for load in LOADS
        if load.startswith(tuple(options.only))
        for row in compare(load, options.before, options.after, options.turns)
    ]
    report.write(options.json, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURE]:
        print(json.dumps(LOADS[sys.argv[2]]()))
    else:
        main()
