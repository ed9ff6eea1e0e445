"""Both sides of a gateway under test: an engine that computes nothing, and clients that read
streams at minimal cost."""

import json
import select
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import (
    ClientHello,
    EngineIdentity,
    EngineReady,
    ToClient,
    ToEngine,
)
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCapacity, LongestRequest
from longshore.protocol.outputs import EngineOutputs, FinishReason, TokenLogprobs
from longshore.protocol.outputs import FinishedRequest as End
from longshore.protocol.requests import AbortRequests, AddRequest
from longshore.protocol.transport.channel import (
    Endpoint,
    ServerChannel,
    open_socket,
)

IDENTITY: Final = EngineIdentity(
    model_fingerprint="none",
    dtype="float32",
    block_size=16,
    max_model_len=1 << 20,
    max_num_seqs=4096,
    max_num_batched_tokens=1 << 20,
    hash_seed_digest="none",
)
CAPACITY: Final = KVCapacity(
    1 << 20, 0, (FullAttentionSpec(16, 1, 2, 4),), LongestRequest(IDENTITY.max_model_len)
)
STRIDE: Final = 37
"""Offset between the first tokens of streams i and i - 1 in the list that all of them repeat."""
NUM_LISTED: Final = 3
CHUNK_BYTES: Final = 1 << 16


class Job(msgspec.Struct, frozen=True):
    """A number of steps, one message each; then, with `ends`, the end of all requests.

    steps_per_s: pace of the steps; None: as fast as they can be sent.
    """

    num_streams: int
    num_steps: int
    steps_per_s: float | None = None
    ends: bool = False


def run_engine(endpoint: Endpoint, token_ids: Sequence[int], jobs: Connection) -> None:
    """Carry out one `Job` at a time, and send back the times at which its steps were sent, on the
    clock of `perf_counter`. Returns when the connection closes. A request's seed is its number.
    """
    engine = _Engine(endpoint, np.array(token_ids, np.int32))
    while True:
        if jobs.poll(0.02):
            try:
                job = jobs.recv()
            except EOFError:
                return
            jobs.send(engine.carry_out(job))
        engine.take_requests()


class _Engine:
    def __init__(self, endpoint: Endpoint, token_ids: np.ndarray[Any, Any]) -> None:
        socket = open_socket(zmq.Context.instance(), zmq.ROUTER, endpoint, bind=True)
        self._channel: ServerChannel[ToClient, ToEngine] = ServerChannel(socket, ToEngine)
        self._token_ids = token_ids
        self._live: dict[int, AddRequest] = {}
        self._step = 0

    def take_requests(self) -> None:
        while (received := self._channel.receive()) is not None:
            self._peer, message = received
            match message:
                case ClientHello():
                    self._send(EngineReady("engine-0.1", IDENTITY, 1 << 20, CAPACITY))
                case AddRequest():
                    self._live[message.handle] = message
                case AbortRequests(handles):
                    for handle in handles.tolist():
                        self._live.pop(handle, None)

    def _send(self, message: ToClient) -> None:
        assert self._channel.send(self._peer, message)

    def carry_out(self, job: Job) -> list[float]:
        while len(self._live) != job.num_streams:
            self.take_requests()
            time.sleep(0.001)
        if job.ends:
            ends = (End(each, FinishReason.LENGTH_CAPPED, self._step) for each in self._live)
            self._send(EngineOutputs(finished=tuple(ends)))
            self._live.clear()
            self._step = 0
            return []
        handles = np.fromiter(self._live, np.int32, len(self._live))
        starts = np.array([(each.sampling.seed or 0) * STRIDE for each in self._live.values()])
        scored = handles if next(iter(self._live.values())).sampling.logprobs else None
        sent_s = []
        begun_s = time.perf_counter()
        for index in range(job.num_steps):
            if job.steps_per_s is not None:
                time.sleep(max(begun_s + index / job.steps_per_s - time.perf_counter(), 0))
            tokens = self._token_ids[(starts + self._step) % len(self._token_ids)]
            scores = None if scored is None else self._scores(scored, tokens)
            sent_s.append(time.perf_counter())
            self._send(EngineOutputs(handles, tokens, scores))
            self._step += 1
        return sent_s

    def _scores(self, handles: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> TokenLogprobs:
        num = len(handles)
        prompts = [len(each.prompt_token_ids) for each in self._live.values()]
        listed = np.stack([tokens, tokens, np.roll(tokens, 1)], axis=1).reshape(-1)
        return TokenLogprobs(
            owners=handles,
            positions=int32_array(np.array(prompts) + self._step),
            ranks=np.ones(num, np.int32),
            num_listed=np.full(num, NUM_LISTED, np.int32),
            token_ids=listed,
            logprobs=np.linspace(-4, -1, NUM_LISTED * num, dtype=np.float32),
        )


class Streams:
    """Streamed answers, each on a connection of its own. Only the chunks of the first `num_probes`
    streams are decoded and timed; of the others, events are counted.

    arrivals:   per probe, (time on the clock of `perf_counter`, characters of text so far).
    num_events: number of events of all streams.
    """

    def __init__(
        self, port: int, path: str, bodies: Sequence[dict[str, Any]], num_probes: int
    ) -> None:
        self._epoll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._probes: dict[int, tuple[list[tuple[float, int]], bytearray]] = {}
        self.arrivals: list[list[tuple[float, int]]] = []
        self.num_events = 0
        for body in bodies:
            self._open(port, path, json.dumps(body).encode(), len(self.arrivals) < num_probes)

    def _open(self, port: int, path: str, body: bytes, is_probe: bool) -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        self._sockets[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLIN)
        if is_probe:
            self.arrivals.append([])
            self._probes[connection.fileno()] = self.arrivals[-1], bytearray()

    @property
    def num_open(self) -> int:
        return len(self._sockets)

    def read(self, timeout_s: float) -> bool:
        """Read available data; False if there is none. Raises RuntimeError on a rejected probe."""
        ready = self._epoll.poll(timeout_s)
        now_s = time.perf_counter()
        for descriptor, _ in ready:
            data = self._sockets[descriptor].recv(CHUNK_BYTES)
            if not data:
                self._sockets.pop(descriptor).close()
                continue
            self.num_events += data.count(b"data: ")
            if descriptor in self._probes:
                self._look(*self._probes[descriptor], data, now_s)
        return bool(ready)

    def _look(
        self, arrivals: list[tuple[float, int]], rest: bytearray, data: bytes, now_s: float
    ) -> None:
        rest += data
        if not arrivals and not rest.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(rest.decode())
        *whole, last = rest.split(b"\n\n")
        rest[:] = last
        num_characters = arrivals[-1][1] if arrivals else 0
        for event in whole:
            _, _, said = event.partition(b"data: ")
            if said and said != b"[DONE]":
                num_characters += sum(map(len, _texts(json.loads(said))))
        arrivals.append((now_s, num_characters))

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._epoll.close()


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    for choice in chunk["choices"]:
        yield choice["text"] if "text" in choice else choice["delta"].get("content", "")
