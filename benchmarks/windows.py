"""One long request on the CPU, in a model with sliding windows and in the same model without: time
per step and blocks held, by the number of tokens computed before.

    python benchmarks/windows.py [--tokens N] [--window N] [--step N] [--json F] [--svg F]

Both models take turns, step by step; a step computes `--step` tokens of the prompt. `step_ms` is
the minimum CPU time of the steps that end in the interval up to `tokens`, from plan to applied
answer; `blocks` is the maximum number of blocks, of 16 tokens each, that the request held there.
The last row is for single tokens after the prompt. `--svg` draws the other rows.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
import torch
from transformers import MistralConfig, MistralForCausalLM

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput, WorkerReport
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.scheduler import Scheduler
from longshore.worker.config import WorkerConfig
from longshore.worker.worker import Worker

NUM_STRETCHES: Final = 16
NUM_DECODES: Final = 64
VOCAB_SIZE: Final = 1000


class LongRequest:
    """One request of a small random model, step by step."""

    def __init__(self, window: int | None, options: argparse.Namespace) -> None:
        length = options.tokens + NUM_DECODES
        with tempfile.TemporaryDirectory() as folder:
            config = MistralConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                max_position_embeddings=length,
                sliding_window=window,
            )
            MistralForCausalLM(config).save_pretrained(folder)
            settings = WorkerConfig(
                model=folder,
                num_blocks=length // 16 + 3,
                max_num_seqs=1,
                max_num_batched_tokens=options.step,
                max_model_len=length,
                show_progress=False,
            )
            self.worker = Worker(settings)
            self._runner = self.worker.start()
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=length,
                max_num_seqs=1,
                max_num_batched_tokens=options.step,
                max_steps_in_flight=1,
            ),
            CacheConfig(enable_prefix_caching=False),
            kv_cache=self.worker.kv_cache,
            hash_seed=b"seed",
            vocab_size=VOCAB_SIZE,
        )
        prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, options.tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_DECODES, ignore_eos=True)
        self._scheduler.add_request(
            AddRequest("long", 0, int32_array(prompt), sampling=sampling), client=0, now=0.0
        )

    def step(self) -> tuple[float, int]:
        """CPU time in milliseconds, and the number of blocks held meanwhile."""
        reports: list[WorkerReport] = []
        start = time.process_time()
        plan = self._scheduler.schedule(0.0)
        assert plan is not None
        cache = self._scheduler.kv_cache
        num_held = cache.num_blocks - 1 - cache.num_free_blocks
        completion = self._runner.submit(plan, reports.append)
        assert completion is not None
        completion.wait()
        (answer,) = reports
        assert isinstance(answer, ModelRunnerOutput), answer
        self._scheduler.update_from_output(answer, 0.0)
        self._scheduler.take_outputs()
        return (time.process_time() - start) * 1e3, num_held


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    requests = {"window": LongRequest(options.window, options), "full": LongRequest(None, options)}
    num_prefills = -(-options.tokens // options.step)
    samples: list[dict[str, tuple[float, int]]] = []
    for _ in range(num_prefills + NUM_DECODES - 1):
        samples.append({name: request.step() for name, request in requests.items()})
    for request in requests.values():
        request.worker.close()
    width = max(1, num_prefills // NUM_STRETCHES)
    rows = []
    for first in range(0, num_prefills, width):
        last = min(first + width, num_prefills)
        done = min(last * options.step, options.tokens)
        rows.append({"phase": "prefill", "tokens": done, **_row(samples[first:last])})
    decodes = _row(samples[num_prefills:])
    return [*rows, {"phase": "decode", "tokens": options.tokens + NUM_DECODES, **decodes}]


def _row(samples: Sequence[dict[str, tuple[float, int]]]) -> dict[str, Any]:
    return {
        "step_ms": {name: min(sample[name][0] for sample in samples) for name in samples[0]},
        "blocks": {name: max(sample[name][1] for sample in samples) for name in samples[0]},
    }


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of both models' step times and held blocks, by number of prompt tokens."""
    rows = [row for row in rows if row["phase"] == "prefill"]
    width, height, left = 360, 200, 60
    parts = []
    for panel, (key, title) in enumerate(
        (("step_ms", "ms of CPU per step"), ("blocks", "blocks held"))
    ):
        x0, y0 = left + panel * (width + 2 * left), 40 + height
        top = max(max(row[key].values()) for row in rows)
        parts.append(
            f'<path d="M{x0} {y0 - height}V{y0}H{x0 + width}" fill="none" stroke="#555"/>'
            f'<text x="{x0}" y="25">{title} (up to {top:.4g})</text>'
            f'<text x="{x0 + width}" y="{y0 + 20}" text-anchor="end">'
            f"{rows[-1]['tokens']:,} tokens</text>"
        )
        for name, colour in (("full", "#c33"), ("window", "#06c")):
            points = [
                (
                    x0 + width * row["tokens"] / rows[-1]["tokens"],
                    y0 - height * row[key][name] / top,
                )
                for row in rows
            ]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            x, y = points[-1]
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
                f'<text x="{x + 5:.1f}" y="{y:.1f}" fill="{colour}">{name}</text>'
            )
    size = f'width="{2 * (width + 2 * left)}" height="{height + 80}"'
    style = 'font-family="sans-serif" font-size="13" style="background:#fff"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536, help="in the prompt")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--step", type=int, default=512, help="tokens per step")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--svg", type=Path, metavar="F", help="write the plot here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = measure(options)
    report.write(options.json, rows, threads=options.threads, window=options.window)
    if options.svg is not None:
        options.svg.write_text(draw(rows))


if __name__ == "__main__":
    main()
