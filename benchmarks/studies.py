"""Studies with the simulator: how tiers, policies, routers and numbers of engines change a service.

    python benchmarks/studies.py [NAME ...] [--out DIR] [--requests N] [--json F]

Each study simulates the conversation trace (`benchmarks/traces`), or agents, with the cost model
`h100-llama-8b` and writes `study-NAME.png` into DIR (docs/images). `--requests` reads fewer lines
of the trace, for a first look. docs/studies.md shows what came out.

    tiers      host memory behind the KV cache of an engine: hit rates and TTFT by size
    eviction   eviction policies of that tier, by size
    scheduling scheduling policies on one engine at rising load: TTFT
    routers    routing policies in front of 4 engines at rising load: TTFT and hit rates
    split      4 unified engines, and 4 for prefill and decode, at rising load: TTFT and TPOT
    engines    1 to 64 engines, with as much load for each: throughput, hit rates and TTFT
    agents     fcfs and continuum: completion times of agents' jobs at rising load, and hit rates
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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
POLICIES: Final = ROOT / "simulator_policies.py"
GIB: Final = 1 << 30
TICK_S: Final = 3.0
"""Times in the trace are multiples of this."""
ONE_OF: Final = 4
"""Of so many sessions, one engine can serve one."""

Row = dict[str, Any]


def result_of(**settings: Any) -> Row:
    """The part of a simulation's summary that the studies show."""
    result = simulate(SimulateOptions(**settings))
    summary = summarize(result)
    hits = summary["hits"]["hit_rates"]
    arrivals = [each.arrival_s for each in result.requests]
    row: Row = {
        "requests": len(arrivals),
        "offered_per_s": len(arrivals) / max(1e-9, max(arrivals) - min(arrivals)),
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "preemptions": summary["requests"]["preemptions"],
        "gpu_hits": hits["GPU"],
        "all_hits": sum(hits.values()),
    }
    for name in ("ttft", "tpot"):
        times = summary[f"{name}_s"]
        row |= {f"{name}_{each}_s": times[each] for each in ("mean", "p50", "p90", "p99")}
    if summary["jobs"] is not None:
        times = summary["jobs"]["completion_s"]
        row |= {f"job_{each}_s": times[each] for each in ("mean", "p90")}
    if summary["split"] is not None:
        row["gap_mean_s"] = summary["split"]["gap_s"]["mean"]
    return row


def with_tier(gib: int, policy: str = "lru") -> Row:
    if not gib:
        return {}
    config = {"cpu_bytes_to_use": gib * GIB, "eviction_policy": policy}
    return {"connector": "offloading", "connector_config": json.dumps(config)}


def tiers(trace: Row) -> Iterator[Row]:
    for gib in (0, 16, 32, 64, 128, 256, 512, 1024):
        yield {"host_gib": gib, **result_of(**trace, thin=ONE_OF, **with_tier(gib))}


def eviction(trace: Row) -> Iterator[Row]:
    for policy in ("lru", "arc", "s3fifo", "reuse_rate"):
        for gib in (64, 128, 256):
            row = result_of(**trace, thin=ONE_OF, **with_tier(gib, policy))
            yield {"policy": policy, "host_gib": gib, **row}


def scheduling(trace: Row) -> Iterator[Row]:
    for policy in ("fcfs", "ShortestFirst", "ShortestFirstAged"):
        name = policy if policy == "fcfs" else f"{POLICIES}:{policy}"
        for speed in (0.8, 1.0, 1.2, 1.4, 1.6):
            row = result_of(**trace, thin=ONE_OF, speed=speed, policy=name)
            yield {"policy": policy, **row}


def routers(trace: Row) -> Iterator[Row]:
    for router in ("round_robin", "least_loaded", "session_affinity", "prefix_aware"):
        for speed in (0.8, 1.2, 1.6):
            row = result_of(**trace, engines=4, router=router, speed=speed, **with_tier(256))
            yield {"router": router, **row}


def split(trace: Row) -> Iterator[Row]:
    for num_prefill in (0, 1, 2, 3):
        num_decode = 4 - num_prefill
        engines: Row = {"prefill_engines": num_prefill, "decode_engines": num_decode}
        name = f"{num_prefill} prefill, {num_decode} decode"
        if not num_prefill:
            engines, name = {"engines": 4}, "4 unified"
        for speed in (0.7, 1.0, 1.3, 1.6):
            row = result_of(**trace, router="prefix_aware", speed=speed, **engines)
            yield {"deployment": name, **row}


def engines(trace: Row) -> Iterator[Row]:
    for router in ("least_loaded", "prefix_aware"):
        for number in (1, 2, 4, 8, 16, 32, 64):
            row = result_of(**trace, thin=64 // number, speed=13, engines=number, router=router)
            yield {"router": router, "engines": number, **row}


def agents(trace: Row) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for rate in (0.01, 0.02, 0.04, 0.07, 0.1, 0.15):
            path = Path(folder) / f"jobs-{rate}.jsonl"
            make_agents(AgentsOptions(out=path, num_jobs=40, job_rate=rate))
            for policy in ("fcfs", "continuum"):
                yield {"policy": policy, "jobs_per_s": rate, **result_of(trace=path, policy=policy)}


class Study(NamedTuple):
    """x: its values are on the x axis. by: what the curves differ in. panels: the results on the y
    axis of each. num_lines: that are read of the trace; None: all."""

    run: Callable[[Row], Iterator[Row]]
    x: str
    by: str | None
    panels: Sequence[Sequence[str]]
    num_lines: int | None = None


TTFT: Final = (("ttft_mean_s",), ("ttft_p99_s",))
TIMES: Final = (("ttft_p50_s",), ("ttft_p99_s",), ("tpot_p50_s",), ("tpot_p99_s",))
HITS: Final = ("all_hits", "gpu_hits")
MEAN_AND_P90: Final = ("ttft_mean_s", "ttft_p90_s")
JOBS: Final = (("job_mean_s",), ("job_p90_s",), ("all_hits",))
RATES: Final = (("output_tokens_per_s",), ("all_hits",), ("ttft_mean_s",))
STUDIES: Final[dict[str, Study]] = {
    "tiers": Study(tiers, "host_gib", None, (HITS, MEAN_AND_P90), 6000),
    "eviction": Study(eviction, "host_gib", "policy", (("all_hits",), ("ttft_mean_s",)), 6000),
    "scheduling": Study(scheduling, "offered_per_s", "policy", TTFT, 4000),
    "routers": Study(routers, "offered_per_s", "router", (*TTFT, ("all_hits",)), 3000),
    "split": Study(split, "offered_per_s", "deployment", TIMES, 3000),
    "engines": Study(engines, "engines", "router", RATES, 4000),
    "agents": Study(agents, "jobs_per_s", "policy", JOBS),
}
STEPS: Final = ("host_gib", "engines")
LABELS: Final[dict[str | Sequence[str], str]] = {
    "host_gib": "host memory of an engine, GiB",
    "all_hits": "share of prompt tokens found",
    "gpu_hits": "found on the GPU",
    HITS: "share of prompt tokens",
    "offered_per_s": "requests that arrive per second",
    "engines": "engines",
    "output_tokens_per_s": "output tokens per second",
    "jobs_per_s": "new jobs per second",
    "job_mean_s": "completion time of a job, mean, s",
    "job_p90_s": "completion time of a job, p90, s",
    MEAN_AND_P90: "time to first token, s",
} | {
    f"{name}_{each}_s": f"{title}, {each}, s"
    for name, title in (("ttft", "time to first token"), ("tpot", "time per output token"))
    for each in ("mean", "p50", "p90", "p99")
}


def draw(study: Study, rows: Sequence[Row]) -> Figure:
    num_columns = 2 if len(study.panels) in (2, 4) else 3
    num_rows = len(study.panels) // num_columns
    figure = Figure(figsize=(4.6 * num_columns, 3.6 * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axes, results in zip(all_axes, study.panels, strict=True):
        for result in results:
            curves: dict[str, list[Row]] = {}
            for row in rows:
                curves.setdefault(row[study.by] if study.by else LABELS[result], []).append(row)
            for label, mine in curves.items():
                xs, ys = ([row[name] for row in mine] for name in (study.x, result))
                axes.plot(_positions(study, rows, xs), ys, "o-", markersize=4, label=label)
        if study.x in STEPS:
            steps = sorted({row[study.x] for row in rows})
            axes.set_xticks(range(len(steps)), map(str, steps))
        axes.set_xlabel(LABELS[study.x])
        axes.set_ylabel(LABELS[results[0] if len(results) == 1 else results])
        axes.grid(alpha=0.3)
        values = [row[result] for row in rows for result in results]
        if max(values) > 20 * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        if study.by is None:
            axes.legend(fontsize="small")
    if study.by is not None:  # the curves are the same in all panels
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


def _positions(study: Study, rows: Sequence[Row], values: Sequence[float]) -> list[float]:
    """On the x axis; sizes that double are at equal distances."""
    if study.x not in STEPS:
        return list(values)
    steps = sorted({row[study.x] for row in rows})
    return [steps.index(value) for value in values]


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {list(STUDIES)}"
    )
    arguments.add_argument("--out", type=Path, metavar="DIR", default=IMAGES)
    arguments.add_argument("--requests", type=int, metavar="N", help="lines of the trace")
    options = arguments.parse_args()
    for name in options.names:
        if name not in STUDIES:
            arguments.error(f"{name} is not one of {', '.join(STUDIES)}")
    all_rows: list[Row] = []
    for name in options.names or STUDIES:
        study = STUDIES[name]
        num_lines = options.requests or study.num_lines
        rows = []
        for row in study.run({"trace": TRACE, "num_requests": num_lines, "spread_s": TICK_S}):
            print(f"{name}: {row}", file=sys.stderr)  # it may take a minute
            rows.append(row)
        draw(study, rows).savefig(options.out / f"study-{name}.png", dpi=100)
        all_rows += [{"study": name, **row} for row in rows]
    report.write(options.json, all_rows)


if __name__ == "__main__":
    main()
