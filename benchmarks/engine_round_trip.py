"""Time from a worker's answer to the next plan, through the real scheduler process, compared with a
bare ZMQ ping-pong of the same frames between two processes.

    python benchmarks/engine_round_trip.py [--round-trips 2000] [--repeats 5] [--json F]

Only one request runs, so that steps are as small as possible. This program is the worker; it
encodes an answer before timing starts, and decodes the plan after timing stops. The other end of
the ping-pong either blocks in recv (`echo`) or uses our `SocketWatcher` on a uvloop, as the
scheduler process does (`watcher`). Each repeat measures all of them in turn. `ratio` compares with
`echo`, `watcher_ratio` with `watcher`. `sync` keeps one plan unanswered, `async` two, so that its
round trip overlaps the other step.

`parts` lists what the scheduler process does in a step, measured in a separate run.
"""

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import report
import zmq
from live_engine import EPOCH, TIMEOUT_S, LiveEngine, connect_worker, long_request

from longshore.protocol.handshake import FromWorker, ToWorker
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.transport.channel import (
    Endpoint,
    SocketWatcher,
    open_socket,
)
from longshore.protocol.transport.codec import (
    Decoder,
    Encoder,
    Frame,
)

Socket: TypeAlias = zmq.Socket[bytes]
Frames: TypeAlias = list[Frame]
STOP = b"stop"
PROMPT_LEN = 33


class Engine:
    """The scheduler process with one running request, and the worker's end of its socket."""

    def __init__(self, mode: str, num_steps: int, is_timed: bool = False) -> None:
        self.live = LiveEngine(
            num_rows=1, max_model_len=num_steps + 200, mode=mode, is_timed=is_timed
        )
        self._encoder: Encoder[FromWorker] = Encoder()
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._step = 0
        self.answer_bytes = self.plan_bytes = self.num_frames = 0

    def __enter__(self) -> "Engine":
        self.live.__enter__()
        channel = connect_worker(self.live.context, *self.live.worker_setup)
        self.socket = channel.socket
        self.live.wait_until_ready()
        self._client = self.live.connect_client()
        self._client.send(long_request(0, PROMPT_LEN))
        for _ in range(2 if self.live.is_async else 1):
            assert isinstance(channel.receive(TIMEOUT_S), SchedulerOutput)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.live.__exit__(*exception)

    def answer(self) -> Frames:
        """Frames of the next answer."""
        self._step += 1
        tokens = np.array([self._step % 1000], np.int32)
        frames = self._encoder.encode(ModelRunnerOutput(EPOCH, self._step, sampled_tokens=tokens))
        self.answer_bytes = sum(map(len, frames))
        return frames

    def check(self, frames: list[bytes]) -> None:
        """Raise unless the scheduler's message is a plan."""
        assert isinstance(self._decoder.decode(frames), SchedulerOutput)
        self.plan_bytes, self.num_frames = sum(map(len, frames)), len(frames)

    def drain_client(self) -> None:
        """Read the client's messages, so that they do not accumulate."""
        for _ in self._client.drain():
            continue


def round_trips(
    socket: Socket,
    count: int,
    ask: Callable[[], Frames],
    check: Callable[[list[bytes]], None] = lambda frames: None,
) -> list[float]:
    """Microseconds from each message of `ask` to its answer. Raises zmq.Again without one."""
    socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
    samples = []
    for _ in range(count):
        frames = ask()
        started = time.perf_counter_ns()
        socket.send_multipart(frames)
        received = socket.recv_multipart()
        samples.append((time.perf_counter_ns() - started) / 1e3)
        check(received)
    return samples


def echo(kind: str, address: str, frames: Frames) -> None:
    """The other end of a ping-pong, in a process of its own, until it gets the message to stop."""
    context: zmq.Context[Socket] = zmq.Context()
    socket = open_socket(context, zmq.DEALER, Endpoint(address), bind=True)
    if kind == "echo":
        while socket.recv_multipart() != [STOP]:
            socket.send_multipart(frames)
    else:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_echo_from_loop(socket, frames))
    socket.close(linger=0)
    context.term()


async def _echo_from_loop(socket: Socket, frames: Frames) -> None:
    stopped = asyncio.Event()

    def on_message() -> None:
        while True:
            try:
                received = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if received == [STOP]:
                return stopped.set()
            socket.send_multipart(frames)

    watcher = SocketWatcher(socket, on_message)
    await stopped.wait()
    watcher.close()


class PingPong:
    """A process that answers every message with the same frames."""

    def __init__(self, kind: str, directory: str, frames: Frames) -> None:
        address = f"ipc://{directory}/{kind}"
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket = open_socket(self._context, zmq.DEALER, Endpoint(address), bind=False)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=echo, args=(kind, address, frames))
        self._process.start()

    def close(self) -> None:
        self.socket.send_multipart([STOP])
        self._process.join()
        self.socket.close(linger=0)
        self._context.term()


def measure(mode: str, *, count: int, repeats: int) -> dict[str, Any]:
    """One row."""
    warm_up = 200
    num_steps = warm_up + count * repeats
    ours: list[float] = []
    bare: dict[str, list[float]] = {"echo": [], "watcher": []}
    with Engine(mode, num_steps) as engine, tempfile.TemporaryDirectory() as directory:
        round_trips(engine.socket, warm_up, engine.answer, engine.check)
        question: Frames = [bytes(engine.answer_bytes)]
        plan: Frames = [bytes(engine.plan_bytes)]
        assert engine.num_frames == 1, engine.num_frames
        others = {kind: PingPong(kind, directory, plan) for kind in bare}
        try:
            for other in others.values():
                round_trips(other.socket, warm_up, lambda: question)
            for _ in range(repeats):
                for kind, other in others.items():
                    bare[kind] += round_trips(other.socket, count, lambda: question)
                ours += round_trips(engine.socket, count, engine.answer, engine.check)
                engine.drain_client()
        finally:
            for other in others.values():
                other.close()
    row: dict[str, Any] = {"mode": mode, **report.times(ours, "round_trip")}
    for kind, samples in bare.items():
        row[kind] = report.times(samples, "round_trip")
    row["ratio"] = row["round_trip_us"] / row["echo"]["round_trip_us"]
    row["watcher_ratio"] = row["round_trip_us"] / row["watcher"]["round_trip_us"]
    row["plan_bytes"], row["answer_bytes"] = engine.plan_bytes, engine.answer_bytes
    return row


def parts(mode: str, *, count: int) -> dict[str, Any]:
    """Median microseconds of the parts of a step in the scheduler process, with a stopwatch."""
    with Engine(mode, count + 200, is_timed=True) as engine:
        samples = round_trips(engine.socket, count, engine.answer, engine.check)
    assert engine.live.findings is not None
    return {"mode": mode, "round_trip_us": float(np.median(samples)), **engine.live.findings}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--round-trips", type=int, default=2000, help="in each repeat")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    modes = ("sync", "async")
    count = options.round_trips
    rows = [measure(mode, count=count, repeats=options.repeats) for mode in modes]
    found = [parts(mode, count=count) for mode in modes]
    report.write(options.json, rows, parts=found)
    for one in found:
        print(f"\n{one['mode']}: {one['round_trip_us']:.1f} us with a stopwatch in the scheduler")
        for name, figures in one.items():
            if isinstance(figures, dict):
                print(f"  {figures['median_us']:8.1f} us  {figures['calls']:7} times  {name}")


if __name__ == "__main__":
    main()
