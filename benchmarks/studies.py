"""Studies with the simulator: how tiers, policies, routers and numbers of engines change a service.

    python benchmarks/studies.py [NAME ...] [--out DIR] [--requests N] [--json F]

Each study simulates the conversation trace (`benchmarks/traces`), or agents, with the cost model
`h100-llama-8b` and writes `study-NAME.png` into DIR (docs/images). `--requests` limits the lines
of the trace, for a first look. docs/studies.md shows the pictures and says what they mean.

    tiers      host memory behind the KV cache of an engine: TTFT and hit rates by size
    eviction   eviction policies of that tier, by size
    scheduling scheduling policies at rising load: TTFT
    routers    routing policies in front of 8 engines at rising load: TTFT and hit rates
    engines    1 to 64 engines: throughput and TTFT
    agents     continuum, fcfs and priority: completion times of agents' jobs at rising load
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import report
from matplotlib.figure import Figure

from longshore.deploy.bench.agents import run as make_agents
from longshore.deploy.bench.options import AgentsOptions
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.results import summarize
from longshore.deploy.simulator.simulation import simulate

ROOT: Final = Path(__file__).resolve().parent
TRACE: Final = ROOT / "traces" / "conversation_trace.jsonl.gz"
IMAGES: Final = ROOT.parent / "docs" / "images"
GIB: Final = 1 << 30
ONE_ENGINE_SPEED: Final = 1 / 6
"""The trace arrives at twice the rate that six engines can serve without a hit."""

Row = dict[str, Any]


def result_of(**settings: Any) -> Row:
    """The part of a simulation's summary that the studies show."""
    summary = summarize(simulate(SimulateOptions(**settings)))
    row: Row = {
        "ttft_mean_s": summary["ttft_s"]["mean"],
        "ttft_p90_s": summary["ttft_s"]["p90"],
        "tpot_mean_s": summary["tpot_s"]["mean"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "preemptions": summary["requests"]["preemptions"],
        "hit_rates": summary["hits"]["hit_rates"],
    }
    if summary["jobs"] is not None:
        row["job_mean_s"] = summary["jobs"]["completion_s"]["mean"]
        row["job_p90_s"] = summary["jobs"]["completion_s"]["p90"]
    return row


def with_tier(num_bytes: int, policy: str = "lru") -> dict[str, Any]:
    if not num_bytes:
        return {}
    config = {"cpu_bytes_to_use": num_bytes, "eviction_policy": policy}
    return {"connector": "offloading", "connector_config": json.dumps(config)}


def tiers(trace: dict[str, Any]) -> Iterator[Row]:
    for gib in (0, 16, 32, 64, 128, 256, 512, 1024):
        row = result_of(**trace, speed=ONE_ENGINE_SPEED, **with_tier(gib * GIB))
        yield {"host_gib": gib, **row, "all_hits": sum(row["hit_rates"].values())}


def eviction(trace: dict[str, Any]) -> Iterator[Row]:
    for policy in ("lru", "arc", "s3fifo", "reuse_rate"):
        for gib in (16, 64, 256, 1024):
            row = result_of(**trace, speed=ONE_ENGINE_SPEED, **with_tier(gib * GIB, policy))
            yield {
                "policy": policy,
                "host_gib": gib,
                **row,
                "all_hits": sum(row["hit_rates"].values()),
            }


def scheduling(trace: dict[str, Any]) -> Iterator[Row]:
    shortest = f"{ROOT / 'simulator_policies.py'}:ShortestFirst"
    for policy in ("fcfs", "continuum", shortest):
        for speed in (0.06, 0.08, 0.1, 0.12, 0.14):
            row = result_of(**trace, speed=speed, policy=policy)
            yield {"policy": policy.rpartition(":")[2], "speed": speed, **row}


def routers(trace: dict[str, Any]) -> Iterator[Row]:
    for router in ("round_robin", "least_loaded", "session_affinity", "prefix_aware"):
        for speed in (0.4, 0.6, 0.8, 1.0, 1.2):
            yield {"router": router, "speed": speed, **result_of(
                **trace, engines=8, router=router, speed=speed, **with_tier(64 * GIB)
            )}  # fmt: skip


def engines(trace: dict[str, Any]) -> Iterator[Row]:
    for number in (1, 2, 4, 8, 16, 32, 64):
        row = result_of(**trace, engines=number, router="prefix_aware", **with_tier(64 * GIB))
        yield {"engines": number, **row}


def agents(trace: dict[str, Any]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for rate in (0.05, 0.1, 0.15, 0.2, 0.25):
            path = Path(folder) / f"jobs-{rate}.jsonl"
            make_agents(AgentsOptions(out=path, num_jobs=100, job_rate=rate))
            for policy in ("fcfs", "priority", "continuum"):
                yield {"policy": policy, "jobs_per_s": rate, **result_of(trace=path, policy=policy)}


Study = tuple[Callable[[dict[str, Any]], Iterator[Row]], str, str | None, tuple[str, ...]]
STUDIES: Final[dict[str, Study]] = {
    "tiers": (tiers, "host_gib", None, ("ttft_mean_s", "all_hits")),
    "eviction": (eviction, "host_gib", "policy", ("ttft_mean_s", "all_hits")),
    "scheduling": (scheduling, "speed", "policy", ("ttft_mean_s", "ttft_p90_s")),
    "routers": (routers, "speed", "router", ("ttft_mean_s", "ttft_p90_s")),
    "engines": (engines, "engines", None, ("ttft_mean_s", "output_tokens_per_s")),
    "agents": (agents, "jobs_per_s", "policy", ("job_mean_s", "job_p90_s")),
}  # fmt: skip
"""The function, the x axis, what the curves differ in, and a plot for each of these results."""

LABELS: Final = {
    "host_gib": "host memory, GiB",
    "all_hits": "share of prompt tokens found in a cache",
    "ttft_mean_s": "mean time to first token, s",
    "ttft_p90_s": "90th percentile of the time to first token, s",
    "speed": "load, as a multiple of the trace's",
    "engines": "engines",
    "output_tokens_per_s": "output tokens per second",
    "jobs_per_s": "new jobs per second",
    "job_mean_s": "mean completion time of a job, s",
    "job_p90_s": "90th percentile of the completion time, s",
}


def draw(name: str, rows: Sequence[Row]) -> Figure:
    _, x, by, results = STUDIES[name]
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, result in zip(figure.subplots(1, len(results)), results, strict=True):
        for curve in dict.fromkeys(row[by] if by else None for row in rows):
            mine = [row for row in rows if by is None or row[by] == curve]
            axes.plot([row[x] for row in mine], [row[result] for row in mine], "o-", label=curve)
        axes.set_xlabel(LABELS[x])
        axes.set_ylabel(LABELS[result])
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        if x in ("host_gib", "engines"):
            axes.set_xscale("symlog" if x == "host_gib" else "log", base=2)
            axes.set_xticks([row[x] for row in rows], [str(row[x]) for row in rows])
        if by is not None:
            axes.legend()
    return figure


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {list(STUDIES)}"
    )
    arguments.add_argument("--out", type=Path, metavar="DIR", default=IMAGES)
    arguments.add_argument("--requests", type=int, metavar="N")
    options = arguments.parse_args()
    for name in options.names:
        if name not in STUDIES:
            arguments.error(f"{name} is not one of {', '.join(STUDIES)}")
    all_rows: list[Row] = []
    for name in options.names or STUDIES:
        rows = list(STUDIES[name][0]({"trace": TRACE, "num_requests": options.requests}))
        draw(name, rows).savefig(options.out / f"study-{name}.png", dpi=110)
        all_rows += [{"study": name, **row} for row in rows]
    report.write(options.json, all_rows)


if __name__ == "__main__":
    main()
