"""The simulator compared with a real engine: a slice of each trace, under three policies.

    python benchmarks/simulator_validation.py [--requests 400] [--speed 8] [--repeats 1]
                                              [--cost-model FILE] [--json F]

`longshore serve` serves the demo model on the CPU, a cost model is fitted to it, and both the
server and the simulator get the first requests of each trace: prompts divided by 64, so that they
fit into the model, outputs by 8, and arrival times by `--speed`. With few rows requests queue, so
that the order of the policies shows. Use an idle machine: another process makes the server slower
than the fit.

A row is one slice with one policy: what was measured and simulated, and the relative error.
`ranks` lists the policies by mean time to first token, the best first, on both sides.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import report

from longshore.deploy.bench.options import ServeBenchOptions
from longshore.deploy.bench.serve import Measured, measure
from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.simulator.cost_model import read_cost_model
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.simulation import Simulation
from longshore.deploy.simulator.workloads import Job, Turn, read_jobs
from longshore.protocol.arrays import Int32Array

HERE: Final = Path(__file__).resolve().parent
TRACES: Final = ("conversation", "synthetic")
POLICIES: Final = (
    "fcfs",
    "simulator_policies:ShortestFirst",
    "simulator_policies:LongestFirst",
)
SHRINK_PROMPTS: Final = 64
SHRINK_OUTPUTS: Final = 8
MAX_LEN: Final = 2048
VOCAB_SIZE: Final = 1600
ROWS: Final = 8
NUM_BLOCKS: Final = 4096
KV_BYTES: Final = 1536  # 3 layers with 2 KV heads of 64 elements in bfloat16, keys and values
START_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Times:
    """Of the requests of one run. first_s, per_token_s: one per request."""

    tokens_per_s: float
    first_s: list[float]
    per_token_s: list[float]

    def figures(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens_per_s,
            **{f"ttft_p{q}_ms": float(np.percentile(self.first_s, q)) * 1e3 for q in (50, 90)},
            **{f"tpot_p{q}_ms": float(np.percentile(self.per_token_s, q)) * 1e3 for q in (50, 90)},
        }


def slice_of(trace: str, options: argparse.Namespace) -> list[Job]:
    """The first requests that fit into the model."""
    path = HERE / "traces" / f"{trace}_trace.jsonl.gz"
    prompts, outputs = (
        read_jobs(path, limit=options.requests, shrink=shrink)
        for shrink in (SHRINK_PROMPTS, SHRINK_OUTPUTS)
    )
    jobs = []
    for job, other in zip(prompts, outputs, strict=True):
        turn = Turn(job.turns[0].num_new_tokens, other.turns[0].num_output_tokens)
        if turn.num_new_tokens + turn.num_output_tokens <= MAX_LEN:
            job.turns, job.number = (turn,), len(jobs)
            job.arrival_s /= options.speed
            jobs.append(job)
    return jobs


class RealTokens:
    """Tokens of the model in place of those of a simulation: equal where those are."""

    def __init__(self) -> None:
        self._columns: dict[int, Int32Array] = {}

    def prompt(self, job: Job) -> list[int]:
        simulated = job.prompt(0)
        real = np.empty_like(simulated)
        for token in np.unique(simulated).tolist():
            if token not in self._columns:
                generator = np.random.default_rng(token)
                self._columns[token] = generator.integers(3, VOCAB_SIZE, MAX_LEN, np.int32)
            places = np.flatnonzero(simulated == token)
            real[places] = self._columns[token][places]
        return real.tolist()


@contextmanager
def served(policy: str) -> Iterator[str]:
    """The URL of a server with this policy."""
    command = [
        *(sys.executable, "-m", "longshore.deploy", "serve", "--port", "0", "--device", "cpu"),
        *("--max-num-seqs", str(ROWS), "--num-blocks", str(NUM_BLOCKS)),
        *("--scheduling-policy", policy),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = next((each for each in process.stdout if "http://" in each), None)
        if line is None:
            raise RuntimeError("the server did not start")
        yield line[line.index("http://") :].split()[0].rstrip("/.,")
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def fit(options: argparse.Namespace, path: Path) -> None:
    """Fit a cost model to a server with these settings."""
    with served("fcfs") as url:
        command = [
            *(sys.executable, "-m", "longshore.deploy", "bench", "fit-cost", "--url", url),
            *("--output", str(path), "--kv-bytes-per-token", str(KV_BYTES)),
            *(word for size in (1, 2, 4, 6, ROWS) for word in ("--batch-sizes", str(size))),
        ]
        subprocess.run(command, check=True)


async def _replay(url: str, jobs: Sequence[Job]) -> list[Measured]:
    endpoint, tokens = HttpEndpoint(url), RealTokens()
    prompts = [tokens.prompt(job) for job in jobs]
    begin_s = time.perf_counter() + 1

    async def ask(job: Job, prompt: list[int]) -> Measured:
        await asyncio.sleep(begin_s + job.arrival_s - time.perf_counter())
        options = ServeBenchOptions(url=url, output_len=job.turns[0].num_output_tokens)
        return await measure(endpoint, options, prompt)

    await measure(endpoint, ServeBenchOptions(output_len=8), [5] * 40)  # warm-up
    return await asyncio.gather(*map(ask, jobs, prompts))


def measured_times(policy: str, jobs: Sequence[Job]) -> Times:
    with served(policy) as url:
        answers = asyncio.run(_replay(url, jobs))
    begin_s = min(each.sent_s for each in answers)
    end_s = max(each.sent_s + each.e2e_s for each in answers)
    num_tokens = sum(each.num_output_tokens for each in answers)
    return Times(
        num_tokens / (end_s - begin_s),
        [each.ttft_s for each in answers],
        [each.tpot_s for each in answers if each.tpot_s is not None],
    )


def simulated_times(policy: str, jobs: Sequence[Job], cost_model: Path) -> Times:
    settings = SimulateOptions(
        max_num_seqs=ROWS, num_blocks=NUM_BLOCKS, max_model_len=MAX_LEN, policy=policy
    )
    result = Simulation(settings, jobs, read_cost_model(cost_model)).run()
    records = result.requests
    end_s = max(each.end_s for each in records if each.end_s is not None)
    return Times(
        sum(each.num_output_tokens for each in records) / (end_s - records[0].arrival_s),
        [each.ttft_s for each in records if each.ttft_s is not None],
        [each.tpot_s for each in records if each.tpot_s is not None],
    )


def compare(trace: str, policy: str, jobs: Sequence[Job], cost_model: Path) -> dict[str, Any]:
    real, simulated = measured_times(policy, jobs), simulated_times(policy, jobs, cost_model)
    row: dict[str, Any] = {"trace": trace, "policy": policy.rpartition(":")[2]}
    for name, value in simulated.figures().items():
        measured = real.figures()[name]
        row[name] = {"real": measured, "sim": value, "error": value / measured - 1}
    row["mean_ttft_ms"] = {
        "real": float(np.mean(real.first_s)) * 1e3,
        "sim": float(np.mean(simulated.first_s)) * 1e3,
    }
    return row


def ranks(rows: Sequence[dict[str, Any]], side: str) -> list[str]:
    """Policies, the best first."""
    return [row["policy"] for row in sorted(rows, key=lambda row: row["mean_ttft_ms"][side])]


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--requests", type=int, default=400, help="of each trace")
    arguments.add_argument("--speed", type=float, default=8.0)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--traces", nargs="+", default=list(TRACES), choices=TRACES)
    arguments.add_argument("--policies", nargs="+", default=list(POLICIES))
    arguments.add_argument("--cost-model", type=Path, help="do not fit one, use this")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost_model = options.cost_model or Path(folder) / "cost-model.json"
        if options.cost_model is None:
            fit(options, cost_model)
        rows, orders = [], {}
        for trace in options.traces:
            jobs = slice_of(trace, options)
            for _ in range(options.repeats):
                ranked = [compare(trace, each, jobs, cost_model) for each in options.policies]
                rows += ranked
            orders[trace] = {side: ranks(ranked, side) for side in ("real", "sim")}
        fitted = msgspec.json.decode(cost_model.read_bytes())
    report.write(options.json, rows, ranks=orders, cost_model=fitted)
    for trace, order in orders.items():
        verdict = "the same" if order["real"] == order["sim"] else "DIFFERENT"
        print(f"{trace}: real {order['real']}, simulated {order['sim']}: {verdict}")


if __name__ == "__main__":
    main()
