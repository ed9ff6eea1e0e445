"""The simulator compared with a real engine: a slice of each trace, under three policies.

    python benchmarks/simulator_validation.py [--requests 400] [--speed 1] [--repeats 1] [--json F]
        [--fit-batch-sizes 1 2 4 6 8] [--fit-prompt-lens 16 64 256] [--fit-repeats 3]

`longshore serve` serves a Llama of 25 million random parameters on the CPU, a cost model is fitted
to it, and both the server and the simulator get the first requests of a trace: prompts divided
by 64, so that they fit into the model, outputs by 8, and arrival times by SPEEDS times `--speed`.
With few rows requests queue, so that the order of the policies shows. The worker has one thread, so
that gateway and client do not slow it down on two cores, and its steps are long beside what they
do. Use an idle machine: another process makes the server slower than the fit. As the speed of a
virtual machine changes by 10 % within minutes, each server has a cost model of its own, fitted
right before. All of it takes about 15 minutes.

A row is one slice with one policy: what was measured and simulated, and the relative error.
`ranks` lists the policies by mean time to first token, the best first, on both sides; simulated
with the mean of the trace's cost models.
"""

import argparse
import asyncio
import os
import shutil
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

from longshore.deploy.bench.options import FitCostOptions, ServeBenchOptions
from longshore.deploy.bench.serve import Measured, measure
from longshore.deploy.bench.sse_client import HttpEndpoint
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.simulator.cost_model import CostModel, read_cost_model
from longshore.deploy.simulator.options import SimulateOptions
from longshore.deploy.simulator.simulation import Simulation
from longshore.deploy.simulator.workloads import Job, Turn, read_jobs
from longshore.protocol.arrays import Int32Array

HERE: Final = Path(__file__).resolve().parent
SPEEDS: Final = {"conversation": 2.0, "synthetic": 2.5}
"""At these, the engine computes 55 and 65 % of the time. Nearer to all of it, an error of 5 % in
the time of a step doubles the queue."""
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
WIDER: Final = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
}
"""The model is the demo model's architecture with these sizes."""
KV_BYTES: Final = 4096  # 8 layers with 2 KV heads of 64 elements in bfloat16, keys and values
START_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Times:
    """Times of the requests of one run. first_s, per_token_s: one per request."""

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
    jobs: list[Job] = []
    for job, other in zip(prompts, outputs, strict=True):
        turn = Turn(job.turns[0].num_new_tokens, other.turns[0].num_output_tokens)
        if turn.num_new_tokens + turn.num_output_tokens <= MAX_LEN:
            job.turns, job.number = (turn,), len(jobs)
            job.arrival_s /= options.speed * SPEEDS[trace]
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


def make_model(folder: Path) -> None:
    """Write all of the model's files but the weights."""
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=ignored)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    (folder / "config.json").write_bytes(msgspec.json.encode({**config, **WIDER}))


@contextmanager
def served(model: Path, policy: str) -> Iterator[str]:
    """The URL of a server with this policy."""
    command = [
        *(sys.executable, "-m", "longshore.deploy", "serve", str(model), "--port", "0"),
        *("--load-format", "dummy", "--device", "cpu", "--threads", "1"),
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


def fit(url: str, path: Path, options: argparse.Namespace) -> None:
    """Fit a cost model to the server."""
    command = [
        *(sys.executable, "-m", "longshore.deploy", "bench", "fit-cost", "--url", url),
        *("--output", str(path), "--kv-bytes-per-token", str(KV_BYTES)),
        *("--repeats", str(options.fit_repeats)),
        *(word for size in options.fit_batch_sizes for word in ("--batch-sizes", str(size))),
        *(word for length in options.fit_prompt_lens for word in ("--prompt-lens", str(length))),
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


def times_of(answers: Sequence[Measured]) -> Times:
    begin_s = min(each.sent_s for each in answers)
    end_s = max(each.sent_s + each.e2e_s for each in answers)
    num_tokens = sum(each.num_output_tokens for each in answers)
    return Times(
        num_tokens / (end_s - begin_s),
        [each.ttft_s for each in answers],
        [each.tpot_s for each in answers if each.tpot_s is not None],
    )


def simulated_times(policy: str, jobs: Sequence[Job], cost: CostModel) -> Times:
    settings = SimulateOptions(
        max_num_seqs=ROWS, num_blocks=NUM_BLOCKS, max_model_len=MAX_LEN, policy=policy
    )
    result = Simulation(settings, jobs, cost).run()
    records = result.requests
    end_s = max(each.end_s for each in records if each.end_s is not None)
    return Times(
        sum(each.num_output_tokens for each in records) / (end_s - records[0].arrival_s),
        [each.ttft_s for each in records if each.ttft_s is not None],
        [each.tpot_s for each in records if each.tpot_s is not None],
    )


def compare(
    model: Path, trace: str, policy: str, jobs: Sequence[Job], options: argparse.Namespace
) -> tuple[dict[str, Any], CostModel]:
    """The row, and the cost model that was fitted for it."""
    path = model.parent / "cost-model.json"
    with served(model, policy) as url:
        fit(url, path, options)
        real = times_of(asyncio.run(_replay(url, jobs)))
    cost = read_cost_model(path)
    simulated = simulated_times(policy, jobs, cost)
    row: dict[str, Any] = {"trace": trace, "policy": policy.rpartition(":")[2]}
    for name, value in simulated.figures().items():
        measured = real.figures()[name]
        row[name] = {"real": measured, "sim": value, "error": value / measured - 1}
    row["mean_ttft_ms"] = {
        "real": float(np.mean(real.first_s)) * 1e3,
        "sim": float(np.mean(simulated.first_s)) * 1e3,
    }
    fitted = msgspec.json.decode(path.read_bytes())
    return {**row, "fit_error": fitted["fit"]["mean_error"], "terms": fitted["overhead"]}, cost


def mean_cost(costs: Sequence[CostModel]) -> CostModel:
    """The mean of the fitted terms."""

    def mean(parts: Sequence[Any]) -> Any:
        columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
        return type(parts[0])(*(float(np.mean(column)) for column in columns))

    return msgspec.structs.replace(
        costs[0],
        overhead=mean([each.overhead for each in costs]),
        host=mean([each.host for each in costs]),
    )


def ranks(mean_ttft: dict[str, float]) -> list[str]:
    """Policies, the best first."""
    return sorted(mean_ttft, key=mean_ttft.__getitem__)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--requests", type=int, default=400, help="of each trace")
    arguments.add_argument("--speed", type=float, default=1.0)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--fit-batch-sizes", type=int, nargs="+", default=[1, 2, 4, 6, ROWS])
    arguments.add_argument(
        "--fit-prompt-lens", type=int, nargs="+", default=list(FitCostOptions.prompt_lens)
    )
    arguments.add_argument("--fit-repeats", type=int, default=3)
    arguments.add_argument("--traces", nargs="+", default=list(SPEEDS), choices=list(SPEEDS))
    arguments.add_argument("--policies", nargs="+", default=list(POLICIES))
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        rows, orders = [], {}
        for trace in options.traces:
            jobs = slice_of(trace, options)
            runs = [
                compare(model, trace, each, jobs, options)
                for _ in range(options.repeats)
                for each in options.policies
            ]
            cost = mean_cost([each for _, each in runs])
            real, simulated = {}, {}
            for policy in options.policies:
                mine = [row for row, _ in runs if policy.endswith(row["policy"])]
                real[policy] = float(np.mean([row["mean_ttft_ms"]["real"] for row in mine]))
                simulated[policy] = float(np.mean(simulated_times(policy, jobs, cost).first_s))
            rows += [row for row, _ in runs]
            orders[trace] = {"real": ranks(real), "sim": ranks(simulated)}
    report.write(options.json, rows, ranks=orders)
    for trace, order in orders.items():
        verdict = "the same" if order["real"] == order["sim"] else "DIFFERENT"
        print(f"{trace}: real {order['real']}, simulated {order['sim']}: {verdict}")


if __name__ == "__main__":
    main()
