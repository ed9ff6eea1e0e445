"""One long request on the CPU through chunks, prefix hits and the disk tier, in tiny models of each
kind: the CPU time per 1,000 tokens, apart from the attention kernel.

    python benchmarks/long_request.py [--tokens N ...] [--kinds NAME ...] [--chunk N]
                                      [--without-attention] [--json F]

A prompt of each length is computed in chunks (`cold`), asked for again with a few more tokens
(`hit`), and asked for once more by a restarted engine that finds it on disk (`disk`). Scheduler and
worker run in this process, on one thread each, and the offloading connector stores all blocks.

`host_ms` is the CPU time of the whole process, without that of the attention kernel
(`attention_ms`); `engine_ms` is the part of the thread that schedules and prepares steps. All are
per 1,000 tokens of the prompt; for hits and loads, the minimum of `--repeats`. `growth` compares
with the shortest prompt. Of a computed prompt, `last_first` compares medians of the steps in its
last and first eighth, and `max_min` the largest and smallest median of an eighth (`eighths`, ms per
1,000 tokens).

`--without-attention` leaves the attention kernel out, which reads more and more memory and so takes
the processor's caches from everything else. Prompts are computed `--repeats` times then, and an
eighth has the least of its medians; nothing is looked up.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import report

from longshore.deploy.llm.engine_model import read_engine_model
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.scheduler import Scheduler
from longshore.worker.kernels.native import Native, native
from tests.models import make_tiny_config

SHAPE: Final = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20,
}
MAMBA: Final = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
DELTA: Final = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "full attention": ("Qwen3", {"head_dim": 16, "num_hidden_layers": 1}),
    "windows": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 1024,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gated DeltaNet": (
        "Qwen3_5",
        {**DELTA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "Mamba 2": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "short convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
}
"""Families of transformers, and fields of their configs. One layer has full attention."""

NUM_EIGHTHS: Final = 8
NUM_MORE_TOKENS: Final = 8
VOCAB_SIZE: Final = 128
BLOCK_SIZE: Final = 16
NUM_SPARE_BLOCKS: Final = 256
PARTS: Final = ("host", "engine")
HOST_BYTES: Final = 256 << 20
DISK_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Clock:
    """CPU seconds so far: of the process without attention, of the engine's thread, and of the
    attention kernel."""

    host: float
    engine: float
    attention: float

    def __sub__(self, other: "Clock") -> "Clock":
        return Clock(
            self.host - other.host,
            self.engine - other.engine,
            self.attention - other.attention,
        )

    def ms_per_1k(self, num_tokens: float) -> dict[str, float]:
        return {f"{name}_ms": value * 1e6 / num_tokens for name, value in vars(self).items()}


class Meter:
    """applied: the clock whenever the scheduler had applied an answer of the worker."""

    def __init__(self, *, has_attention: bool) -> None:
        self._has_attention = has_attention
        self.applied: list[Clock] = []
        self._attention_s = 0.0

    def now(self) -> Clock:
        attention_s = self._attention_s
        return Clock(time.process_time() - attention_s, time.thread_time(), attention_s)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measures the engines of this process."""
        run, update = Native.run, Scheduler.update_from_output

        def timed_run(kernels: Native, kernel: str, *arguments: Any) -> None:
            if kernel != "paged_attention":
                run(kernels, kernel, *arguments)
                return
            began = time.thread_time()
            if self._has_attention:
                run(kernels, kernel, *arguments)
            self._attention_s += time.thread_time() - began

        def timed_update(scheduler: Scheduler, *arguments: Any) -> None:
            update(scheduler, *arguments)
            self.applied.append(self.now())

        with (
            patch.object(Native, "run", timed_run),
            patch.object(Scheduler, "update_from_output", timed_update),
        ):
            yield


class Engine:
    """Serves one request at a time."""

    def __init__(
        self, model: Path, folder: Path, meter: Meter, options: argparse.Namespace
    ) -> None:
        """folder: of what survives a restart."""
        longest = max(options.tokens) + NUM_MORE_TOKENS + 1
        num_tokens = sum(options.tokens) + 2 * options.chunk
        tiers = {
            "cpu_bytes_to_use": HOST_BYTES,
            "disk_path": str(folder / "disk"),
            "disk_bytes": DISK_BYTES,
        }
        settings = {
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "float32",
            "threads": 1,
            "async_scheduling": False,  # no kernel runs while the clock is read
            "enforce_eager": True,  # the attention of a graph cannot be timed
            "max_num_seqs": 1,
            "max_num_batched_tokens": options.chunk,
            "max_model_len": longest,
            "num_blocks": 2 * num_tokens // BLOCK_SIZE + NUM_SPARE_BLOCKS,  # nothing is evicted
            "state_dir": str(folder / "state"),
            "kv_connector": "offloading",
            "kv_connector_config": json.dumps(tiers),
        }
        self._engine = InProcessEngine(read_engine_model(model, settings).plan)
        self._meter = meter
        self._num_served = 0
        self.serve(int32_array([1] * (2 * options.chunk)))  # what is slow once

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def serve(self, prompt: Int32Array) -> "Served":
        """Until the first token has been sampled and all blocks have been stored."""
        self._num_served += 1
        message = AddRequest(
            f"cmpl-{self._num_served:024x}",
            self._num_served,
            prompt,
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        )
        engine, meter = self._engine, self._meter
        num_found = None
        meter.applied = [began := meter.now()]
        engine.send(message)
        while num_found is None or engine.scheduler.has_transfers():
            outputs = engine.receive()
            for finished in () if outputs is None else outputs.finished:
                num_found = finished.num_cached_tokens
        steps = [after - before for before, after in pairwise(meter.applied)]
        return Served(meter.now() - began, steps, num_found)


@dataclass(frozen=True)
class Served:
    """num_found: tokens that were in a cache."""

    total: Clock
    steps: Sequence[Clock]
    num_found: int


class Prompts:
    """Random prompts, one per length, and what came of them."""

    def __init__(self, kind: str, lengths: Sequence[int]) -> None:
        self._kind = kind
        self._rng = np.random.default_rng(0)
        self._prompts = [self._tokens(num_tokens) for num_tokens in sorted(lengths)]
        self._served: dict[tuple[str, int], list[Served]] = {}

    def _tokens(self, num_tokens: int) -> Int32Array:
        return int32_array(self._rng.integers(3, VOCAB_SIZE, num_tokens))

    def serve(self, engine: Engine, phase: str) -> None:
        """phase: cold, hit or disk."""
        for prompt in self._prompts:
            if phase == "cold":
                whole = prompt
            else:
                whole = np.concatenate([prompt, self._tokens(NUM_MORE_TOKENS)])
            served = engine.serve(whole)
            least, most = (0, 0) if phase == "cold" else (len(prompt) - BLOCK_SIZE, len(prompt))
            if not least <= served.num_found <= most:
                raise RuntimeError(
                    f"{self._kind}, {phase}: {served.num_found} tokens of {len(prompt)} were found"
                )
            self._served.setdefault((phase, len(prompt)), []).append(served)

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        shortest = min(num_tokens for _, num_tokens in self._served)
        for (phase, num_tokens), served in self._served.items():
            best = min(served, key=lambda each: each.total.host)
            row = {"kind": self._kind, "phase": phase, "tokens": num_tokens}
            row |= best.total.ms_per_1k(num_tokens)
            if num_tokens == shortest:
                first = row
            else:
                row["growth"] = {name: row[f"{name}_ms"] / first[f"{name}_ms"] for name in PARTS}
            if phase == "cold":
                row |= by_eighth([each.steps for each in served], num_tokens)
            rows.append(row)
        return rows


def by_eighth(runs: Sequence[Sequence[Clock]], num_tokens: int) -> dict[str, Any]:
    """What the steps of a computed prompt took per 1,000 tokens, median of each eighth; the least
    of several runs."""
    eighths = {
        name: np.min([medians(steps, f"{name}_ms", num_tokens) for steps in runs], axis=0).tolist()
        for name in PARTS
    }
    return {
        "last_first": {name: each[-1] / each[0] for name, each in eighths.items()},
        "max_min": {name: max(each) / min(each) for name, each in eighths.items()},
        "eighths": eighths,
    }


def medians(steps: Sequence[Clock], name: str, num_tokens: int) -> list[float]:
    used = [step.ms_per_1k(num_tokens / len(steps))[name] for step in steps]
    return [float(np.median(part)) for part in np.array_split(used, NUM_EIGHTHS)]


def measure(kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    family, settings = KINDS[kind]
    prompts = Prompts(kind, options.tokens)
    meter = Meter(has_attention=not options.without_attention)
    with tempfile.TemporaryDirectory() as name, meter.attached():
        folder = Path(name)
        make_tiny_config(family, folder / "model", **SHAPE | settings)
        for number in range(options.repeats if options.without_attention else 0):
            with Engine(folder / "model", folder / str(number), meter, options) as engine:
                prompts.serve(engine, "cold")
        if options.without_attention:
            return prompts.rows()
        with Engine(folder / "model", folder, meter, options) as engine:
            prompts.serve(engine, "cold")
            for _ in range(options.repeats):
                prompts.serve(engine, "hit")
        for _ in range(options.repeats):
            with Engine(folder / "model", folder, meter, options) as engine:
                prompts.serve(engine, "disk")
    return prompts.rows()


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 262_144])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--chunk", type=int, default=2048, help="tokens per step: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="of hits and loads: %(default)s")
    parser.add_argument("--without-attention", action="store_true", help="leave out its kernel")
    options = parser.parse_args()
    if min(options.tokens) < NUM_EIGHTHS * options.chunk:
        parser.error(f"a prompt must have at least {NUM_EIGHTHS} chunks")
    if native() is None:
        raise SystemExit("the CPU kernels are not built, so attention cannot be timed")
    rows = [row for kind in options.kinds for row in measure(kind, options)]
    report.write(options.json, rows, chunk=options.chunk)


if __name__ == "__main__":
    main()
