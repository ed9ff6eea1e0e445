"""CPU time of API servers per streamed token: ours and vLLM's, as parts of whole systems.

    python benchmarks/gateway_peer.py [--streams 64 256] [--json F]

Both serve the demo model on the CPU, each with its engine in separate processes, and serve the same
streams in turn. Only the CPU time of the HTTP process counts, from before the first request until
after the last answer, divided by the number of tokens. The engines' CPU time does not count, but
their speed matters: with a faster engine, an API server combines more tokens into one event.
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import report
from gateway_capacity import CHAT, TEXT, cpu_of, wait_until_ready
from gateway_load import Streams

from longshore.deploy.model.demo import DEMO_MODEL_DIR

TIMEOUT_S: Final = 300.0
PATHS: Final = {"chat": ("/v1/chat/completions", CHAT), "completions": ("/v1/completions", TEXT)}


class Server(NamedTuple):
    """pid: the HTTP process."""

    port: int
    pid: int

    def measure(self, kind: str, num_streams: int, num_tokens: int) -> dict[str, float]:
        path, body = PATHS[kind]
        more = {"model": "demo", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        bodies = [{**body, **more, "seed": seed} for seed in range(num_streams)]
        before = cpu_of(self.pid)
        streams = Streams(self.port, path, bodies, num_probes=1)
        while streams.num_open:
            streams.read(TIMEOUT_S)
        after = cpu_of(self.pid)
        streams.close()
        total = num_streams * num_tokens
        return {
            "us_per_token": (sum(after) - sum(before)) / total,
            "user_us": (after.user_us - before.user_us) / total,
            "system_us": (after.system_us - before.system_us) / total,
            "tokens_per_event": total / streams.num_events,
        }


@contextlib.contextmanager
def serving(
    command: list[str], path: str, environment: dict[str, str], find: Callable[[int], int]
) -> Iterator[Server]:
    """find: returns the HTTP process, given the process that was started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until_ready(port, path, TIMEOUT_S)
            yield Server(port, find(process.pid))
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def gateway_of(supervisor: int) -> int:
    children = Path(f"/proc/{supervisor}/task").glob("*/children")
    for child in (int(pid) for each in children for pid in each.read_text().split()):
        if b"longshore.deploy.gateway" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise RuntimeError(f"process {supervisor} has no gateway")


def main() -> None:
    parser = report.parser(__doc__, peer="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="per answer")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = str(DEMO_MODEL_DIR)
    ours = [sys.executable, "-m", "longshore.deploy", "serve", model]
    ours += ["--served-model-name", "demo", "--max-num-seqs", "256"]
    theirs = [str(args.peer_python), "-m", "vllm.entrypoints.openai.api_server"]
    theirs += ["--model", model, "--dtype", "bfloat16", "--enforce-eager"]
    theirs += ["--served-model-name", "demo", "--max-num-seqs", "256", "--max-model-len", "1024"]
    peer = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    peer |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        sides = {"longshore": stack.enter_context(serving(ours, "/ready", {}, gateway_of))}
        if args.peer_python.exists():
            vllm = serving(theirs, "/health", peer, lambda pid: pid)
            sides["vllm"] = stack.enter_context(vllm)
        else:
            print(f"*** NO PEER: {args.peer_python} does not exist", file=sys.stderr)
        for kind in PATHS:
            for num_streams in args.streams:
                runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
                for _ in range(args.repeats):
                    for name, server in sides.items():
                        runs[name].append(server.measure(kind, num_streams, args.tokens))
                for name, done in runs.items():
                    costs = [run["us_per_token"] for run in done]
                    medians = {key: statistics.median(run[key] for run in done) for key in done[0]}
                    row = {"side": name, "kind": kind, "streams": num_streams, **medians}
                    rows.append({**row, "least_us": min(costs), "most_us": max(costs)})
    report.write(args.json, rows)


if __name__ == "__main__":
    main()
