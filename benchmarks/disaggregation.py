"""Prefill and decode on separate engines, compared with engines that do both.

    python benchmarks/disaggregation.py idle [--requests 40] [--prompt-tokens 512]
    python benchmarks/disaggregation.py handover [--lengths 8192 16384 32768] [--requests 5]
    python benchmarks/disaggregation.py mixed [--rate 2] [--seconds 60] [--chunks 128 512 2048]
    python benchmarks/disaggregation.py overload [--seconds 300] [--factor 3]

All engines have one thread and are on this machine; the library is NIXL. Further options are those
of `longshore serve`, for all engines, and `--json F`.

`idle`: one request at a time, to one unified engine and to one prefill and one decode engine in
turn. `added_ttft_ms` is the difference of the medians. `gap_ms` is the time from the first token to
the second; `gap_beyond_ms` is what remains of it without the transfer of the same request and
without a decode step of the unified engine. The transfer's time is the worker's: reads and the
check of the lease after them. All are medians.

`handover`: the same gap for long prompts, with the demo model's weights and more positions.

`mixed`: prompts arrive at random times, at the same rate and in the same order for all: one prefill
and one decode engine, and two unified ones for each chunk size (`max_num_batched_tokens`). The row
to compare with is the largest chunk whose TTFT is not above that of the separate engines.

`overload`: as many clients as fill the engines give their capacity; then requests arrive at
`--factor` times that rate. `statuses` and `pulls` are counts, by HTTP status and by outcome.
`computed_prompt_tokens` are the tokens that the worker of each engine computed, without the
generated ones that answers continue after; `accepted_prompt_tokens` are the prompts of the requests
with status 200. `reprefilled_tokens` are what both engines computed beyond these, for whatever
reason: a KV transfer that failed, a preemption, a retry.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import report
from stack_overhead import serving

from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.gateway.metric_samples import Sample, Window, read_metrics
from longshore.deploy.model.demo import DEMO_MODEL_DIR

TIMEOUT_S: Final = 600.0
VOCAB_SIZE: Final = 1600
SPLIT: Final = ("--prefill", "1", "--decode", "1")
TRANSFER: Final = {"transfer_type": "REMOTE_to_GPU"}


class Times(NamedTuple):
    """Times of one stream. gaps_s: between tokens."""

    ttft_s: float
    gaps_s: list[float]


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    return random_prompts(
        count,
        input_len=length,
        shared_prefix=0,
        vocab_size=VOCAB_SIZE,
        generator=np.random.default_rng(seed),
    )


async def ask(url: str, prompt: Sequence[int], num_tokens: int) -> HttpAnswer:
    body = {
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return await HttpEndpoint(url).request(
        "POST", "/v1/completions", json.dumps(body).encode(), timeout_s=TIMEOUT_S
    )


def times_of(answer: HttpAnswer, started_s: float | None = None) -> Times:
    assert answer.status == 200, answer.body
    events = [(at, json.loads(data)) for at, data in answer.events if data != b"[DONE]"]
    assert not any("error" in event for _, event in events), events[-1]
    arrivals: list[float] = []
    for at, event in events:
        for choice in event["choices"]:
            arrivals += [at] * len(choice.get("token_ids") or ())
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return Times(arrivals[0] - (answer.sent_s if started_s is None else started_s), gaps)


def metrics(url: str, *, of_workers: bool = False) -> Sample:
    """Engines report once per second, and their workers report to them as often: waits until the
    last report is there."""
    time.sleep(2.5 if of_workers else 1.5)
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        return read_metrics(response.read().decode(), time.perf_counter())


# One request at a time


class OneByOne(NamedTuple):
    """Streams of requests that are alone. transfers_s: of each request to the separate engines."""

    unified: list[Times]
    split: list[Times]
    transfers_s: list[float]


def one_by_one(unified: str, split: str, prompts: Sequence[Sequence[int]]) -> OneByOne:
    """The servers take turns. The first two prompts connect the engines and do not count."""
    found = OneByOne([], [], [])
    before = metrics(split)
    for prompt in prompts:
        found.unified.append(times_of(asyncio.run(ask(unified, prompt, 8))))
        found.split.append(times_of(asyncio.run(ask(split, prompt, 8))))
        after = metrics(split)
        seconds = Window(after, before).added("longshore_kv_offload_seconds_total", TRANSFER)
        assert seconds > 0, "nothing was transferred"
        found.transfers_s.append(seconds)
        before = after
    return OneByOne(*(each[2:] for each in found))


def compare_one_by_one(options: argparse.Namespace, model: Path, length: int) -> dict[str, Any]:
    blocks = ("--num-blocks", str(4 * (length // 16 + 8)))
    flags = ("--threads", "1", "--no-enable-prefix-caching", *blocks, *options.flags)
    with serving(model, *flags) as unified, serving(model, *flags, *SPLIT) as split:
        prompts = prompts_of(options.requests + 2, length, seed=length)
        found = one_by_one(unified, split, prompts)
    unified_ms, split_ms = (
        statistics.median(each.ttft_s for each in streams) * 1e3
        for streams in (found.unified, found.split)
    )
    gaps_s = [each.gaps_s[0] for each in found.split]
    beyond_s = [gap - transfer for gap, transfer in zip(gaps_s, found.transfers_s, strict=True)]
    step_ms = statistics.median(gap for each in found.unified for gap in each.gaps_s) * 1e3
    return {
        "prompt_tokens": length,
        "requests": options.requests,
        "unified_ttft_ms": unified_ms,
        "split_ttft_ms": split_ms,
        "added_ttft_ms": split_ms - unified_ms,
        "gap_ms": statistics.median(gaps_s) * 1e3,
        "transfer_ms": statistics.median(found.transfers_s) * 1e3,
        "step_ms": step_ms,
        "gap_beyond_ms": statistics.median(beyond_s) * 1e3 - step_ms,
    }


def idle(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [compare_one_by_one(options, options.model, options.prompt_tokens)]


def handover(options: argparse.Namespace) -> list[dict[str, Any]]:
    with longer_model(options.model, max(options.lengths) + 64) as model:
        return [compare_one_by_one(options, model, length) for length in options.lengths]


@contextlib.contextmanager
def longer_model(model: Path, num_positions: int) -> Iterator[Path]:
    """Make the same weights with more positions. Its answers make no sense, and its speed is
    right."""
    with tempfile.TemporaryDirectory(prefix="longshore-bench-") as folder:
        longer = Path(folder) / "longer"
        shutil.copytree(model, longer)
        config = json.loads((longer / "config.json").read_text())
        config["max_position_embeddings"] = num_positions
        (longer / "config.json").write_text(json.dumps(config))
        yield longer


# Arrivals


async def arrive(
    url: str, prompts: Sequence[Sequence[int]], waits_s: Sequence[float], num_tokens: int
) -> list[HttpAnswer | Exception]:
    """The answers to prompts that arrive after these waits, each after the one before."""
    tasks = []
    at_s = time.perf_counter()
    for prompt, wait_s in zip(prompts, waits_s, strict=True):
        at_s += wait_s
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(url, prompt, num_tokens)))
    return await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[return-value]


def mixed(options: argparse.Namespace) -> list[dict[str, Any]]:
    count = max(4, round(options.rate * options.seconds))
    waits_s = np.random.default_rng(0).exponential(1 / options.rate, count).tolist()
    prompts = prompts_of(count, options.prompt_tokens, seed=1)
    flags = ("--threads", "1", "--no-enable-prefix-caching", *options.flags)
    sides = {f"two unified, chunk {chunk}": ("--replicas", "2", "--max-num-batched-tokens",
             str(chunk)) for chunk in options.chunks}  # fmt: skip
    rows = []
    for name, more in {"1 prefill, 1 decode": SPLIT, **sides}.items():
        with serving(options.model, *flags, *more) as url:
            asyncio.run(arrive(url, prompts_of(2, 64, seed=2), (0.0, 0.0), 8))
            answers = asyncio.run(arrive(url, prompts, waits_s, options.output_tokens))
        streams = [times_of(each) for each in answers if isinstance(each, HttpAnswer)]
        assert len(streams) == count, "some requests failed"
        ttft_ms = [each.ttft_s * 1e3 for each in streams]
        gaps_ms = [gap * 1e3 for each in streams for gap in each.gaps_s]
        late_ms = [gap * 1e3 for each in streams for gap in each.gaps_s[1:]]
        rows.append(
            {
                "engines": name,
                "requests": count,
                "ttft_p50_ms": float(np.median(ttft_ms)),
                "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
                "itl_p50_ms": float(np.median(gaps_ms)),
                "itl_p99_ms": float(np.percentile(gaps_ms, 99)),
                "itl_p99_from_second_ms": float(np.percentile(late_ms, 99)),
                "itl_p999_from_second_ms": float(np.percentile(late_ms, 99.9)),
            }
        )
    return rows


# Overload


async def closed_loop(url: str, num_clients: int, seconds: float, options: Any) -> float:
    """Requests per second with so many clients that each wait for their answer."""
    numbers = itertools.count(1_000_000)
    stop_s = time.perf_counter() + seconds
    num_ended = 0

    async def client() -> None:
        nonlocal num_ended
        while time.perf_counter() < stop_s:
            (prompt,) = prompts_of(1, options.prompt_tokens, seed=next(numbers))
            answer = await ask(url, prompt, options.output_tokens)
            num_ended += answer.status == 200

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return num_ended / seconds


def overload(options: argparse.Namespace) -> list[dict[str, Any]]:
    flags = ("--threads", "1", "--no-enable-prefix-caching", *options.flags, *SPLIT)
    with serving(options.model, *flags) as url:
        per_s = asyncio.run(closed_loop(url, options.clients, options.seconds / 10, options))
        rate = options.factor * per_s
        count = round(rate * options.seconds)
        waits_s = np.random.default_rng(0).exponential(1 / rate, count).tolist()
        before = metrics(url, of_workers=True)
        prompts = prompts_of(count, options.prompt_tokens, seed=3)
        answers = asyncio.run(arrive(url, prompts, waits_s, options.output_tokens))
        window = Window(metrics(url, of_workers=True), before)
    statuses = Counter(
        each.status if isinstance(each, HttpAnswer) else type(each).__name__ for each in answers
    )
    accepted = [each for each in answers if isinstance(each, HttpAnswer) and each.status == 200]
    complete = [each for each in accepted if not any(b'"error"' in data for _, data in each.events)]
    # The prefill engine computes the prompt, and with it the first token of the answer; the decode
    # engine computes one token for each further one.
    num_continued = window.added("longshore_generated_tokens_total") - len(accepted)
    computed = {
        role: window.added("longshore_worker_step_tokens_sum", {"engine": engine})
        for role, engine in (("prefill", "0"), ("decode", "1"))
    }
    computed["decode"] -= num_continued
    num_accepted_tokens = len(accepted) * options.prompt_tokens
    return [
        {
            "seconds": options.seconds,
            "capacity_per_s": per_s,
            "offered_per_s": rate,
            "requests": count,
            "statuses": {str(status): number for status, number in statuses.items()},
            "errors_in_streams": len(accepted) - len(complete),
            "pulls": {
                outcome: window.added("longshore_kv_pulls_total", {"outcome": outcome})
                for (outcome,) in window.now.label_values("longshore_kv_pulls_total", "outcome")
            },
            "expired_leases": window.added("longshore_kv_pull_expired_leases_total"),
            "refused_leases": window.added("longshore_kv_pull_refused_leases_total"),
            "computed_prompt_tokens": computed,
            "accepted_prompt_tokens": num_accepted_tokens,
            "reprefilled_tokens": sum(computed.values()) - num_accepted_tokens,
            "ttft_p50_ms": float(np.median([times_of(each).ttft_s * 1e3 for each in complete])),
        }
    ]


def main() -> None:
    parser = report.parser(__doc__)
    kinds = {"idle": idle, "handover": handover, "mixed": mixed, "overload": overload}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="%(default)s")
    parser.add_argument("--output-tokens", type=int, default=64, help="%(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--rate", type=float, default=2.0, help="prompts per second: %(default)s")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--clients", type=int, default=32, help="for the capacity: %(default)s")
    parser.add_argument("--factor", type=float, default=3.0, help="%(default)s")
    options, flags = parser.parse_known_args()
    options.flags = ["--log-level", "warning", *flags]
    if options.requests is None:
        options.requests = 5 if options.kind == "handover" else 40
    if options.seconds is None:
        options.seconds = 300.0 if options.kind == "overload" else 60.0
    report.write(options.json, kinds[options.kind](options))


if __name__ == "__main__":
    main()
