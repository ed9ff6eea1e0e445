"""Time to the first token of a long prompt that is computed, loaded from host memory, and loaded
from disk by a restarted engine; and what offloading costs requests that find nothing in it.

    PEER_DIR=DIR python benchmarks/peers/make_models.py qwen3-0.6b-rand   # once; needs transformers
    python benchmarks/offloading.py --model DIR/qwen3-0.6b-rand --json offloading.json

Every engine has its own processes. The pool of blocks holds one prompt and a half, so a prompt is
evicted before it is asked for again.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import report

from longshore import LLM, SamplingParams

VOCAB = 3, 4096
OPTIONS: dict[str, Any] = {"max_num_seqs": 16}


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(*VOCAB, (count, length)).tolist()


def first_token_s(llm: LLM, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds until one token has been generated, and the token."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    return time.perf_counter() - started, output.outputs[0].token_ids


def open_llm(options: argparse.Namespace, length: int, connector: dict[str, Any] | None) -> LLM:
    settings = OPTIONS | {
        "device": options.device,
        "load_format": options.load_format,
        "dtype": options.dtype,
        "max_model_len": length + 128,
        "num_blocks": (length + 128) * 3 // 2 // 16,
        "state_dir": str(options.scratch / "state"),
    }
    if connector is not None:
        settings |= {
            "kv_connector": "offloading",
            "kv_connector_config": json.dumps(connector),
        }
    return LLM(options.model, **settings)


def first_tokens(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with the seconds to the first token by where the prompt's KV comes from."""
    prompts = prompts_of(options.prompts, options.length, seed=1)
    warm = prompts_of(1, options.length, seed=2)[0]
    connector = {
        "cpu_bytes_to_use": options.host_bytes,
        "disk_path": str(options.scratch / "disk"),
        "disk_bytes": options.host_bytes,
    }
    samples: dict[str, list[float]] = {"computed": [], "host": [], "disk": []}
    tokens: dict[str, list[list[int]]] = {name: [] for name in samples}

    def measure(name: str, llm: LLM) -> None:
        for prompt in prompts:
            seconds, token_ids = first_token_s(llm, prompt)
            samples[name].append(seconds)
            tokens[name].append(token_ids)

    with open_llm(options, options.length, connector) as llm:
        first_token_s(llm, warm)
        measure("computed", llm)
        measure("host", llm)
        time.sleep(5)  # the disk tier is written behind
    with open_llm(options, options.length, connector) as llm:
        measure("disk", llm)
    assert tokens["computed"] == tokens["host"] == tokens["disk"], "a tier changed a token"
    computed = statistics.median(samples["computed"])
    return [
        {
            "kv_from": name,
            "tokens": options.length,
            "ttft_s": statistics.median(times),
            "min_s": min(times),
            "max_s": max(times),
            "times_faster": computed / statistics.median(times),
        }
        for name, times in samples.items()
    ]


def throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row: output tokens per second with offloading and without, in interleaved pairs of
    requests that share nothing."""
    params = SamplingParams(temperature=0, max_tokens=options.output_len, ignore_eos=True)
    ratios, rates = [], {"off": [], "on": []}
    with (
        open_llm(options, 1024, None) as off,
        open_llm(options, 1024, {"cpu_bytes_to_use": options.host_bytes}) as on,
    ):
        for pair in range(options.pairs + 1):
            rate = {}
            order = (("off", off), ("on", on)) if pair % 2 else (("on", on), ("off", off))
            for name, llm in order:
                prompts = prompts_of(8, 128, seed=100 * pair + (name == "on"))
                started = time.perf_counter()
                llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
                rate[name] = 8 * options.output_len / (time.perf_counter() - started)
                time.sleep(0.5)  # OpenMP threads spin for 0.2 s
            if pair:  # the first one warms up
                ratios.append(rate["on"] / rate["off"])
                for name, value in rate.items():
                    rates[name].append(value)
    return [
        {
            "offloading": "on / off",
            "pairs": options.pairs,
            "off_tokens_per_s": statistics.median(rates["off"]),
            "on_tokens_per_s": statistics.median(rates["on"]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="%(default)s")
    parser.add_argument("--load-format", default="auto", help="%(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="%(default)s")
    parser.add_argument("--length", type=int, default=4096, help="tokens per prompt: %(default)s")
    parser.add_argument("--prompts", type=int, default=3, help="number of prompts: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, help="for the throughput: %(default)s")
    parser.add_argument("--output-len", type=int, default=64, help="%(default)s")
    parser.add_argument("--host-bytes", default="4GiB", help="of each tier: %(default)s")
    parser.add_argument("--only", choices=("ttft", "throughput"))
    options = parser.parse_args()
    options.scratch = Path(tempfile.mkdtemp(prefix="longshore-bench-", dir="."))
    (options.scratch / "state").mkdir(mode=0o700)
    try:
        rows = [] if options.only == "throughput" else first_tokens(options)
        rows += [] if options.only == "ttft" else throughput(options)
    finally:
        shutil.rmtree(options.scratch)
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
