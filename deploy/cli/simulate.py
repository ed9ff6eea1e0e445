"""`longshore simulate`: runs a simulation, and writes its result."""

import sys
import time

from longshore.deploy.bench.report import check_writable
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.plots import check_plots, plot
from longshore.deploy.simulator.results import describe, summarize, write_csv, write_json
from longshore.deploy.simulator.simulation import simulate


def run(options: SimulateOptions) -> None:
    """Print a summary, and write the files that the options name. How fast the simulation was goes
    to standard error: the results do not depend on it. Raises ConfigError."""
    check_writable(options.json, "json")
    check_writable(options.csv, "csv")
    check_plots(options.plot)
    begin_s = time.perf_counter()
    result = simulate(options)
    wall_s = time.perf_counter() - begin_s
    summary = summarize(result)
    print(describe(summary))
    num_steps = sum(each.num_steps for each in result.engines)
    print(
        f"simulated {num_steps:,} steps in {wall_s:.1f} s: {num_steps / wall_s * 60:,.0f} steps "
        f"per minute, {summary['duration_s'] / wall_s:,.1f} times real time",
        file=sys.stderr,
    )
    if options.json is not None:
        write_json(summary, options.json)
    if options.csv is not None:
        write_csv(result.requests, options.csv)
    if options.plot is not None:
        for path in plot(result, options.plot):
            print(f"picture written to {path}", file=sys.stderr)
