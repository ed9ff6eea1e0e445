"""`python -m longshore.worker` from the side of its supervisor and its scheduler."""

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import (
    EngineIdentity,
    Feature,
    FromWorker,
    Rejected,
    ToWorker,
    WorkerAccepted,
    WorkerHello,
    WorkerReady,
    model_fingerprint,
)
from longshore.protocol.kv_cache_spec import HeadShare
from longshore.protocol.outputs import ModelRunnerOutput, WorkerFailed
from longshore.protocol.plan import SchedulerOutput, Shutdown
from longshore.protocol.statistics import WorkerStats
from longshore.protocol.transport.channel import (
    Channel,
    Endpoint,
    open_socket,
)
from longshore.protocol.transport.lifeline import (
    EXIT_SUPERVISOR_GONE,
    STOP_SIGNAL,
    Alive,
    Failed,
    LifelineReport,
    Progress,
    Ready,
    TakeOver,
    decode_report,
    encode_event,
)
from longshore.worker.config import RankLayout, WorkerConfig, WorkerProcessConfig
from longshore.worker.worker import Worker
from tests.worker.models.tiny_whisper import make_tiny_whisper
from tests.worker.plans import Entry, Planner

TIMEOUT_S = 60.0


class WorkerProcess:
    """The process, the supervisor's end of its lifeline, and the scheduler's end of its channel."""

    def __init__(self, model: Path, **overrides: Any) -> None:
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="longshore-test-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = endpoint = Endpoint(f"ipc://{self.runtime_dir}/worker-0")
        self.scheduler = self._listen()
        self._lifeline, child_end = socket.socketpair()
        self._lifeline.settimeout(TIMEOUT_S)
        self._lines = self._lifeline.makefile("rb")
        self.identity = EngineIdentity(
            model_fingerprint="of the supervisor's copy",
            dtype="float32",
            block_size=16,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            hash_seed_digest="a seed",
        )
        config = WorkerProcessConfig(
            identity=self.identity,
            endpoint=endpoint,
            worker=WorkerConfig(
                model=str(model),
                dtype="float32",
                max_model_len=256,
                max_num_seqs=8,
                max_num_batched_tokens=512,
                num_blocks=60,
                threads=1,
            ),
            lifeline_fd=child_end.fileno(),
            runtime_dir=str(self.runtime_dir),
            **overrides,
        )
        path = self.runtime_dir / "worker-0.json"
        path.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longshore.worker", str(path)],
            pass_fds=[child_end.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        child_end.close()

    def _listen(self) -> Channel[ToWorker, FromWorker]:
        socket = open_socket(self.context, zmq.DEALER, self._endpoint, bind=True)
        return Channel(socket, FromWorker)

    def replace_scheduler(self) -> None:
        """The scheduler has died without a word, and another one takes its place."""
        self.scheduler.close()
        self.context.term()  # waits until its listener is gone, which removes the socket's file
        self.context = zmq.Context()
        self.scheduler = self._listen()

    def receive(self) -> FromWorker:
        """The next message that is not statistics."""
        while isinstance(message := self.scheduler.receive(TIMEOUT_S), WorkerStats):
            pass
        assert message is not None, "the worker said nothing"
        return message

    def welcome(self) -> None:
        """Do the whole handshake, with 50 blocks."""
        self.accept()
        assert isinstance(self.receive(), WorkerReady)

    def accept(self, epoch: int = 1) -> None:
        assert isinstance(self.first_message(epoch), WorkerHello)
        self.scheduler.send(WorkerAccepted(epoch=epoch, num_blocks=50))

    def first_message(self, epoch: int) -> FromWorker:
        """The first message to the scheduler of this epoch. The worker's connection may have been
        made again before the worker noticed that the former scheduler is gone."""
        while isinstance(message := self.receive(), ModelRunnerOutput):
            assert message.epoch < epoch
        return message

    def next_report(self) -> LifelineReport:
        """The next line written to the supervisor that is not progress."""
        while True:
            report = decode_report(self._lines.readline())
            if not isinstance(report, Progress):
                return report

    def take_over(self) -> None:
        self._lifeline.sendall(encode_event(TakeOver()))

    def drop_lifeline(self) -> None:
        self._lines.close()
        self._lifeline.close()

    def wait(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.drop_lifeline()
        self.scheduler.close()
        self.context.term()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


@pytest.fixture
def start() -> Iterator[Callable[..., WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start_(model: Path, **overrides: Any) -> WorkerProcess:
        started.append(WorkerProcess(model, **overrides))
        return started[-1]

    yield start_
    for worker in started:
        worker.close()


def planner(epoch: int = 1) -> Planner:
    return Planner(num_blocks=50, block_size=16, epoch=epoch)


def steps_of(epoch: int) -> list[SchedulerOutput]:
    plans = planner(epoch)
    steps = [plans.plan({2: 30}, added=[Entry(2, range(3, 33))])]
    return steps + [plans.plan() for _ in range(10)]


@pytest.mark.slow
@pytest.mark.req("FEA-10")
def test_a_process_whose_model_has_an_encoder_offers_multimodal_input(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    make_tiny_whisper(tmp_path, max_target_positions=256)
    of_text = (Feature.POOLING, Feature.STRUCTURED_OUTPUT)
    for path, features in ((tmp_path, (Feature.MULTIMODAL,)), (checkpoint[0], of_text)):
        hello = start(path).receive()
        assert isinstance(hello, WorkerHello)
        assert hello.features == features


def test_a_process_reports_its_cache_and_computes_like_a_worker_in_process(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any]
) -> None:
    worker = start(checkpoint[0])
    hello = worker.receive()
    assert isinstance(hello, WorkerHello)
    own = msgspec.structs.replace(
        worker.identity, model_fingerprint=model_fingerprint(checkpoint[0])
    )
    assert (hello.rank, hello.identity, hello.kv_cache.num_blocks) == (0, own, 60)
    num_heads = checkpoint[1].config.num_key_value_heads
    assert hello.heads == HeadShare(0, num_heads, num_heads)
    worker.scheduler.send(WorkerAccepted(epoch=1, num_blocks=50))
    assert worker.receive() == WorkerReady(0)
    report = worker.next_report()
    assert isinstance(report, Ready)
    assert report.details["num_blocks"] == "50"

    wanted = tokens_in_process(checkpoint[0])
    for plan in steps_of(epoch=1):
        worker.scheduler.send(plan)
    assert_answers(worker, wanted)
    worker.scheduler.send(Shutdown("done"))
    assert worker.wait() == 0


def tokens_in_process(model: Path) -> list[list[int]]:
    config = WorkerConfig(model=str(model), num_blocks=50, max_num_seqs=8, show_progress=False)
    with Worker(config) as alone:
        runner = alone.start()
        return [runner.execute(plan).sampled_tokens.tolist() for plan in steps_of(epoch=1)]


def assert_answers(worker: WorkerProcess, wanted: list[list[int]]) -> None:
    for index, tokens in enumerate(wanted):
        output = worker.receive()
        assert isinstance(output, ModelRunnerOutput)
        assert (output.step, output.sampled_tokens.tolist()) == (index + 1, tokens)


TENSOR_2 = RankLayout(tensor_parallel_size=2, rendezvous="set later")
STAGES_2 = RankLayout(pipeline_parallel_size=2, rendezvous="set later")


def feed_back(steps: list[SchedulerOutput], tokens: list[list[int]]) -> list[SchedulerOutput]:
    """As a first pipeline stage needs them: with the tokens that the last stage has sampled."""
    fed = [
        msgspec.structs.replace(
            step, sampled_rows=int32_array([2]), sampled_tokens=int32_array(sampled)
        )
        for step, sampled in zip(steps[1:], tokens, strict=False)
    ]
    return [steps[0], *fed]


@pytest.mark.parametrize(
    ("layout", "ahead"),
    [
        pytest.param(RankLayout(), 0, id="alone"),
        pytest.param(TENSOR_2, 0, id="shard 0", marks=pytest.mark.long),
        pytest.param(TENSOR_2, 1, id="shard 1"),
        pytest.param(STAGES_2, 0, id="stage 0", marks=pytest.mark.long),
        pytest.param(STAGES_2, 1, id="stage 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_outlive_a_scheduler_whose_last_plans_only_one_of_them_has_received(
    layout: RankLayout,
    ahead: int,
    start: Callable[..., WorkerProcess],
    checkpoint: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    """The one that is ahead may wait in an exchange for the other."""
    ranks = replace(layout, rendezvous=str(tmp_path / "rendezvous"))
    workers = [start(checkpoint[0], rank=rank, ranks=ranks) for rank in range(layout.num_ranks)]
    wanted = tokens_in_process(checkpoint[0])
    for epoch in (1, 2, 3):
        for worker in workers:
            worker.accept(epoch)
        for worker in workers:
            assert isinstance(worker.receive(), WorkerReady)
        steps = steps_of(epoch)
        if layout is STAGES_2:
            steps = feed_back(steps, wanted)
        for worker in workers:
            for step in steps[:-2]:
                worker.scheduler.send(step)
        assert_answers(workers[layout.sampling_rank], wanted[:-2])
        for step in steps[-2:]:
            workers[ahead].scheduler.send(step)
        for worker in workers:
            worker.replace_scheduler()
    for worker in workers:
        assert isinstance(worker.first_message(epoch=4), WorkerHello)
        worker.scheduler.send(Shutdown("done"))
    assert {worker.wait() for worker in workers} == {0}


@pytest.mark.slow
def test_a_standby_connects_and_measures_its_cache_only_when_it_takes_over(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint[0], model)
    worker = start(model, is_standby=True)
    loaded = model_fingerprint(model)
    assert worker.next_report() == Ready({"device": "cpu"})
    assert worker.next_report() == Alive()
    assert worker.scheduler.receive() is None
    (model / "config.json").write_text("{}")  # from now on the folder has another model
    worker.take_over()
    hello = worker.receive()
    assert isinstance(hello, WorkerHello)
    assert (hello.rank, hello.identity.model_fingerprint) == (0, loaded)
    worker.scheduler.send(WorkerAccepted(epoch=3, num_blocks=50))
    assert worker.receive() == WorkerReady(0)
    while isinstance(report := worker.next_report(), Alive):
        pass
    assert isinstance(report, Ready)
    assert report.details["num_blocks"] == "50"
    worker.scheduler.send(Shutdown("done"))
    assert worker.wait() == 0


def test_a_rejected_worker_says_why_and_fails(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any]
) -> None:
    worker = start(checkpoint[0])
    assert isinstance(worker.receive(), WorkerHello)
    worker.scheduler.send(Rejected("the models differ"))
    assert worker.next_report() == Failed("the models differ")
    assert worker.wait() == 1


def test_a_checkpoint_that_cannot_be_served_is_reported_to_both_sides(
    start: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker = start(tmp_path / "nowhere")
    failed = worker.receive()
    assert isinstance(failed, WorkerFailed)
    assert "config.json does not exist" in failed.reason
    assert worker.next_report() == Failed(failed.reason)
    assert worker.wait() == 1
    assert worker.process.stderr is not None
    assert "Traceback" not in worker.process.stderr.read()


def test_a_worker_that_cannot_continue_exits_with_a_reason(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any]
) -> None:
    worker = start(checkpoint[0])
    worker.welcome()
    plans = planner()
    plans.plan()  # never sent
    worker.scheduler.send(plans.plan())
    failed = worker.receive()
    assert isinstance(failed, WorkerFailed)
    assert "follows step 1" in failed.reason
    assert isinstance(worker.next_report(), Ready)
    while isinstance(report := worker.next_report(), Alive):
        pass
    assert report == Failed(failed.reason)
    assert worker.wait() == 1


@pytest.mark.parametrize("is_welcomed", [True, False])
def test_a_stop_signal_ends_a_worker_with_status_0(
    is_welcomed: bool, start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any]
) -> None:
    worker = start(checkpoint[0])
    if is_welcomed:
        worker.welcome()
        worker.scheduler.send(planner().plan({2: 30}, added=[Entry(2, range(3, 33))]))
    else:
        assert isinstance(worker.receive(), WorkerHello)
    worker.process.send_signal(STOP_SIGNAL)
    assert worker.wait() == 0


def test_a_worker_does_not_outlive_its_supervisor(
    start: Callable[..., WorkerProcess], checkpoint: tuple[Path, Any]
) -> None:
    worker = start(checkpoint[0])
    worker.welcome()
    worker.drop_lifeline()
    assert worker.wait() == EXIT_SUPERVISOR_GONE
    assert not worker.runtime_dir.exists()


@pytest.mark.parametrize("arguments", [[], ["/nowhere.json"]])
def test_bad_usage_is_status_2_and_one_line(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "longshore.worker", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1


LATE_THREAD = """
import sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from longshore.worker.process.ending import end_process

class EndsLate:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

ends_late, store, posted = EndsLate(), dist.HashStore(), threading.Event()

def wait(rank):
    options = dist.ProcessGroupGloo._Options()
    options._threads, options._timeout = 1, timedelta(seconds=20)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    if rank:
        time.sleep(10)
    work = group.recv([torch.zeros(4)], 1, 0)
    posted.set()
    try:
        work.wait(timedelta(seconds=0.5))
    except RuntimeError:
        group = None

for rank in range(2):
    threading.Thread(target=wait, args=(rank,), daemon=True).start()
posted.wait()
print("the end", end="")
end_process(3)  # with sys.exit, it is aborted
"""


def test_a_thread_that_returns_from_a_library_does_not_abort_a_process_that_ends() -> None:
    """As of a link of `p2p_nccl` whose peer is gone."""
    ended = subprocess.run([sys.executable, "-c", LATE_THREAD], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, b"the end"), ended.stderr


STOPPED_IN_CALLBACK = """
import os, signal, time, weakref
from longshore.worker.process.ending import exit_at

class Module:
    pass

exit_at([signal.SIGTERM])
module = Module()
callback = weakref.ref(module, lambda _: os.kill(os.getpid(), signal.SIGTERM))
try:
    del module
    time.sleep(30)
finally:
    print("cleaned up")
"""


def test_a_stop_signal_within_a_callback_ends_the_process() -> None:
    """Python discards the exception of its handler there."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_CALLBACK], capture_output=True, timeout=20, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"cleaned up\n", b"")
