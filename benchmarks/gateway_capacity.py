"""CPU time of the gateway per streamed token, and the delay that the gateway adds to a token.

    python benchmarks/gateway_capacity.py [--baseline CHECKOUT] [--streams 1 256] [--json F]

The gateway process is that of `longshore serve`. Its engine computes nothing: it sends one message
per step with a token for every stream. The clients read raw streams in a separate process. CPU time
is the gateway's user and system time over all threads, from /proc, between two points at which all
sent tokens have arrived. With `--baseline`, the gateway of another checkout takes turns with this
one, case by case.
"""

import contextlib
import http.client
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import gateway_load
import msgspec
import numpy as np
import report
from gateway_load import IDENTITY, STRIDE, Job, Streams

from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import SamplingDefaults
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.commands import EngineMember
from longshore.protocol.transport.channel import Endpoint

VOCAB_SIZE: Final = 1600
NUM_TOKENS: Final = 4096
NUM_PROBES: Final = 4
NUM_WARM_STEPS: Final = 20
TIMEOUT_S: Final = 60.0

CHAT: Final = {"messages": [{"role": "user", "content": "Where is crate 7?"}]}
TEXT: Final = {"prompt": "Crate 7 is in"}
STOPS: Final = {"stop": ["###", "</answer>"]}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", TEXT),
    "chat+logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "completions+logprobs": ("/v1/completions", {**TEXT, "logprobs": 2}),
    "chat+stops": ("/v1/chat/completions", {**CHAT, **STOPS}),
}


class Case(NamedTuple):
    kind: str
    num_streams: int
    steps_per_s: float | None


class Cpu(NamedTuple):
    """CPU time of a process, in microseconds."""

    user_us: float
    system_us: float


def cpu_of(pid: int) -> Cpu:
    """The sum is exact, as the kernel counts it in nanoseconds; the split is by clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    total_us = sum(int(each.read_text().split()[0]) for each in threads) / 1e3
    return Cpu(total_us * user / (user + system), total_us * system / (user + system))


class GatewayUnderTest:
    """The gateway of one checkout, with its engine."""

    def __init__(self, checkout: Path, token_ids: list[int], text_ends: list[int]) -> None:
        self._text_ends = text_ends
        self._runtime_dir = RuntimeDir()
        endpoint = self._runtime_dir.endpoint("clients")
        context = multiprocessing.get_context("spawn")
        self._jobs, jobs = context.Pipe()
        self._engine = context.Process(
            target=gateway_load.run_engine, args=(endpoint, token_ids, jobs), daemon=True
        )
        self._engine.start()
        jobs.close()
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            self.port = listener.getsockname()[1]
            # Settings that the gateways of both checkouts have.
            config = {**settings_of_model(checkout, endpoint), "listen_fd": listener.fileno()}
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                file.write(msgspec.json.encode(config))
                file.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "longshore.deploy.gateway", file.name],
                    env={**os.environ, "PYTHONPATH": str(checkout / "src")},
                    pass_fds=(listener.fileno(),),
                )
                wait_until_ready(self.port)

    def measure(self, case: Case, seconds: float) -> dict[str, Any]:
        """A row. Times in microseconds."""
        path, body = KINDS[case.kind]
        more = {"stream": True, "max_tokens": 1 << 18}
        bodies = [{**body, **more, "seed": seed} for seed in range(case.num_streams)]
        # The number of unpaced steps is limited, so that their queue can drain.
        num_steps = round(seconds * (case.steps_per_s or 20_000 / case.num_streams))
        before = cpu_of(self._process.pid)
        streams = Streams(self.port, path, bodies, NUM_PROBES)
        self._carry_out(streams, Job(case.num_streams, NUM_WARM_STEPS, 50))
        self._read(streams, NUM_WARM_STEPS)
        num_before, start = streams.num_events, cpu_of(self._process.pid)
        sent_s = self._carry_out(streams, Job(case.num_streams, num_steps, case.steps_per_s))
        self._read(streams, NUM_WARM_STEPS + num_steps)
        end = cpu_of(self._process.pid)
        num_events = streams.num_events - num_before
        self._carry_out(streams, Job(case.num_streams, 0, ends=True))
        while streams.num_open:
            streams.read(TIMEOUT_S)
        after = cpu_of(self._process.pid)
        streams.close()
        num_tokens = case.num_streams * num_steps
        user, system = ((b - a) / num_tokens for a, b in zip(start, end, strict=True))
        rest = sum(after) - sum(end) + sum(start) - sum(before)
        rest -= (user + system) * case.num_streams * NUM_WARM_STEPS
        late = self._lateness_us(streams, sent_s)
        return {
            "us_per_token": user + system,
            "user_us": user,
            "system_us": system,
            "tokens_per_event": num_tokens / num_events,
            "us_per_request": rest / case.num_streams,
            "cores": (user + system) * num_tokens / 1e6 / (sent_s[-1] - sent_s[0]),
            "late_p50_us": float(np.percentile(late, 50)),
            "late_p99_us": float(np.percentile(late, 99)),
        }

    def _carry_out(self, streams: Streams, job: Job) -> list[float]:
        self._jobs.send(job)
        while not self._jobs.poll():
            streams.read(0.01)
        sent_s: list[float] = self._jobs.recv()
        return sent_s

    def _read(self, streams: Streams, num_steps: int) -> None:
        """Read until this many tokens have arrived at each probe, and no stream has more data."""
        deadline_s = time.perf_counter() + TIMEOUT_S
        while not all(
            arrivals and arrivals[-1][1] >= self._num_characters(seed, num_steps)
            for seed, arrivals in enumerate(streams.arrivals)
        ):
            streams.read(0.1)
            if time.perf_counter() > deadline_s:
                raise RuntimeError("tokens were lost or arrived too slowly")
        while streams.read(0.05):
            pass

    def _num_characters(self, seed: int, num_steps: int) -> int:
        """Length of the text of a stream's first tokens; the first word can lack its space."""
        first = seed * STRIDE
        rounds, left = divmod(first + num_steps, NUM_TOKENS)
        before = 0 if first == 0 else self._text_ends[first % NUM_TOKENS - 1]
        before += first // NUM_TOKENS * self._text_ends[-1]
        return rounds * self._text_ends[-1] + (self._text_ends[left - 1] if left else 0) - before

    def _lateness_us(self, streams: Streams, sent_s: list[float]) -> list[float]:
        late = []
        for seed, arrivals in enumerate(streams.arrivals):
            came = iter(arrivals)
            now_s, num_characters = next(came)
            for step, step_s in enumerate(sent_s):
                wanted = self._num_characters(seed, NUM_WARM_STEPS + step + 1)
                while num_characters < wanted:
                    now_s, num_characters = next(came)
                late.append((now_s - step_s) * 1e6)
        return late

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._jobs.close()
        self._engine.join()
        self._runtime_dir.remove()


def settings_of_model(checkout: Path, endpoint: Endpoint) -> dict[str, Any]:
    """The settings for the model and its engine; other ones in checkouts from before gateways had
    several models."""
    settings = {
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (),
        "max_model_len": IDENTITY.max_model_len,
        "sampling_defaults": SamplingDefaults(),
    }
    folder, name, fingerprint = str(DEMO_MODEL_DIR), "demo", IDENTITY.model_fingerprint
    if "class ModelConfig" in (checkout / "deploy/gateway/config.py").read_text():
        own = {"folder": folder, "name": name, "fingerprint": fingerprint}
        return {"models": [{**settings, **own, "members": [EngineMember(0, "unified", endpoint)]}]}
    own = {"model": folder, "served_model_name": name, "model_fingerprint": fingerprint}
    return {**settings, **own, "engines": (endpoint,)}


def wait_until_ready(port: int, path: str = "/ready", timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.perf_counter() + timeout_s
    while time.perf_counter() < deadline_s:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        with contextlib.closing(connection), contextlib.suppress(ConnectionError):
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"no server at port {port} became ready in {timeout_s:g} s")


def tokens_of_the_demo_model() -> tuple[list[int], list[int]]:
    """Random tokens, each of whole characters, and the length of the text up to each."""
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    assert tokenizer is not None
    texts = {i: tokenizer.decode([i, i])[len(tokenizer.decode([i])) :] for i in range(VOCAB_SIZE)}
    special = tokenizer.special_token_ids
    usable = [i for i, text in texts.items() if text and text.isascii() and i not in special]
    token_ids = random.Random(0).choices(usable, k=NUM_TOKENS)
    return token_ids, np.cumsum([len(texts[i]) for i in token_ids]).tolist()


def rows(
    cases: list[Case], sides: dict[str, GatewayUnderTest], seconds: float, repeats: int
) -> Iterator[dict[str, Any]]:
    for case in cases:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, side in sides.items():
                results[name].append(side.measure(case, seconds))
        for name, runs in results.items():
            costs = [run["us_per_token"] for run in runs]
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rate = case.steps_per_s or "unpaced"
            row = {"side": name, "kind": case.kind, "streams": case.num_streams, "steps/s": rate}
            yield {**row, **medians, "least_us": min(costs), "most_us": max(costs), "runs": runs}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--steps-per-s", type=float, nargs="+", default=[10, 25, 50, 0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=3.0, help="per case and side")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path, help="checkout whose gateway is measured in turn")
    args = parser.parse_args()
    cases = [
        Case(kind, num_streams, rate or None)
        for kind in args.kinds
        for num_streams in args.streams
        for rate in args.steps_per_s
    ]
    checkouts = {"this": report.ROOT}
    if args.baseline is not None:
        checkouts["baseline"] = args.baseline
    tokens = tokens_of_the_demo_model()
    sides: dict[str, GatewayUnderTest] = {}
    try:
        for name, checkout in checkouts.items():
            sides[name] = GatewayUnderTest(checkout.resolve(), *tokens)
        done = []
        for row in rows(cases, sides, args.seconds, args.repeats):
            done.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "runs"}), file=sys.stderr)
        report.write(args.json, done)
    finally:
        for side in sides.values():
            side.close()


if __name__ == "__main__":
    main()
