"""How fast an engine pulls the KV of a prompt from another one, compared with the transfer library.

    python benchmarks/pull_transfer.py [--cases C ...] [--tokens N ...] [--repeats R] [--json F]

Both sides have a process with the halves of the connector, but without a model. The library reads
the same bytes from the same blocks of the same memory by itself, in turns with the connector. Gloo
cannot read blocks: alone, it sends as many bytes that are in one place already. NIXL's progress
threads sleep for both, as in an engine; by default they poll. Blocks of 16 tokens are scattered
over both sides, so each is one descriptor. Rates are in 10^9 bytes per second, and medians.

`connector` is the rate from the request to its end, which includes everything that the connector
does; `ratio` is this rate divided by the library's, and the aim is 0.8. `handover_ms` is what is
not the read: the lease, the claim, the check after the read, and the work of all halves. The aim is
that it does not depend on the number of tokens. `first_ms` is the same for the first request to an
owner, with the handshake.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
import torch
import torch.distributed as dist

from longshore.connectors.base import (
    ConnectorOutput,
    GroupBlocks,
    KVCaches,
    RequestView,
    StepView,
    WorkerConnectorConfig,
)
from longshore.connectors.pull import transports
from longshore.connectors.pull.scheduler import (
    MooncakeConnector,
    NixlConnector,
    P2PNcclConnector,
    PullConnector,
)
from longshore.connectors.pull.transport import BlockReads, Read, ReadState, Transport
from longshore.connectors.pull.worker import MooncakeWorker, NixlWorker, P2PNcclWorker, PullWorker
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import FullAttentionSpec
from longshore.protocol.outputs import FinishReason

CASES: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "nixl": ("nixl", {}),
    "nixl over tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "mooncake over tcp": ("mooncake", {}),
    "p2p_nccl with gloo": ("p2p_nccl", {}),
}
"""Connector, and variables of both processes."""

HALVES: Final[dict[str, tuple[type[PullConnector], type[PullWorker]]]] = {
    "nixl": (NixlConnector, NixlWorker),
    "mooncake": (MooncakeConnector, MooncakeWorker),
    "p2p_nccl": (P2PNcclConnector, P2PNcclWorker),
}
BLOCK_SIZE: Final = 16
LAYERS: Final = tuple(f"layer.{number}" for number in range(2))
SPEC: Final = FullAttentionSpec(BLOCK_SIZE, 8, 128, 2)
BLOCK_BYTES: Final = len(LAYERS) * SPEC.page_size_bytes
LIMIT_S: Final = 60.0
OPTIONS: Final = {"max_leased_share": 1.0, "lease_s": 60.0}


class TimedTransport:
    """A transport that notes when its reads began and ended."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.read_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def post(self, peer: str, reads: Sequence[BlockReads]) -> Sequence[Read]:
        started = time.perf_counter()
        return [TimedRead(self, read, started) for read in self._transport.post(peer, reads)]


class TimedRead:
    def __init__(self, timed: TimedTransport, read: Read, started: float) -> None:
        self._timed, self._read, self._started = timed, read, started

    def poll(self) -> ReadState:
        state = self._read.poll()
        if state is not ReadState.IN_PROGRESS:
            self._timed.read_s = max(self._timed.read_s, time.perf_counter() - self._started)
        return state


class Side:
    """Both halves of the connector, and what an engine does for them."""

    def __init__(self, connector: str, num_blocks: int) -> None:
        self.memory = torch.zeros((num_blocks, BLOCK_BYTES), dtype=torch.uint8)
        shared: dict[str, Any] = {
            "options": OPTIONS,
            "block_size": BLOCK_SIZE,
            "num_blocks": num_blocks,
            "specs": (SPEC,),
            "kv_dtype": "auto",
            "kv_layout": "heads",
            "engine_id": f"engine-{os.getpid()}.1",
            "identity": EngineIdentity("model", "bfloat16", BLOCK_SIZE, 1 << 17, 1, 1 << 13, ""),
        }
        make = transports.TRANSPORTS[connector]
        self.transports: list[TimedTransport] = []

        def timed(options: Any) -> Any:
            self.transports.append(TimedTransport(make(options)))
            return self.transports[-1]

        transports.TRANSPORTS[connector] = timed
        scheduler_half, worker_half = HALVES[connector]
        config = WorkerConnectorConfig(**shared)
        self.half, self.worker = scheduler_half(config), worker_half(config)
        self.half.bind_blocks(self)
        self.woken = threading.Event()
        self._num_holds = 0
        group = GroupBlocks(SPEC, LAYERS, self.memory, {})
        self.worker.register_kv_caches(KVCaches((group,), torch.device("cpu")), self)
        self.exchange()

    def exchange(self) -> set[str]:
        """Reports of the worker, then a plan; returns the requests whose loads have ended."""
        ended = self.worker.get_finished(())
        assert not ended.failed_block_ids, "a pull has failed; its log says why"
        metadata = self.worker.build_connector_worker_meta()
        if metadata or ended.received:
            of_report = (metadata,) if metadata else ()
            received = list(ended.received)
            output = ConnectorOutput(1, finished_receiving=received, metadata=of_report)
            self.half.update_connector_output(output)
        if self.half.has_pending_work:
            plan = self.half.build_connector_meta(StepView(1, 0))
            self.worker.start_load_kv(self.worker.bind_connector_metadata(plan))
        return set(ended.received)

    # As `BlockHolds`, and as the queues of a worker

    def hold(self, block_ids: Sequence[int]) -> int:
        self._num_holds += 1
        return self._num_holds

    def release(self, hold_id: int) -> None:
        pass

    def open(self, name: str, *, on_host: bool = False) -> Any:
        raise NotImplementedError

    def computed(self) -> Any:
        raise NotImplementedError

    def wake(self) -> None:
        self.woken.set()


def tokens_of(num_tokens: int) -> Int32Array:
    """A prompt, and the token that was sampled from it."""
    return int32_array(np.arange(num_tokens + 1) % 30000)


def blocks_of(num_tokens: int, num_blocks: int, seed: int) -> Int32Array:
    shuffled = np.random.default_rng(seed).permutation(num_blocks - 1) + 1
    return int32_array(shuffled[: num_tokens // BLOCK_SIZE])


# The library by itself


class LibraryPeer:
    """The library, with the memory of a `Side` registered a second time."""

    def __init__(self, connector: str, memory: torch.Tensor) -> None:
        self._is_nixl = connector == "nixl"
        self._first, size = memory.data_ptr(), memory.numel()
        if self._is_nixl:
            from nixl._api import nixl_agent, nixl_agent_config

            name = f"benchmark-{os.getpid()}"
            self._library: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
            self._library.register_memory([(self._first, size, 0, "")], "DRAM")
            self.address = self._library.get_agent_metadata().hex()
        else:
            from mooncake.engine import TransferEngine

            self._library = TransferEngine()
            assert self._library.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert self._library.register_memory(self._first, size) == 0
            self.address = f"127.0.0.1:{self._library.get_rpc_port()}"

    def connect(self, address: str, first: int, num_blocks: int) -> None:
        self._peer, self._peer_first = address, first
        if self._is_nixl:
            self._peer = self._library.add_remote_agent(bytes.fromhex(address))
            self._lists = [
                self._library.prep_xfer_dlist(side, descriptors(at, num_blocks), "DRAM")
                for side, at in (("NIXL_INIT_AGENT", self._first), (self._peer, first))
            ]

    def read(self, targets: Int32Array, sources: Int32Array) -> float:
        """Seconds."""
        if not self._is_nixl:
            to = (self._first + targets.astype(np.int64) * BLOCK_BYTES).tolist()
            from_ = (self._peer_first + sources.astype(np.int64) * BLOCK_BYTES).tolist()
            started = time.perf_counter()
            lengths = [BLOCK_BYTES] * len(to)
            assert self._library.batch_transfer_sync_read(self._peer, to, from_, lengths) == 0
            return time.perf_counter() - started
        started = time.perf_counter()
        handle = self._library.make_prepped_xfer(
            "READ", self._lists[0], targets, self._lists[1], sources
        )
        state = self._library.transfer(handle)
        while state == "PROC":
            state = self._library.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        assert state == "DONE", state
        self._library.release_xfer_handle(handle)
        return seconds


class GlooPeer:
    """Gloo by itself: the owner sends as many bytes as it is asked for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = torch.zeros(memory.numel(), dtype=torch.uint8)
        self._size = torch.zeros(1, dtype=torch.int64)
        self.address = str(Path(tempfile.mkdtemp()) / "rendezvous")

    def _join(self, path: str, rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, options)

    def serve(self) -> None:
        """Serve as the owner, until the process ends."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        group = self._join(self.address, 1)
        while True:
            group.recv([self._size], 0, 0).wait(timedelta(hours=1))
            group.send([self._bytes[: int(self._size)]], 0, 0).wait()

    def connect(self, address: str, first: int, num_blocks: int) -> None:
        self._group = self._join(address, 0)

    def read(self, targets: Int32Array, sources: Int32Array) -> float:
        """Seconds."""
        self._size[0] = len(targets) * BLOCK_BYTES
        started = time.perf_counter()
        self._group.send([self._size], 1, 0).wait()
        self._group.recv([self._bytes[: int(self._size)]], 1, 0).wait()
        return time.perf_counter() - started


def library_peer(connector: str, memory: torch.Tensor) -> LibraryPeer | GlooPeer:
    return GlooPeer(memory) if connector == "p2p_nccl" else LibraryPeer(connector, memory)


def descriptors(first: int, num_blocks: int) -> Any:
    found = np.zeros((num_blocks, 3), np.uint64)
    found[:, 0] = first + np.arange(num_blocks) * BLOCK_BYTES
    found[:, 1] = BLOCK_BYTES
    return found


# The processes


def own(connector: str, num_blocks: int) -> None:
    """The owner: answers lines with numbers of tokens by params."""
    side = Side(connector, num_blocks)
    side.memory[:] = torch.arange(num_blocks, dtype=torch.int32).remainder(251)[:, None]
    library = library_peer(connector, side.memory)
    if isinstance(library, GlooPeer):
        library.serve()
    print(json.dumps([library.address, side.memory.data_ptr()]), flush=True)
    for number, line in enumerate(sys.stdin):
        side.exchange()
        num_tokens = int(line)
        block_ids = blocks_of(num_tokens, num_blocks, seed=0)
        started = time.perf_counter()
        view = RequestView(
            f"request-{number}",
            tokens_of(num_tokens),
            num_tokens,
            (),
            {"do_remote_decode": True},
            finish_reason=FinishReason.LENGTH_CAPPED,
        )
        params = side.half.request_finished(view, (block_ids,)).params
        side.exchange()
        print(json.dumps([params, time.perf_counter() - started]), flush=True)
    side.worker.shutdown()
    end_at_once()


def read(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The reader: starts the owner, and measures."""
    connector = CASES[case][0]
    num_blocks = max(options.tokens) // BLOCK_SIZE + 1
    command = [sys.executable, __file__, "--owner", connector, str(num_blocks)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    side = Side(connector, num_blocks)
    library = library_peer(connector, side.memory)
    library.connect(*next_line(owner.stdout), num_blocks)
    rows, number, first_ms = [], 0, None
    for num_tokens in options.tokens:
        targets = blocks_of(num_tokens, num_blocks, seed=1)
        sources = blocks_of(num_tokens, num_blocks, seed=0)
        library_s, connector_s, handover_s = [], [], []
        for repeat in range(options.repeats + 1):
            print(num_tokens, file=owner.stdin, flush=True)
            params, lease_s = next_line(owner.stdout)
            number += 1
            side.memory[:] = 0
            pull_s = pull(side, f"request-{number}", num_tokens, params, targets)
            wanted = torch.from_numpy(sources % 251).to(torch.uint8)
            assert torch.equal(side.memory[targets.tolist()][:, 0], wanted), "other bytes"
            read_s = side.transports[0].read_s
            side.transports[0].read_s = 0.0
            if first_ms is None:
                first_ms = (lease_s + pull_s - read_s) * 1e3
            library_once_s = library.read(targets, sources)
            if repeat:  # the first one warms up
                library_s.append(library_once_s)
                connector_s.append(pull_s)
                handover_s.append(lease_s + pull_s - read_s)
        num_bytes = len(targets) * BLOCK_BYTES
        of_pairs = [one / other for one, other in zip(library_s, connector_s, strict=True)]
        rows.append(
            {
                "case": case,
                "tokens": num_tokens,
                "mb": num_bytes / 1e6,
                "descriptors": len(targets),
                "gb_s": {
                    "library": num_bytes / statistics.median(library_s) / 1e9,
                    "connector": num_bytes / statistics.median(connector_s) / 1e9,
                },
                "ratio": statistics.median(of_pairs),
                "handover_ms": statistics.median(handover_s) * 1e3,
                "first_ms": first_ms,
                "handover_ms_each": [seconds * 1e3 for seconds in handover_s],
            }
        )
    owner.stdin.close()
    owner.wait(LIMIT_S)
    side.worker.shutdown()
    return rows


def pull(
    side: Side, request_id: str, num_tokens: int, params: dict[str, Any], targets: Int32Array
) -> float:
    """Seconds from the arrival of a request until its blocks are filled."""
    view = RequestView(request_id, tokens_of(num_tokens), num_tokens, (), params)
    started = time.perf_counter()
    side.half.on_new_request(view)
    side.half.get_num_new_matched_tokens(view, 0)
    side.half.update_state_after_alloc(view, (targets,), num_tokens)
    received = side.exchange()
    while request_id not in received:
        assert side.woken.wait(LIMIT_S), "a pull has not ended"
        side.woken.clear()
        received = side.exchange()
    return time.perf_counter() - started


def next_line(lines: Any) -> Any:
    """The next answer; libraries write to standard output, too."""
    for line in lines:
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, list):
                return answer
    raise RuntimeError("the owner has ended")


def end_at_once() -> None:
    """End without the destructors of libraries, which wait for each other's threads."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="C")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--owner", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reader", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner is not None:
        own(options.owner[0], int(options.owner[1]))
    if options.reader is not None:
        options.reader.write_text(json.dumps(read(options.cases[0], options)))
        end_at_once()
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        rows += run(case, options)
    report.write(options.json, rows)


def run(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a case, from a process with its variables: libraries read them only once."""
    sizes = ["--repeats", str(options.repeats), "--tokens", *map(str, options.tokens)]
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", **CASES[case][1]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--reader", str(path), "--cases", case, *sizes]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


if __name__ == "__main__":
    main()
