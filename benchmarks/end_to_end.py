"""Output tokens per second on a CPU, compared with vLLM's CPU build and transformers' `generate`.

    python benchmarks/end_to_end.py [--cases i ii iii ragged gemma3 mixtral hybrid ...] [--curves]
                                    [--systems NAME ...] [--rounds 3] [--json F]
    python benchmarks/end_to_end.py --model FILE.gguf --cases gguf-one ... --systems llamacpp ...

Cases: `i` 64 prompts of 256 tokens, 128 out, tiny model; `ii` 8 x 512, 64 out, a model of 0.6 B;
`iii` 32 prompts that share 1,024 tokens and have 64 of their own, 16 out, tiny; `ragged` 64 prompts
of 16 to 512 tokens, 16 to 256 out, tiny; `gemma3` and `mixtral` the same load, on tiny models of
these families (six layers, five of them with a window of 128 tokens; eight experts, two per token);
`hybrid` 8 x 512, 64 out, the shape of Qwen3.5-0.8B, and `hybrid-prompts` with one token out.
`gguf-one`, `gguf-1024`, `gguf-16` and `gguf-prompts` need `--model FILE.gguf`: a prompt of 16 or of
1,024 tokens, 128 out; 16 x 16, 128 out; 4 x 1,024, one out.
`smallest` shows only that everything runs: 2 prompts of 8 to 16 tokens, 4 out, tiny.
Random weights, bf16, greedy, end ids ignored, two threads; all sides with the same allocator and
OpenMP runtime (`--preload`). All systems are loaded before timing starts and take turns. In each
round all get the same new prompts. A system that cannot load the model of a case is skipped, with a
warning. `ratios` are output tokens/s divided by those of transformers, and of vLLM in the same kind
of process, round by round.

`--curves`: tokens/s for 1 to 256 requests, the time of a decode step by context length, and the
time to the first token without and with a cached prefix.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import report

Job: TypeAlias = dict[str, list[Any]]

BASE = Path(os.environ.get("PEER_DIR") or Path.home() / ".cache" / "longshore-peers")
TINY, BIG = BASE / "tiny-rand", BASE / "qwen3-0.6b-rand"
GEMMA3, MIXTRAL = BASE / "gemma3-tiny-rand", BASE / "mixtral-tiny-rand"
HYBRID = BASE / "qwen3.5-0.8b-rand"
NO_MODEL = Path()  # given by --model
FIRST_ID, VOCAB_SIZE = 3, 4096  # ids that all models have
MAX_MODEL_LEN = 4096
SETTLE_S = 1.5
"""Pause between two turns: after their last work OpenMP threads spin for 0.2 s, and vLLM's worker
process for one second, on cores that the next system needs."""

PRELOAD = (
    BASE / "cpu/lib/libiomp5.so",
    Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"),
)


@dataclass(frozen=True)
class Case:
    """Prompts for one model. Lengths are (minimum, maximum)."""

    model: Path
    num_prompts: int
    input_lens: tuple[int, int]
    output_lens: tuple[int, int]
    shared: int = 0

    def job(self, generator: np.random.Generator) -> Job:
        prefix = random_ids(generator, self.shared)
        lens = generator.integers(*self.input_lens, self.num_prompts, endpoint=True)
        outs = generator.integers(*self.output_lens, self.num_prompts, endpoint=True)
        prompts = [prefix + random_ids(generator, int(length)) for length in lens]
        return {"prompts": prompts, "output_lens": outs.tolist()}


CASES = {
    "i": Case(TINY, 64, (256, 256), (128, 128)),
    "ii": Case(BIG, 8, (512, 512), (64, 64)),
    "iii": Case(TINY, 32, (64, 64), (16, 16), shared=1024),
    "ragged": Case(TINY, 64, (16, 512), (16, 256)),
    "gemma3": Case(GEMMA3, 64, (16, 512), (16, 256)),
    "mixtral": Case(MIXTRAL, 64, (16, 512), (16, 256)),
    "hybrid": Case(HYBRID, 8, (512, 512), (64, 64)),
    "hybrid-prompts": Case(HYBRID, 8, (512, 512), (1, 1)),
    "smallest": Case(TINY, 2, (8, 16), (4, 4)),
    "gguf-one": Case(NO_MODEL, 1, (16, 16), (128, 128)),
    "gguf-1024": Case(NO_MODEL, 1, (1024, 1024), (128, 128)),
    "gguf-16": Case(NO_MODEL, 16, (16, 16), (128, 128)),
    "gguf-prompts": Case(NO_MODEL, 4, (1024, 1024), (1, 1)),
}


@dataclass(frozen=True)
class System:
    """One side of a comparison. arguments: after the model; compared_to: other keys of SYSTEMS."""

    python: Path
    script: str
    arguments: tuple[str, ...] = ()
    compared_to: tuple[str, ...] = ()


IN_PROCESS = (str(MAX_MODEL_LEN),)
PROCESSES = (*IN_PROCESS, "--processes")
OURS = Path(sys.executable), "generate_longshore.py"
VLLM = BASE / "cpu/bin/python", "generate_vllm.py"
GGUF = "llamacpp", "dequantised", "int8"  # systems for GGUF files only
SYSTEMS = {
    "vllm": System(*VLLM, IN_PROCESS),
    "vllm-processes": System(*VLLM, PROCESSES),
    "transformers": System(BASE / "hf/bin/python", "generate_transformers.py"),
    "longshore": System(*OURS, IN_PROCESS, ("vllm", "transformers")),
    "longshore-processes": System(*OURS, PROCESSES, ("vllm-processes", "transformers", *GGUF)),
    "dequantised": System(*OURS, (*PROCESSES, "--weights", "dequantised"), GGUF[:1]),
    "int8": System(*OURS, (*PROCESSES, "--weights", "int8"), GGUF[:1]),
    "llamacpp": System(BASE / "llamacpp/bin/python", "generate_llamacpp.py", IN_PROCESS),
}


class Systems:
    """All installed systems that can load one model."""

    def __init__(self, model: Path, names: Sequence[str], preload: str, stack: ExitStack) -> None:
        self.peers: dict[str, report.Peer] = {}
        for name in names:
            system = SYSTEMS[name]
            try:
                peer = stack.enter_context(
                    report.peer(
                        system.python,
                        system.script,
                        str(model),
                        *system.arguments,
                        environment={"LD_PRELOAD": preload},
                    )
                )
            except RuntimeError as error:
                print(f"*** {name} CANNOT LOAD {model}: {error}", file=sys.stderr)
                continue
            if peer is not None:
                self.peers[name] = peer

    def measure(self, make_job: Any, rounds: int) -> dict[str, list[float]]:
        """Seconds per system and round; the systems take turns, after one round to warm up."""
        walls: dict[str, list[float]] = {name: [] for name in self.peers}
        for turn in range(rounds + 1):
            job = make_job(turn)
            for name, peer in self.peers.items():
                time.sleep(SETTLE_S)
                wall_s = peer.measure(**job)["wall_s"]
                if turn:
                    walls[name].append(wall_s)
        return walls


def random_ids(generator: np.random.Generator, length: int) -> list[int]:
    ids: list[int] = generator.integers(FIRST_ID, VOCAB_SIZE, length).tolist()
    return ids


def measure_case(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    case = CASES[name] if options.model is None else replace(CASES[name], model=options.model)
    with ExitStack() as stack:
        systems = Systems(case.model, options.systems, options.preload, stack)
        # The same jobs for all systems, new ones in each round.
        jobs = [case.job(np.random.default_rng(turn)) for turn in range(options.rounds + 1)]
        walls = systems.measure(lambda turn: jobs[turn], options.rounds)
        about = {system: peer.about for system, peer in systems.peers.items()}
    rates = {
        system: [
            sum(jobs[turn + 1]["output_lens"]) / wall for turn, wall in enumerate(walls[system])
        ]
        for system in walls
    }
    return [
        {
            "case": name,
            "system": system,
            "output_tokens_per_s": float(np.median(rates[system])),
            "ratios": _ratios(rates, system),
            "wall_s": float(np.median(walls[system])),
            "walls_s": walls[system],
            "about": [about[system]],
        }
        for system in walls
    ]


def _ratios(rates: dict[str, list[float]], system: str) -> dict[str, float]:
    """By other system; round by round, because conditions on the machine change between rounds."""
    return {
        other: float(np.median(np.array(rates[system]) / np.array(rates[other])))
        for other in SYSTEMS[system].compared_to
        if other in rates
    }


def measure_curves(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    names = [name for name in options.systems if name in ("vllm", "longshore")]
    generator = np.random.default_rng(0)
    with ExitStack() as stack:
        systems = Systems(TINY, names, options.preload, stack)

        def rate(num_prompts: int) -> Any:
            case = Case(TINY, num_prompts, (128, 128), (64, 64))
            return lambda turn: case.job(generator)

        for num_prompts in (1, 4, 16, 64, 256):
            walls = systems.measure(rate(num_prompts), options.rounds)
            rows.append(
                {"curve": "output tokens/s", "at": num_prompts}
                | {name: 64 * num_prompts / float(np.median(w)) for name, w in walls.items()}
            )
        for length in (128, 512, 2048, 3968):
            # Eight requests. The warm-up caches their prompts, so that the difference between the
            # two times is decoding only.
            prompts = [random_ids(generator, length) for _ in range(8)]
            step: dict[str, float] = {}
            times = {}
            for out in (4, 68):
                job = {"prompts": prompts, "output_lens": [out] * 8}
                times[out] = systems.measure(lambda turn, job=job: job, options.rounds)
            for name in systems.peers:
                long, short = np.median(times[68][name]), np.median(times[4][name])
                step[name] = float(long - short) / 64 * 1e3
            rows.append({"curve": "ms per decode step of 8", "at": length, **step})
        for length in (100, 1000, 3000):
            cold, warm = {}, {}
            for name, peer in systems.peers.items():
                colds, warms = [], []
                time.sleep(SETTLE_S)
                for _ in range(max(5, options.rounds)):
                    job = {"prompts": [random_ids(generator, length)], "output_lens": [1]}
                    colds.append(peer.measure(**job)["wall_s"] * 1e3)
                    warms.append(peer.measure(**job)["wall_s"] * 1e3)
                cold[name], warm[name] = float(np.median(colds)), float(np.median(warms))
            rows.append({"curve": "ms to first token, cold", "at": length, **cold})
            rows.append({"curve": "ms to first token, cached", "at": length, **warm})
    return rows


def main() -> None:
    arguments = report.parser(__doc__)
    cases = [name for name in CASES if name != "smallest" and not name.startswith("gguf")]
    systems = [name for name in SYSTEMS if name not in GGUF]
    arguments.add_argument("--cases", nargs="*", choices=CASES, default=cases)
    arguments.add_argument("--systems", nargs="+", choices=SYSTEMS, default=systems)
    arguments.add_argument("--model", type=Path, help="instead of those of the cases")
    arguments.add_argument("--curves", action="store_true")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--preload",
        default=":".join(str(path) for path in PRELOAD if path.exists()),
        help="LD_PRELOAD for all sides: %(default)s",
    )
    options = arguments.parse_args()
    rows = [row for name in options.cases for row in measure_case(name, options)]
    if options.curves:
        rows += measure_curves(options)
    report.write(options.json, rows, preload=options.preload)


if __name__ == "__main__":
    main()
