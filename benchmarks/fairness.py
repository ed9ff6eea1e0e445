"""Time to first token of one API key's short requests, alone and beside a flood of another key.

    python benchmarks/fairness.py [--model DIR] [--flood 1000] [--requests 200] [--rows 256]
                                  [--policies fcfs fair] [--json F]

The flood sends all its requests at once. When it gets tokens, the other key sends short requests
one by one, until it has sent `--requests` of them or the flood has ended. `step_p99_ms` is the
99th percentile of the time between two tokens of the flood's streams, of which every 20th is
watched. `steps` is what the flood adds to the other key's p99, in such steps; with `fair` the
target is 3.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import report
from stack_overhead import serving

from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.model.demo import DEMO_MODEL_DIR

TIMEOUT_S = 600.0
WATCHED = 20
FLOOD_TOKENS, SHORT_TOKENS = 64, 2
PROMPT_TOKENS = 48
KEYS = "".join(f'[[key]]\nname = "{name}"\nkey = "{name}"\n' for name in ("flood", "short"))


@contextlib.contextmanager
def serving_both(model: Path, policy: str, rows: int) -> Iterator[str]:
    """Run a server with both keys; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(KEYS)
        flags = ["--threads", "1", "--max-num-seqs", str(rows)]
        flags += ["--api-key-file", str(keys), "--scheduling-policy", policy]
        with serving(model, *flags) as url:
            yield url


async def ask(
    endpoint: HttpEndpoint,
    prompt: list[int],
    max_tokens: int,
    on_event: Callable[[bytes], None] | None = None,
) -> HttpAnswer:
    """A stream of `max_tokens` tokens, an event for each."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    answer = await endpoint.request(
        "POST",
        "/v1/completions",
        json.dumps(body).encode(),
        timeout_s=TIMEOUT_S,
        on_event=on_event,
    )
    assert answer.status == 200, answer.body
    return answer


async def ask_one_by_one(
    url: str, prompts: list[list[int]], goes_on: Callable[[], bool] = lambda: True
) -> list[float]:
    """Times to the first token, in ms; no more requests are sent once `goes_on` is false."""
    endpoint = HttpEndpoint(url, api_key="short")
    times_ms = []
    for prompt in prompts:
        if not goes_on():
            break
        answer = await ask(endpoint, prompt, SHORT_TOKENS)
        times_ms.append(1e3 * (answer.events[0][0] - answer.sent_s))
    return times_ms


def run_flood(url: str, prompts: list[list[int]], pipe: Connection) -> None:
    """Run in a process of its own, so that the other client does not wait for this one: sends None
    with the first token, and at the end the gaps between tokens of the watched streams, in ms."""

    async def run() -> list[float]:
        events: list[bytes] = []

        def on_event(data: bytes) -> None:
            if not events:
                pipe.send(None)
            events.append(data)

        endpoint = HttpEndpoint(url, api_key="flood")
        answers = await asyncio.gather(
            *(ask(endpoint, prompt, FLOOD_TOKENS, on_event) for prompt in prompts)
        )
        return [
            1e3 * gap
            for answer in answers[::WATCHED]
            for gap in np.diff([at for at, data in answer.events if data != b"[DONE]"])
        ]

    pipe.send(asyncio.run(run()))


def measure(url: str, num_flood: int, num_short: int) -> dict[str, Any]:
    prompts = random_prompts(
        num_flood + 2 * num_short,
        input_len=PROMPT_TOKENS,
        shared_prefix=0,
        vocab_size=200,
        generator=np.random.default_rng(0),
    )
    short, others, flood = (
        prompts[:num_short],
        prompts[num_short : 2 * num_short],
        prompts[2 * num_short :],
    )
    asyncio.run(ask_one_by_one(url, short[:5]))  # warm up
    alone_ms = asyncio.run(ask_one_by_one(url, [prompt[1:] for prompt in short]))
    here, there = Pipe()
    process = get_context("spawn").Process(target=run_flood, args=(url, flood, there))
    process.start()
    here.recv()
    beside_ms = asyncio.run(ask_one_by_one(url, others, goes_on=lambda: not here.poll()))
    gaps_ms = here.recv()
    process.join()
    alone, beside, step = (
        float(np.percentile(each, 99)) for each in (alone_ms, beside_ms, gaps_ms)
    )
    return {
        "alone_p50_ms": float(np.median(alone_ms)),
        "alone_p99_ms": alone,
        "beside": len(beside_ms),
        "first_ms": beside_ms[0],
        "beside_p50_ms": float(np.median(beside_ms)),
        "beside_p99_ms": beside,
        "step_p99_ms": step,
        "steps": (beside - alone) / step,
        "beside_each_ms": beside_ms,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--model", type=Path, default=DEMO_MODEL_DIR)
    arguments.add_argument("--flood", type=int, default=1000)
    arguments.add_argument("--requests", type=int, default=200)
    arguments.add_argument("--rows", type=int, default=256)
    arguments.add_argument("--policies", nargs="+", default=["fcfs", "fair"])
    given = arguments.parse_args()
    rows = []
    for policy in given.policies:
        with serving_both(given.model, policy, given.rows) as url:
            result = measure(url, given.flood, given.requests)
        rows.append({"policy": policy, "rows": given.rows, **result})
    report.write(given.json, rows)


if __name__ == "__main__":
    main()
