"""A real scheduler process, for benchmarks that act as its worker and its client. The process can
measure itself.

    python benchmarks/live_engine.py OUT.json CONFIG.json

This command runs the scheduler like `python -m longshore.scheduler CONFIG.json` and writes its
measurements when the scheduler stops: the times of the few calls that make up a step. `LiveEngine`
starts the command; it is of no use without the worker and the client of a benchmark.
"""

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import zmq

from longshore.protocol.handshake import (
    ClientHello,
    EngineIdentity,
    EngineReady,
    Feature,
    FromWorker,
    ToClient,
    ToEngine,
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
from longshore.protocol.requests import AddRequest, RequestOptions, StructuredOutput
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.channel import (
    Channel,
    ClientChannel,
    Endpoint,
    ServerChannel,
    open_socket,
)
from longshore.protocol.transport.lifeline import (
    STOP_SIGNAL,
    Progress,
    Ready,
    decode_report,
)
from longshore.protocol.transport.security import new_secret
from longshore.scheduler import __main__ as scheduler_main
from longshore.scheduler.config import (
    CacheConfig,
    SchedulerConfig,
    SchedulerProcessConfig,
    StructuredOutputConfig,
)
from longshore.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
EOS_ID = 2
TIMEOUT_S = 60.0
EPOCH = 1


class LiveEngine:
    """The process during a `with` block. `num_rows` requests of `max_model_len` tokens fit.

    The caller of `connect_worker`, in this process or another, is the worker. With
    `is_timed`, the times of a step's parts are in `findings` after the block. `tokenizer`, a
    tokenizer.json, allows structured output, which ends with token EOS_ID.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        mode: str,
        is_timed: bool = False,
        tokenizer: Path | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="longshore-bench-")
        self.directory = Path(self._directory.name)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._identity = EngineIdentity(
            model_fingerprint="benchmark",
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * 1024,  # so that no prompt is chunked
            hash_seed_digest="benchmark",
        )
        self._lifeline, child_end = socket.socketpair()
        secret = new_secret()
        structured_output = None
        if tokenizer is not None:
            structured_output = StructuredOutputConfig(
                structured_output_backend="auto",
                tokenizer_file=str(tokenizer),
                endpoint=Endpoint(f"ipc://{self.directory}/grammars", secret=secret),
            )
        config = SchedulerProcessConfig(
            scheduler=SchedulerConfig(
                max_model_len=max_model_len,
                max_num_seqs=num_rows,
                max_num_batched_tokens=num_rows * 1024,
                max_steps_in_flight=2 if mode == "async" else 1,
            ),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            identity=self._identity,
            workers=(Endpoint(f"ipc://{self.directory}/worker", secret=secret),),
            clients=Endpoint(f"ipc://{self.directory}/clients", secret=secret),
            hash_seed="00" * 32,
            vocab_size=vocab_size,
            rank_timeout_s=60.0,
            eos_token_ids=(EOS_ID,),
            structured_output=structured_output,
            epoch=EPOCH,
            lifeline_fd=child_end.fileno(),
            log_level="warning",
        )
        config_path = self.directory / "scheduler.json"
        config_path.write_bytes(msgspec.json.encode(config))
        self._config = config
        self.is_async = mode == "async"
        self._findings = self.directory / "findings.json"
        self.findings: Any = None
        program = ["-m", "longshore.scheduler"]
        if is_timed:
            program = [__file__, str(self._findings)]
        self._process = subprocess.Popen(
            [sys.executable, *program, str(config_path)], pass_fds=[child_end.fileno()]
        )
        child_end.close()

    def __enter__(self) -> "LiveEngine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(STOP_SIGNAL)
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lifeline.close()
        self.context.destroy(linger=0)
        if self._findings.exists():
            self.findings = json.loads(self._findings.read_bytes())
        self._directory.cleanup()

    @property
    def worker_setup(self) -> tuple[Endpoint, EngineIdentity]:
        """The arguments of `connect_worker`, to be sent to another process."""
        return self._config.workers[0], self._identity

    def wait_until_ready(self) -> None:
        """Wait until the process, whose worker is connected, accepts clients."""
        with self._lifeline.makefile("rb") as lines:
            while isinstance(reported := decode_report(lines.readline()), Progress):
                continue
        assert isinstance(reported, Ready), reported

    def connect_client(self) -> Channel[ToEngine, ToClient]:
        """The channel of a gateway that the scheduler has accepted."""
        client: ClientChannel[ToEngine, ToClient] = ClientChannel(
            open_socket(self.context, zmq.DEALER, self._config.clients, bind=False), ToClient
        )
        client.send(ClientHello("benchmark", self._identity.model_fingerprint))
        answer = client.receive(TIMEOUT_S)
        assert isinstance(answer, EngineReady), answer
        return client

    def cpu_s(self) -> float:
        """CPU time that the process has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connect_worker(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: Endpoint, identity: EngineIdentity
) -> Channel[FromWorker, ToWorker]:
    """The channel of a worker that the scheduler has accepted and that is ready for plans. Its
    blocks hold all rows at full length."""
    worker: Channel[FromWorker, ToWorker] = Channel(
        open_socket(context, zmq.DEALER, endpoint, bind=False), ToWorker
    )
    num_blocks = identity.max_num_seqs * (identity.max_model_len // BLOCK_SIZE + 1) + 1
    spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype_bytes=2)
    groups, heads = (KVCacheGroup(("layer",), spec),), HeadShare(0, 8, 8)
    features = (Feature.STRUCTURED_OUTPUT,)
    cache = KVCacheConfig(num_blocks, groups, "bfloat16")
    worker.send(WorkerHello(0, identity, cache, heads, features=features))
    answer = worker.receive(TIMEOUT_S)
    assert isinstance(answer, WorkerAccepted), answer
    worker.send(WorkerReady(0))
    return worker


def long_request(
    handle: int, prompt_len: int, structured_output: StructuredOutput | None = None
) -> AddRequest:
    """A request that decodes up to the maximum length."""
    prompt = np.random.default_rng(handle).integers(0, VOCAB_SIZE, prompt_len, np.int32)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    return AddRequest(
        f"request-{handle}",
        handle,
        prompt,
        sampling,
        options=RequestOptions(structured_output=structured_output),
    )


def _run_under_stopwatch() -> dict[str, dict[str, float]]:
    """Calls and median time of each part of a step."""
    samples: defaultdict[str, list[int]] = defaultdict(list)

    def watch(owner: type, method: str, name: str, if_none: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def watched(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            result = original(*arguments, **named)
            elapsed = time.perf_counter_ns() - started
            samples[if_none if result is None else name].append(elapsed)
            return result

        setattr(owner, method, watched)

    watch(Channel, "receive", "receive and decode the answer", "look for another answer")
    watch(Scheduler, "update_from_output", "", "apply the answer")
    watch(Scheduler, "schedule", "plan", "find that there is nothing to plan")
    watch(Channel, "send", "", "encode and send the plan")
    watch(Scheduler, "take_outputs", "take the outputs", "")
    watch(ServerChannel, "send", "encode and send to the client", "")
    scheduler_main.main()
    return {
        name: {"calls": len(elapsed), "median_us": statistics.median(elapsed) / 1e3}
        for name, elapsed in samples.items()
        if len(elapsed) > 1
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("out", metavar="OUT.json", type=Path, help="write measurements here")
    arguments.add_argument("config", metavar="CONFIG.json", help="the scheduler process's settings")
    options = arguments.parse_args()
    sys.argv = ["longshore.scheduler", options.config]
    options.out.write_text(json.dumps(_run_under_stopwatch()))


if __name__ == "__main__":
    main()
