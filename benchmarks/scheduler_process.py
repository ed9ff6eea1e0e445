"""The scheduler process: startup time and memory, by pool size.

    python benchmarks/scheduler_process.py [--num-blocks 100000 1000000] [--json F]

This program is the worker. It sends its hello at once, so that only the scheduler process is timed,
from its start until it reports that it is ready.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import report
import zmq

from longshore.protocol.handshake import (
    EngineIdentity,
    FromWorker,
    ToWorker,
    WorkerAccepted,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    HeadShare,
    KVCacheConfig,
    KVCacheGroup,
)
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    open_socket,
)
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Progress,
    Ready,
    decode_report,
)
from longshore.scheduler.config import CacheConfig, SchedulerConfig, SchedulerProcessConfig

MAX_MODEL_LEN = 8192
IDENTITY = EngineIdentity(
    model_fingerprint="benchmark",
    dtype="bfloat16",
    block_size=16,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    hash_seed_digest="benchmark",
)


def measure(num_blocks: int) -> tuple[float, float]:
    """(seconds from start to ready, resident MB when ready) of one fresh process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as directory, ours:
        endpoint = Endpoint(f"ipc://{directory}/worker")
        config = SchedulerProcessConfig(
            scheduler=SchedulerConfig(
                max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=IDENTITY.max_num_batched_tokens
            ),
            cache=CacheConfig(),
            identity=IDENTITY,
            workers=(endpoint,),
            clients=Endpoint(f"ipc://{directory}/clients"),
            hash_seed="00" * 32,
            vocab_size=1000,
            rank_timeout_s=60.0,
            lifeline_fd=theirs.fileno(),
        )
        path = Path(directory, "scheduler.json")
        path.write_bytes(msgspec.json.encode(config))
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "longshore.scheduler", str(path)],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        worker: Channel[FromWorker, ToWorker] = Channel(
            open_socket(context, zmq.DEALER, endpoint, bind=False), ToWorker
        )
        spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype_bytes=2)
        groups, heads = (KVCacheGroup(("layer",), spec),), HeadShare(0, 8, 8)
        worker.send(WorkerHello(0, IDENTITY, KVCacheConfig(num_blocks, groups, "bfloat16"), heads))
        assert isinstance(worker.receive(30), WorkerAccepted)
        worker.send(WorkerReady(0))
        with ours.makefile("rb") as lines:
            while isinstance(reported := decode_report(lines.readline()), Progress):
                continue
        elapsed_s = time.perf_counter() - started
        assert isinstance(reported, Ready), reported
        rss_mb = _resident_mb(process.pid)
        process.send_signal(STOP_SIGNAL)
        process.wait(10)
        worker.close()
    context.term()
    return elapsed_s, rss_mb


def _resident_mb(pid: int) -> float:
    num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--num-blocks", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    rows = []
    for num_blocks in options.num_blocks:
        measured = [measure(num_blocks) for _ in range(options.repeats)]
        rows.append(
            {
                "num_blocks": num_blocks,
                "start_s": statistics.median(time_s for time_s, _ in measured),
                "start_max_s": max(time_s for time_s, _ in measured),
                "rss_mb": max(rss_mb for _, rss_mb in measured),
            }
        )
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
