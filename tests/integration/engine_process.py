"""A real scheduler process with a scripted worker and client in the test's own process."""

import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from longshore.protocol.commands import Command, CommandAnswer, NumberedCommand
from longshore.protocol.events import KVEventsConfig
from longshore.protocol.handshake import (
    ClientHello,
    EngineIdentity,
    EngineReady,
    Feature,
    FromWorker,
    ToClient,
    ToWorker,
    WorkerAsleep,
    WorkerHello,
    WorkerReady,
)
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    HeadShare,
    KVCacheConfig,
    KVCacheGroup,
)
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineOutputs,
    EnginePaused,
    FinishedRequest,
    ModelRunnerOutput,
)
from longshore.protocol.plan import BeginSleep, SchedulerOutput, Shutdown
from longshore.protocol.requests import AddRequest
from longshore.protocol.rows import PlanFollower, RowTable
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import SchedulerStats
from longshore.protocol.transport.channel import (
    Channel,
    ClientChannel,
    Endpoint,
    open_socket,
)
from longshore.protocol.transport.lifeline import (
    Acknowledged,
    LifelineReport,
    Restarting,
    decode_report,
    encode_event,
)
from longshore.scheduler.config import CacheConfig, SchedulerConfig, SchedulerProcessConfig

VOCAB_SIZE = 1000
TIMEOUT_S = 60.0
IDENTITY = EngineIdentity(
    model_fingerprint="a model",
    dtype="float32",
    block_size=16,
    max_model_len=2048,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    hash_seed_digest="a seed",
)


def _limit_files(soft: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class EngineProcess:
    """The process, its lifeline, and the sockets of its workers and of clients."""

    def __init__(
        self,
        *,
        epoch: int = 1,
        cache: CacheConfig | None = None,
        num_workers: int = 1,
        num_shards: int = 1,
        kv_connector: str | None = None,
        kv_events: dict[str, Any] | None = None,
        outlives_workers: bool = False,
        is_asleep: bool = False,
        adopts_kv: bool = False,
        clients: Endpoint | None = None,
        record: Path | None = None,
        record_bytes: int = 1 << 28,
        soft_files: int | None = None,
    ) -> None:
        """kv_events: fields of KVEventsConfig; None: no events. clients: None: a private socket.
        soft_files: its soft limit of descriptors; None: that of this process."""
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="longshore-test-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = self._endpoints = tuple(
            Endpoint(f"ipc://{self.runtime_dir}/worker-{rank}") for rank in range(num_workers)
        )
        self._clients = clients or Endpoint(f"ipc://{self.runtime_dir}/clients")
        self._lifeline, child_end = socket.socketpair()
        self._lifeline.settimeout(TIMEOUT_S)
        self._lines = self._lifeline.makefile("rb")
        config = SchedulerProcessConfig(
            scheduler=SchedulerConfig(
                max_model_len=IDENTITY.max_model_len,
                max_num_seqs=IDENTITY.max_num_seqs,
                max_num_batched_tokens=IDENTITY.max_num_batched_tokens,
            ),
            cache=cache or CacheConfig(enable_kv_cache_events=kv_events is not None),
            identity=IDENTITY,
            workers=endpoints,
            sampling_rank=num_workers - num_shards,
            clients=self._clients,
            hash_seed="00" * 32,
            vocab_size=VOCAB_SIZE,
            rank_timeout_s=60.0,
            kv_connector=kv_connector,
            kv_events=self._kv_events(kv_events),
            epoch=epoch,
            outlives_workers=outlives_workers,
            is_asleep=is_asleep,
            adopts_kv=adopts_kv,
            lifeline_fd=child_end.fileno(),
            runtime_dir=str(self.runtime_dir),
            record=None if record is None else str(record),
            record_bytes=record_bytes,
        )
        path = self.runtime_dir / "scheduler.json"
        path.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longshore.scheduler", str(path)],
            pass_fds=[child_end.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if soft_files is None else partial(_limit_files, soft_files),
        )
        child_end.close()
        self.workers: list[ScriptedWorker] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        self.channels: list[Channel[FromWorker, ToWorker]] = [
            Channel(self._connect_to(endpoint), ToWorker) for endpoint in endpoints
        ]

    def _kv_events(self, fields: dict[str, Any] | None) -> KVEventsConfig | None:
        if fields is None:
            return None
        addresses = {
            name: Endpoint(f"ipc://{self.runtime_dir}/{name}")
            for name in ("endpoint", "replay_endpoint")
        }
        return KVEventsConfig(**{**addresses, **fields})

    @property
    def worker(self) -> Channel[FromWorker, ToWorker]:
        """The channel of rank 0."""
        return self.channels[0]

    def next_report(self) -> LifelineReport:
        """The next line that the process writes to its supervisor."""
        return decode_report(self._lines.readline())

    def end_workers(
        self, reason: str, *, is_out_of_memory: bool = False, were_killed: bool = False
    ) -> None:
        """End the scripted workers and their connections, say so as the supervisor does, and
        connect new ones when the scheduler knows it. Its reports until then are skipped."""
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
        for channel in self.channels:
            self._sockets.remove(channel.socket)
            channel.socket.close(linger=0)
        restarting = Restarting(reason, is_out_of_memory=is_out_of_memory, were_killed=were_killed)
        self._lifeline.sendall(encode_event(restarting))
        while not isinstance(self.next_report(), Acknowledged):
            continue
        for rank, endpoint in enumerate(self._endpoints):
            self.channels[rank] = Channel(self._connect_to(endpoint), ToWorker)

    def send_command(self, command: Command, number: int = 1) -> None:
        """Send a command of an operator."""
        line = msgspec.json.encode(NumberedCommand(number, command))
        self._lifeline.sendall(line + b"\n")

    def next_answer(self) -> CommandAnswer:
        """The next answer to a command; other reports are skipped."""
        while not isinstance(report := self.next_report(), CommandAnswer):
            continue
        return report

    def command(self, command: Command) -> CommandAnswer:
        """Send a command and wait for its answer."""
        self.send_command(command)
        return self.next_answer()

    def start_worker(
        self,
        *,
        identity: EngineIdentity = IDENTITY,
        num_blocks: int = 1000,
        features: tuple[Feature, ...] = (),
    ) -> ToWorker | None:
        """Send the hello of rank 0, and return the scheduler's answer."""
        self.say_hello(identity=identity, num_blocks=num_blocks, features=features)
        return self.worker.receive(TIMEOUT_S)

    def say_hello(
        self,
        rank: int = 0,
        *,
        identity: EngineIdentity = IDENTITY,
        num_blocks: int = 1000,
        num_kv_heads: int = 1,
        block_size: int = 16,
        groups: Sequence[Sequence[str]] | None = None,
        dtype: str = "float32",
        says_rank: int | None = None,
        heads: HeadShare | None = None,
        features: tuple[Feature, ...] = (),
    ) -> None:
        """Report that a rank has loaded its part, with `says_rank` as its number.

        groups: the layers of each group; None is one group with one layer.
        heads:  None is all that its blocks have.
        """
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=4, dtype_bytes=4
        )
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks,
            groups=tuple(
                KVCacheGroup(tuple(layers), spec) for layers in groups or [[f"layer {rank}"]]
            ),
            dtype=dtype,
        )
        self.channels[rank].send(
            WorkerHello(
                rank if says_rank is None else says_rank,
                identity,
                kv_cache,
                heads or HeadShare(0, num_kv_heads, num_kv_heads),
                features,
            )
        )

    def connect(self, **overrides: object) -> tuple["Client", ToClient | None]:
        """A client that has sent its hello, and the answer."""
        channel: ClientChannel[Any, ToClient] = ClientChannel(
            self._connect_to(self._clients), ToClient
        )
        hello = ClientHello("test", IDENTITY.model_fingerprint)
        channel.send(msgspec.structs.replace(hello, **overrides))
        return Client(channel), channel.receive(TIMEOUT_S)

    def _connect_to(self, endpoint: Endpoint) -> "zmq.Socket[bytes]":
        self._sockets.append(open_socket(self.context, zmq.DEALER, endpoint, bind=False))
        return self._sockets[-1]

    def drop_lifeline(self) -> None:
        """Close the supervisor's end, as if it had died."""
        self._lines.close()
        self._lifeline.close()

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for worker in self.workers:
            worker.stop()
        self.drop_lifeline()
        for open_one in self._sockets:
            open_one.close(linger=0)
        self.context.term()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


class Client:
    """A minimal gateway."""

    def __init__(self, channel: ClientChannel[Any, ToClient]) -> None:
        self.channel = channel
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedRequest] = {}
        self.steps_in_flight: list[float] = []
        self.closed_reasons: list[str | None] = []
        self.stats: SchedulerStats | None = None
        self.pauses: list[EnginePaused | EngineContinues] = []

    def add(self, handle: int, *, prompt_len: int = 40, max_tokens: int = 5) -> None:
        self.channel.send(
            AddRequest(
                request_id=f"request-{handle}",
                handle=handle,
                prompt_token_ids=np.arange(prompt_len, dtype=np.int32) % VOCAB_SIZE,
                sampling=SamplingParams(temperature=0, max_tokens=max_tokens),
            )
        )

    def send_raw(self, fields: Mapping[str, object]) -> None:
        """Send a message that need not be valid."""
        self.channel.send(msgspec.Raw(msgspec.msgpack.encode(fields)))

    def receive(self) -> ToClient | None:
        """The next message that is no report of statistics."""
        while True:
            message = self.channel.receive(TIMEOUT_S)
            if not (isinstance(message, EngineOutputs) and message.stats is not None):
                return message
            self.stats = message.stats

    def receive_until(self, done: Callable[[], bool], patience_s: float = TIMEOUT_S) -> None:
        """Read outputs until `done()`. Raises TimeoutError if no message arrives for too long."""
        while not done():
            message = self.channel.receive(patience_s)
            if message is None:
                raise TimeoutError("the engine went silent")
            if isinstance(message, EnginePaused | EngineContinues):
                self.pauses.append(message)
                continue
            if isinstance(message, AdmissionChanged):
                self.closed_reasons.append(message.closed_reason)
                continue
            assert isinstance(message, EngineOutputs), message
            for handle, token in zip(
                message.handles.tolist(), message.tokens.tolist(), strict=True
            ):
                self.tokens.setdefault(handle, []).append(token)
            for finished in message.finished:
                self.finished[finished.handle] = finished
            if message.stats is not None:
                self.steps_in_flight.append(message.stats.steps_in_flight)
                self.stats = message.stats


class ScriptedWorker:
    """A rank that receives every plan in a thread and answers it, unless told not to. A token is
    the number of computed tokens, so it shows where it was sampled. `before_answer` may delay or
    stop the answer. It ends when it falls asleep."""

    def __init__(
        self,
        engine: EngineProcess,
        *,
        rank: int = 0,
        answers: bool = True,
        epoch: int = 1,
        before_answer: Callable[[SchedulerOutput], None] = lambda plan: None,
    ) -> None:
        self._channel = engine.channels[rank]
        self._answers = answers
        self._epoch = epoch
        self._before_answer = before_answer
        self.plans: list[SchedulerOutput] = []
        self.rows = RowTable(IDENTITY.max_num_seqs)
        self.shutdown: Shutdown | None = None
        self._stopped = threading.Event()
        engine.workers.append(self)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop using the socket, so that it can be closed."""
        self._stopped.set()
        self.thread.join()

    def _run(self) -> None:
        follower = PlanFollower(self.rows, epoch=self._epoch)
        while not self._stopped.is_set():
            message = self._channel.receive(0.05)
            if message is None:
                continue
            if isinstance(message, Shutdown):
                self.shutdown = message
                return
            if isinstance(message, BeginSleep):
                self._channel.send(WorkerAsleep(0))
                return
            assert isinstance(message, SchedulerOutput)
            self.plans.append(message)
            num_scheduled = follower.apply(message)
            sampling = np.flatnonzero(self.rows.samples(num_scheduled))
            tokens = (self.rows.num_computed[sampling] % VOCAB_SIZE).astype(np.int32)
            self._before_answer(message)
            if not self._answers:
                continue
            self._channel.send(
                ModelRunnerOutput(epoch=self._epoch, step=message.step, sampled_tokens=tokens)
            )


@contextmanager
def running_engine(**settings: object) -> Iterator[EngineProcess]:
    """A scheduler process whose worker has not connected yet."""
    engine = EngineProcess(**settings)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def ready_engine(engine: EngineProcess, **worker: Any) -> Client:
    """Start the engine up to the point where a client can send requests. worker: arguments of
    `start_worker`."""
    engine.start_worker(**worker)
    engine.worker.send(WorkerReady(0))
    client, answer = engine.connect()
    assert isinstance(answer, EngineReady), answer
    return client
