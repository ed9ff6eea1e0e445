"""Recompute, swap or auto: requests that do not fit into the pool together.

    python benchmarks/preemption.py --json preemption.json                  # the bundled demo model
    python benchmarks/preemption.py --model DIR/qwen3-0.6b-rand --prompt-len 512 --output-len 256

All requests arrive at once, and their prompts and answers together need about `--pressure` times
the pool. Each mode is a new engine in this process; the modes take turns. `recompute` has the
offloading connector too, so its full blocks may come back from host memory; `no connector` has
none. TPOT is the time per output token after the first, of each request, with the time that it was
preempted.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import report

from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import engine_options
from longshore.deploy.supervisor.engine_plan import plan_engine
from longshore.protocol.arrays import int32_array
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams

BLOCK_SIZE: Final = 16
MODES: Final = ("no connector", "recompute", "swap", "auto")


def settings_of(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    length = options.prompt_len + options.output_len
    num_blocks = int(options.requests * length / BLOCK_SIZE / options.pressure) + 1
    settings: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "max_model_len": length + BLOCK_SIZE,
        "max_num_seqs": options.requests,
        "num_blocks": max(num_blocks, 2 * length // BLOCK_SIZE),
        "log_level": "warning",
    }
    if mode == "no connector":
        return settings
    connector = {"cpu_bytes_to_use": options.host_bytes, "store_threshold": options.store_threshold}
    return settings | {
        "preemption_mode": mode,
        "kv_connector": "offloading",
        "kv_connector_config": json.dumps(connector),
    }


class Run:
    """One mode, once. times: by request, when each token arrived."""

    def __init__(
        self, options: argparse.Namespace, mode: str, prompts: Sequence[list[int]]
    ) -> None:
        self.times: list[list[float]] = [[] for _ in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        plan = plan_engine(
            engine_options(settings_of(options, mode)), read_model_folder(options.model)
        )
        engine = InProcessEngine(plan)
        try:
            started = time.perf_counter()
            self._ask(engine, prompts, options.output_len)
            self.seconds = time.perf_counter() - started
            self.stats = engine.scheduler.make_stats()
        finally:
            engine.close()

    def _ask(self, engine: InProcessEngine, prompts: Sequence[list[int]], num_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        for handle, prompt in enumerate(prompts):
            engine.send(AddRequest(f"r{handle}", handle, int32_array(prompt), sampling))
        num_left = len(prompts)
        while num_left:
            outputs = engine.receive()
            if outputs is None:
                continue
            now = time.perf_counter()
            for handle, token in zip(
                outputs.handles.tolist(), outputs.tokens.tolist(), strict=True
            ):
                self.times[handle].append(now)
                self.tokens[handle].append(token)
            num_left -= len(outputs.finished)

    @property
    def tpot_s(self) -> list[float]:
        return [(each[-1] - each[0]) / (len(each) - 1) for each in self.times]


def row_of(mode: str, runs: Sequence[Run]) -> dict[str, Any]:
    rates = [sum(map(len, run.tokens)) / run.seconds for run in runs]
    tpot_ms = [1e3 * each for run in runs for each in run.tpot_s]
    stats = [run.stats for run in runs]
    return {
        "mode": mode,
        "tokens_per_s": float(np.median(rates)),
        "tpot_p50_ms": float(np.percentile(tpot_ms, 50)),
        "tpot_p99_ms": float(np.percentile(tpot_ms, 99)),
        "preemptions": float(np.mean([each.num_preemptions for each in stats])),
        "swapped": float(np.mean([each.num_swapped_out for each in stats])),
        "restored": float(np.mean([each.num_swapped_in for each in stats])),
        "too_slow": float(np.mean([each.num_swaps_too_slow for each in stats])),
        "refused": float(np.mean([each.num_swaps_refused for each in stats])),
        "tokens_per_s_each": rates,
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, default=None, help="default: the demo model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pressure", type=float, default=2.0, help="demand / pool: %(default)s")
    parser.add_argument("--host-bytes", default="1GiB", help="of host memory: %(default)s")
    parser.add_argument(
        "--store-threshold",
        type=int,
        default=0,
        help="of the connector; 2 or more: only swaps store blocks of requests that share nothing",
    )
    parser.add_argument("--turns", type=int, default=3, help="runs of each mode: %(default)s")
    options = parser.parse_args()
    options.model = options.model or DEMO_MODEL_DIR
    shape = options.requests, options.prompt_len
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for turn in range(options.turns):
        prompts = np.random.default_rng(turn).integers(3, 250, shape).tolist()
        for mode in MODES if turn % 2 else MODES[::-1]:
            runs[mode].append(Run(options, mode, prompts))
        tokens = [runs[mode][-1].tokens for mode in MODES]
        assert all(each == tokens[0] for each in tokens), "a mode changed a token"
    about = {key: str(value) for key, value in vars(options).items() if key != "json"}
    report.write(options.json, [row_of(mode, runs[mode]) for mode in MODES], options=about)


if __name__ == "__main__":
    main()
