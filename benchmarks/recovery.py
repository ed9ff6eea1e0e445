"""Time from the death of a process to the next token of a live stream.

    python benchmarks/recovery.py [--model DIR] [--victims scheduler worker] [--turns 10]
        [--prompt-tokens 64] [--json F]

Each turn starts a server, opens `--streams` greedy streams, kills one process (SIGKILL) and
measures until each stream goes on: the end of its longest gap after the kill, because tokens that
were on their way still arrive. A server is used once, since a second death soon after the first one
is followed by a delay. All streams must have the tokens of a run without a death. The victims take
turns. Further options are those of `longshore serve`; with `--standby-workers`, the standbys are
ready before the kill. `ready_s` is the time from the start of a server until it serves.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import report
from stack_overhead import serving

from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.model.demo import DEMO_MODEL_DIR

TIMEOUT_S: Final = 120.0
KILL_AFTER_TOKENS: Final = 50
FILES: Final = {"scheduler": "scheduler.json", "worker": "worker-0.json"}


def find(victim: str) -> psutil.Process:
    """The process of the server that this benchmark has started."""
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if command and Path(command[-1]).name == FILES[victim]:
            return process
    raise LookupError(f"there is no {victim}")


def wait_for_standbys() -> None:
    """Until `longshore admin status` shows standbys, and all processes are ready."""
    command = [sys.executable, "-m", "longshore.deploy", "admin", "status"]
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        status = subprocess.run(command, capture_output=True, text=True, check=False)
        if status.returncode == 0 and "standby" in status.stdout:
            return
        time.sleep(0.5)
    raise TimeoutError(status.stdout + status.stderr)


async def ask(url: str, prompt: list[int], num_tokens: int, many: asyncio.Event) -> HttpAnswer:
    """A greedy stream. many: set when it has KILL_AFTER_TOKENS tokens, of which an event can have
    several."""
    num_received = 0

    def count(data: bytes) -> None:
        nonlocal num_received
        if data != b"[DONE]":
            num_received += len(tokens_of(data))
        if num_received >= KILL_AFTER_TOKENS:
            many.set()

    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer = await HttpEndpoint(url).request(
        "POST", "/v1/completions", json.dumps(body).encode(), timeout_s=TIMEOUT_S, on_event=count
    )
    assert answer.status == 200, answer.body
    return answer


async def run(
    url: str, prompts: Sequence[list[int]], num_tokens: int, victim: str | None
) -> tuple[list[HttpAnswer], float]:
    """All streams, and when the victim was killed."""
    events = [asyncio.Event() for _ in prompts]
    process = None if victim is None else find(victim)
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(ask(url, prompt, num_tokens, many))
            for prompt, many in zip(prompts, events, strict=True)
        ]
        for many in events:
            await many.wait()
        killed_s = time.perf_counter()
        if process is not None:
            process.kill()
    return [stream.result() for stream in streams], killed_s


def token_ids(answer: HttpAnswer) -> list[int]:
    events = (data for _, data in answer.events if data != b"[DONE]")
    return [token_id for data in events for token_id in tokens_of(data)]


def tokens_of(data: bytes) -> list[int]:
    """The token ids of an event."""
    event = json.loads(data)
    assert "error" not in event, event
    return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or ()]


def recovery_s(answer: HttpAnswer, killed_s: float) -> float:
    """Time from the kill to the end of the longest gap after it."""
    times = [at for at, data in answer.events if data != b"[DONE]"]
    gaps = [
        (later - max(earlier, killed_s), later)
        for earlier, later in itertools.pairwise(times)
        if later > killed_s
    ]
    assert gaps, "the streams ended before the kill"
    return max(gaps)[1] - killed_s


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    parser.add_argument("--victims", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream: %(default)s")
    options, flags = parser.parse_known_args()
    flags = ["--dtype", "float32", "--log-level", "warning", *flags]
    prompts = random_prompts(
        options.streams,
        input_len=options.prompt_tokens,
        shared_prefix=0,
        vocab_size=200,
        generator=np.random.default_rng(0),
    )

    ready_s: list[float] = []

    def turn(victim: str | None) -> tuple[list[list[int]], list[float]]:
        begin_s = time.perf_counter()
        with serving(options.model, *flags) as url:
            ready_s.append(time.perf_counter() - begin_s)
            if "--standby-workers" in flags:
                wait_for_standbys()
            answers, killed_s = asyncio.run(run(url, prompts, options.tokens, victim))
        return [token_ids(answer) for answer in answers], [
            recovery_s(answer, killed_s) for answer in answers if victim is not None
        ]

    calm, _ = turn(None)
    samples: dict[str, list[float]] = {victim: [] for victim in options.victims}
    for _ in range(options.turns):
        for victim in options.victims:
            tokens, recovered_s = turn(victim)
            assert tokens == calm, f"the death of the {victim} has changed a token"
            samples[victim] += recovered_s
    rows: list[dict[str, Any]] = [
        {
            "victim": victim,
            "turns": options.turns,
            "min_s": min(each),
            "p50_s": float(np.median(each)),
            "p99_s": float(np.percentile(each, 99)),
            "each_s": each,
            "ready_s": float(np.median(ready_s)),
        }
        for victim, each in samples.items()
    ]
    report.write(options.json, rows, flags=flags, streams=options.streams)


if __name__ == "__main__":
    main()
